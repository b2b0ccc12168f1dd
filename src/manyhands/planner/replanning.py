"""Re-planning: a plan for the present devices, made from the one that ran before some left or joined (ASTEROID §3.4).

light   Incremental: the old plan is adapted. Batch, micro-batches and order stay. Samples and tiles are divided again
        among the remaining devices of a stage, and a stage without devices is dissolved. Cuts move to where the round
        is shortest with the devices of each stage as they are; where that is much faster, one device moves to a
        neighbour or a shared stage is split in two. A device that joins goes where it helps most. Cuts that are nearly
        as good where they were stay, because every layer that moves takes its weights along.
heavy   Full: planned from scratch, as at the start.

The seconds of a stage come from `steps.py` (samples) or from the sum of its devices' speeds (tiles, channels), for all
its possible layers at once. With the devices of every stage given, the best cuts follow from the last stage to the
first, by the recurrence of `hybrid.py` and one candidate for each place. The price, a simulation, decides, on memory as
well: a plan that it refuses gives way to a simpler shape, down to one device alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError, unknown
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.cutting import TINY
from manyhands.planner.incremental import IncrementalReplanner, homes_for
from manyhands.planner.strategies import choose, is_strategy_name, plan_by_name, strategy_names
from manyhands.planner.task import Price, Task

How = Literal["light", "heavy"]
WAYS = ("auto", "light", "heavy")
NEAR_IDEAL = 1.25
"""An incremental plan within this of the ideal is taken without searching for another."""


@dataclass(frozen=True)
class Replanned:
    """A plan for the present devices: the way it was made, the reason, and its price."""

    plan: Plan
    how: How
    reason: str
    seconds: float


def replanned(
    plan: Plan,
    network: Network,
    cluster: Cluster,
    profile: Profile,
    *,
    price: Price,
    how: str = "auto",
    strategy: str = "pipeline",
    reference_seconds: float | None = None,
) -> Replanned:
    """Return the old `plan` adapted to the devices of `cluster`: some of its devices may be missing, and some may be
    new.

    `profile` holds the present devices and, if possible, those that left. `reference_seconds`: what a round of the old
    plan took; in proportion to capacity it says what to expect now. Without it, that is the work divided perfectly
    among the present devices, with nothing to send, which few plans come near. `strategy`: for a new plan.
    """
    if how not in WAYS:
        raise unknown("way of re-planning", how, WAYS)
    if not is_strategy_name(strategy):
        raise unknown("strategy", strategy, strategy_names())
    if plan.order == "replay":  # another order would step after other batches
        how = "light"
    if how == "heavy":
        return _full(plan, network, cluster, profile, price, strategy)
    try:
        incremental = _incremental(plan, network, cluster, profile, price)
    except ManyhandsError as error:
        if how == "light":
            raise
        full = _full(plan, network, cluster, profile, price, strategy)
        return replace(full, reason=f"The old plan cannot be adapted ({error.message}) {full.reason}")
    if how == "light":
        return incremental
    ideal = _ideal_seconds(plan, incremental.plan, network, cluster, profile, reference_seconds)
    if incremental.seconds <= NEAR_IDEAL * ideal:
        return incremental
    far = f"{incremental.seconds:.3g} s a round, where about {ideal:.3g} s was expected"
    try:
        full = _full(plan, network, cluster, profile, price, strategy)
    except ManyhandsError as error:
        return replace(
            incremental, reason=f"{incremental.reason} Adapted it takes {far}; no new plan was found ({error.message})"
        )
    if incremental.seconds <= full.seconds:
        return replace(
            incremental, reason=f"{incremental.reason} Adapted it takes {far}; a new plan takes {full.seconds:.3g} s."
        )
    return replace(
        full, reason=f"The adapted old plan takes {far}; a new plan takes {full.seconds:.3g} s. {full.reason}"
    )


def _ideal_seconds(
    old: Plan, incremental: Plan, network: Network, cluster: Cluster, profile: Profile, reference_seconds: float | None
) -> float:
    """Return the seconds of a round as efficient as the old one. After a loss, a device that neither plan uses does not
    count, because it was left out for a reason. If no device is missing and one joined, all count."""
    samples, layers = old.micro_batch_size, range(len(network.layers))

    def speed(name: str) -> float:
        seconds = sum(sum(profile.of(name).layer_seconds(layer, samples)) for layer in layers)
        return 1 / max(seconds, TINY)

    if reference_seconds is None:
        return old.micro_batches / sum(map(speed, cluster.names))
    worked = {name for stage in old.stages for name in stage.devices}
    works = worked | {name for stage in incremental.stages for name in stage.devices}
    present = [name for name in cluster.names if name in works or worked <= set(cluster.names)]
    speeds = [speed(name) for name in worked if name in profile.devices]
    usual = sum(speeds) / len(speeds) if speeds else 1.0
    return reference_seconds * (sum(speeds) + usual * (len(worked) - len(speeds))) / sum(map(speed, present))


# ---- Full


def _full(plan: Plan, network: Network, cluster: Cluster, profile: Profile, price: Price, strategy: str) -> Replanned:
    """Return the named strategy's plan, or where it has none, the best of all strategies."""
    has_statistics = plan.is_training and any(op.statistics for op in network.ops)
    task = Task(
        network, cluster, profile, plan.batch_size,
        micro_batches=plan.micro_batches if has_statistics else None,  # else batch norm would see other batches
        order="1f1b" if plan.order == "eager" else plan.order,
        optimizer_slots=plan.optimizer_slots,
        batch_norm=plan.batch_norm,
        warm_up="2(P-p)-1" if isinstance(plan.warm_up, tuple) else plan.warm_up,
    )  # fmt: skip

    def finished(bare: Plan) -> Plan:
        order = "stream" if plan.order == "stream" else bare.order
        homes = homes_for(plan, bare.stages, network, cluster)
        other = msgspec.structs.replace(
            bare, order=order, homes=homes, bucket_bytes=plan.bucket_bytes, gradient_norm=plan.gradient_norm
        )
        return resolve(other, network, cluster)

    def whole_price(bare: Plan) -> float:
        return price(finished(bare))

    refusal: ManyhandsError | None = None
    for name, subtask, words in _attempts(strategy, task):
        try:
            candidate = (
                choose(subtask, whole_price, corners_only=True)
                if name == "auto"
                else plan_by_name(name, subtask, whole_price)
            )[0]
        except ManyhandsError as error:
            refusal = refusal or error
            continue
        if candidate.plan is None:
            refusal = refusal or BadPlan(candidate.reason)
            continue
        return Replanned(
            finished(candidate.plan), "heavy", f"Planned again ({candidate.name}){words}.", candidate.seconds
        )
    assert refusal is not None
    raise refusal


def _attempts(strategy: str, task: Task) -> Iterator[tuple[str, Task, str]]:
    """Yield each attempt and its description: the strategy, all of them, and all with another number of
    micro-batches."""
    count = len(task.cluster.devices)
    yield "single" if count == 1 else strategy, task, ""
    if strategy != "auto" and count > 1:
        yield "auto", task, f": {strategy} has no plan for these {count} devices"
    if task.micro_batches is not None:
        words = f": nothing fits with {task.micro_batches} micro-batches, and batch statistics change with their number"
        yield "auto", replace(task, micro_batches=None), words


# ---- Incremental


def _incremental(plan: Plan, network: Network, cluster: Cluster, profile: Profile, price: Price) -> Replanned:
    """Return the first shape of the old plan that can be cut, resolves and fits."""
    replanner = IncrementalReplanner(plan, network, cluster, profile)
    refusal: ManyhandsError | None = None
    for alternatives in replanner.shapes():
        for is_tight in (True, False):  # the model's memory is a little too large; the price decides
            best = min(alternatives, key=lambda drafts: replanner.cut(drafts, is_tight)[0])
            drafts = replanner.grown(replanner.regrouped(best, is_tight), is_tight)
            for cuts in replanner.ways_to_cut(drafts, is_tight):
                try:
                    repaired = replanner.built(drafts, cuts)
                    return Replanned(repaired, "light", replanner.reason(repaired), price(repaired))
                except ManyhandsError as error:
                    refusal = refusal or error
    raise refusal or BadPlan(
        f"The plan's devices ({', '.join(plan.devices)}) are not in cluster {cluster.name} any more.",
        hint="Plan from scratch: how='heavy'.",
    )

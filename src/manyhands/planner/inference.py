"""Plans for inference by name; `auto` takes the fastest of them, for latency or for throughput.

single      the fastest device alone
samples     micro-batches of several samples, each device takes some (throughput only)
tiles       the maps cut into a grid; the places of exchange and the depth are chosen
deepthings  tiles that exchange nothing, up to some depth
modnn       rows over all devices, exchanged at every layer that needs it
coates      rows and columns, the same
channels    channel groups divided among devices: a decoupled network's own, else parts of all channels
pipeline    stages of one device each
split       two stages: the first on the device that has the input, the rest on another

Latency: seconds of one sample alone. Throughput: seconds between two answers in a long stream, of one sample or several
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError, unknown
from manyhands.facts.network import Network
from manyhands.facts.profile import Profile
from manyhands.planner.channel_plans import channels
from manyhands.planner.inference_stages import one_sample_only, pipelines, sample_shares, singles, splits
from manyhands.planner.inference_tiles import MOST_TILES, coates, deepthings, modnn, tiles
from manyhands.planner.pricing import OBJECTIVES as OBJECTIVES
from manyhands.planner.pricing import Objective, Pricer
from manyhands.planner.task import PlanCandidate, Task

INFERENCE_STRATEGIES = (
    "auto", "single", "samples", "tiles", "deepthings", "modnn", "coates", "channels", "pipeline", "split",
)  # fmt: skip
Maker = Callable[[Task, Pricer], list[PlanCandidate]]
WITH_CARRIED = ("single", "pipeline", "split")
"""The strategies for a network that carries buffers from sample to sample: each lies whole on one device."""
AT_A_TIME = (2, 4, 8)
"""Samples of a batch that are tried for throughput."""
_WORTH = 0.95
"""Batches must be this much faster: every sample of a batch takes as long as the whole batch."""


def inference_task(network: Network, cluster: Cluster, profile: Profile, home: str = "") -> Task:
    """Return the task to plan: one sample after another, forward only."""
    if home:
        cluster.device(home)
    return Task(network, cluster, profile, 1, 1, order="stream", optimizer_slots=0, home=home)


def objective_named(name: str) -> Objective:
    """Return an objective by its name."""
    by_name: dict[str, Objective] = {objective: objective for objective in OBJECTIVES}
    if name not in by_name:
        raise unknown("objective", name, by_name)
    return by_name[name]


def _single(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    return pricer.rank(singles(task))


def _samples(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    if pricer.is_latency:
        raise one_sample_only(task)
    _needs_two(task, "Samples")
    return pricer.rank(sample_shares(task))


def _pipeline(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    _needs_two(task, "A pipeline")
    return pricer.rank(pipelines(task))


def _split(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    _needs_two(task, "A split")
    return pricer.rank(splits(task))


def _needs_two(task: Task, subject: str) -> None:
    count = len(task.cluster.names)
    if count < 2:
        raise BadPlan(f"{subject} need(s) at least two devices; cluster {task.cluster.name} has {count}.")


MAKERS: dict[str, Maker] = {
    "single": _single, "samples": _samples, "pipeline": _pipeline, "split": _split, "channels": channels,
    "tiles": tiles, "modnn": modnn, "coates": coates, "deepthings": deepthings,
}  # fmt: skip


def inference_plans(strategy: str, task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return the priced plans of a named strategy (all but `auto`, which chooses), the fastest first."""
    if strategy not in MAKERS:
        raise unknown("strategy", strategy, INFERENCE_STRATEGIES)
    return _in_batches(MAKERS[strategy](task, pricer), pricer)


def _in_batches(candidates: list[PlanCandidate], pricer: Pricer) -> list[PlanCandidate]:
    """Return the candidates and, for throughput, the fastest plan of each order with several samples at a time. A batch
    needs as many messages as one sample, and its operators have more to do at once."""
    plans = {
        candidate.plan.order: (candidate.name, candidate.plan)
        for candidate in reversed(candidates)
        if candidate.plan is not None
    }
    if pricer.is_latency or any(plan.micro_batch_size > 1 for _, plan in plans.values()):
        return candidates
    sized = [
        (f"{name}, {count} at a time", msgspec.structs.replace(plan, batch_size=count * plan.batch_size))
        for name, plan in plans.values()
        for count in AT_A_TIME
    ]
    least = (pricer.least_seconds(plan) for _, plan in reversed(sized))
    if next((seconds for seconds in least if seconds < inf), inf) >= _WORTH * pricer.best:
        return candidates  # the larger a batch that fits, the less each sample takes
    try:
        more = pricer.rank(sized, may_interleave=False)
    except ManyhandsError:
        return candidates  # not even two fit
    return sorted(
        [*candidates, *(candidate for candidate in more if candidate.seconds < _WORTH * candidates[0].seconds)],
        key=_seconds,
    )


def _seconds(candidate: PlanCandidate) -> float:
    return candidate.seconds


def inference_candidates(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return the best plan of every strategy, the fastest first, and last those that cannot run, with the reason. Ties
    go to the simpler plan: one device alone before all others."""
    candidates = []
    for name, make in MAKERS.items():
        if len(task.cluster.names) < 2 and name != "single":
            continue
        if name == "split" and not task.home:
            continue  # no device in particular has the input: a pipeline of two covers more
        if task.network.carries and name not in WITH_CARRIED:
            continue
        if name in ("modnn", "coates") and len(task.cluster.names) > MOST_TILES:
            continue  # they take all devices, and so many do not help
        try:
            candidates.append(_in_batches(make(task, pricer), pricer)[0])
        except ManyhandsError as error:
            candidates.append(PlanCandidate(name, None, inf, error.message))
    return sorted(candidates, key=_seconds)

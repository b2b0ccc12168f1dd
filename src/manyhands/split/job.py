"""The job of one `mh.split_train` call with two ends: measure, decide, follow the link, report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import msgspec

from manyhands.executor.packing_cost import packing_cost
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.calibration import Calibration
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.facts.trace import LinkTrace
from manyhands.facts.units import format_bytes
from manyhands.job.base import Guide, Job
from manyhands.job.callbacks import OnStep
from manyhands.job.result import TrainResult
from manyhands.planner.rates import LONGEST_PROBE_SECONDS, EngineSettings
from manyhands.planner.split import Deployment, LinkRates, SplitProfile
from manyhands.planner.split_profile import candidate_cuts, split_profile
from manyhands.plans.planning import batch_norm_named
from manyhands.runtime.controller import Controller
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.following import Following
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring import measure
from manyhands.split.config import SplitConfig
from manyhands.split.controller import (
    FIRST_TAU,
    REDEPLOY_SECONDS,
    Course,
    LinkWatch,
    Redeployed,
    SplitChoice,
    SplitController,
)
from manyhands.split.plans import (
    Ends,
    Phases,
    mode_of,
    side_of,
)
from manyhands.split.session import Two, linked, look_at_link, rates_of
from manyhands.split.stored_calibration import calibrated, find_calibration

LEAST_BITS = 8
"""The fewest bits that features are packed in, where no calibration says otherwise."""
LATER_PART = 0.05
"""The fraction of the epochs with a calibration's K for the first weights, before that for later ones (the paper: 8 of
160)."""
CHECKPOINT_PART = 0.1
"""The fraction of the link's time that checkpoints may take: each fetches the server's part."""


@dataclass(repr=False)
class SplitResult(TrainResult):
    """The result of training a split. The module holds the trained weights. Bytes are those between edge and server."""

    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(step, cut): from this step on, the layers before the cut were upstream."""
    changes: list[Redeployed] = field(default_factory=list)
    """Every change of cut, K or bits, and why."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Features, gradients, and layers that changed sides."""
    bytes_moved: int = 0
    """The part of these bytes that were layers that changed sides."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step, as rounds ended."""
    split: SplitProfile | None = None
    """The profile that the decisions were made from."""
    deployment: Deployment | None = None
    """The last deployment."""
    rates: LinkRates | None = None
    """The rates that the link was assumed to have at the beginning."""
    set_rates: list[tuple[float, float, float]] = field(default_factory=list)
    """The rates that were set where the link followed a trace: seconds, bytes per second up and down."""


class SplitJob(Job):
    """The job of one `split_train` call, with its two ends at hand."""

    two: Two
    trace: LinkTrace | None
    steering: SplitController
    last_planned: PlannedRun

    def between(self, two: Two, trace: LinkTrace | None) -> Self:
        """Return the job with its two ends, and the trace that the link between them follows."""
        self.two, self.trace = two, trace
        return self

    @property
    def settings(self) -> SplitConfig:
        """The configuration of this kind of job."""
        assert isinstance(self.config, SplitConfig)
        return self.config

    # Before it runs

    def prepared(self) -> PlannedRun:
        """Measure both ends and the link, decide, and return the plan with its prediction."""
        config, two, network, workload = self.settings, self.two, self.graph.network, self.workload
        coordinator, size = self.session.coordinator, workload.batch_size
        cluster, profile = measure(
            self.session, self.graph, size, optimizer=workload.optimizer, say=self.say, ladder=(size,)
        )
        rates = self._first_rates(coordinator)
        cluster = linked(cluster, two.edge, two.server, rates)
        ends = Ends(
            network.name, len(network.layers), size, two.edge, two.server,
            side_of(config.edge_side), mode_of(config.mode), config.error_feedback, config.pack_gradients,
            workload.optimizer_slots, batch_norm_named(workload.batch_norm), config.clip_norm is not None,
        )  # fmt: skip
        choice = SplitChoice(config.cut_in(network), config.widths, config.rival)
        self.steering = SplitController(
            ends, self._profile(cluster, profile), rates, choice,
            Course(self._phases(), workload.order.steps_per_epoch, self.start.steps_done, self.last_step),
            profile, cluster, backup_every=self.settings.backup_every,
            watch=LinkWatch(
                lambda up, down: look_at_link(
                    coordinator, two.edge, two.server, up, down, limit_seconds=LONGEST_PROBE_SECONDS
                ),
                settings=EngineSettings(**{"tau": FIRST_TAU, **(self.settings.engine or {})}),
            ),
        )  # fmt: skip
        self.rates = rates
        return self.checked(resolve(self.steering.plan, network, cluster), cluster, profile)

    def _first_rates(self, coordinator: Coordinator) -> LinkRates:
        """Return the mean rates of the trace, or those of a short measurement of the link."""
        trace, two = self.trace, self.two
        if trace is None:
            return rates_of(*look_at_link(coordinator, two.edge, two.server))
        if trace.is_one_way:
            note = f"The trace {trace.name} has one direction; it serves both."
            self.record.event("note", text=note)
            if self.say is not None:
                self.say(note)
        return LinkRates(trace.up.mean, trace.down.mean, self.settings.delay)

    def _profile(self, cluster: Cluster, profile: Profile) -> SplitProfile:
        config, two, network = self.settings, self.two, self.graph.network
        members = self.session.coordinator.members
        slow = [members[name].facts.slowdown for name in (two.edge, two.server)]
        side = side_of(config.edge_side)
        cost = packing_cost(threads=1).between(*(slow if side == "upstream" else slow[::-1]))
        measured = split_profile(
            network, profile.of(two.edge), profile.of(two.server), self.workload.batch_size, edge_side=side,
            cuts=candidate_cuts(network) if config.labels == "cloud" else None,
            optimizer_slots=self.workload.optimizer_slots, least_bits=self._least_bits(),
            step_bytes_per_second=(
                cluster.device(two.edge).memory_bytes_per_second, cluster.device(two.server).memory_bytes_per_second,
            ),
        )  # fmt: skip
        return msgspec.structs.replace(
            measured, memory_bytes=config.edge_bytes, packs_gradients=config.pack_gradients,
            redeploy_seconds=REDEPLOY_SECONDS, phases=self._phases(), packing_seconds=cost["packing_seconds"],
            packing_seconds_per_byte=cost["packing_seconds_per_byte"],
            unpacking_seconds_per_byte=cost["unpacking_seconds_per_byte"],
            feedback_seconds_per_byte=cost["feedback_seconds_per_byte"],
        )  # fmt: skip

    @cached_property
    def _calibration(self) -> Calibration | None:
        """The result of short trainings, made now if the user asks for them, else earlier; None: there is none."""
        config, workload = self.settings, self.workload
        if config.calibrate_seconds:
            result = calibrated(
                self.graph, workload.samples, self.test, workload.optimizer, batch_size=workload.batch_size,
                data=config.data_name, seed=workload.seed, seconds=config.calibrate_seconds,
                allowed_drop=config.allowed_drop, mode=mode_of(config.mode), say=self.say,
            )  # fmt: skip
        else:
            stored = find_calibration(self.graph.network, config.data_name, workload.batch_size)
            if stored is None or not stored.is_complete:
                return None
            result = stored
        self.record.event("calibrated", bits=result.bits, k=result.k, later_k=result.later_k, seconds=result.seconds)
        return result

    def _least_bits(self) -> int | Mapping[int, int]:
        """Return the fewest bits, for all cuts or by cut: as the user says, as a calibration found them, or eight."""
        if self.settings.bits != "auto":
            return min(self.settings.widths)
        if self.settings.least_bits is not None:
            return self.settings.least_bits
        return LEAST_BITS if self._calibration is None else self._calibration.least_bits

    def _phases(self) -> Phases:
        """Return K by epoch: as the user says, or as a calibration found it."""
        if self.settings.k != "auto" or self._calibration is None:
            return self.settings.phases
        return self._calibration.phases(max(1, round(LATER_PART * self.workload.epochs)))

    # What `Job.run` calls

    def replanner(self, planned: PlannedRun, strategy: str) -> Guide:
        return self.steering

    def controller(self) -> Controller | None:
        return self.steering

    def backup_every(self, planned: PlannedRun) -> int:
        return self.steering.backups()

    def checkpoint_every(self, planned: PlannedRun) -> int:
        """Return the steps between checkpoints: so many that fetching the server's part does not crowd the link."""
        usual = super().checkpoint_every(planned)
        controller = self.steering
        running, rate = controller.engine.profile.running_bytes, self.rates.down_bytes_per_second
        before = running[controller.deployment.cut]
        server_bytes = running[-1] - before if self.settings.edge_side == "upstream" else before
        seconds = controller.batch_seconds(controller.deployment)
        if not server_bytes or not seconds or not rate:
            return usual
        return max(usual, int(server_bytes / rate / CHECKPOINT_PART / seconds))

    # While it runs

    def train(self, planned: PlannedRun, on_step: OnStep | None) -> SplitResult:
        controller, two = self.steering, self.two
        seconds: list[float] = []

        def stepped(step: int, loss: float, took: float) -> None:
            controller.stepped(step)
            seconds.append(took)
            if on_step is not None:
                on_step(step, loss, took)

        least = 1 if controller.can_work_alone() else 2
        retry_policy = RetryPolicy("auto", least, 2, self.session.rejoin_seconds)
        with self._following() as following:
            result, self.last_planned = self.run(planned, stepped, "auto", retry_policy)
        moved, between = controller.moved_bytes(), result.bytes_between
        up, down = (between.get(pair, 0) for pair in ((two.edge, two.server), (two.server, two.edge)))
        common = {entry.name: getattr(result, entry.name) for entry in fields(TrainResult)}
        return SplitResult(
            **common, cuts=controller.cuts, changes=controller.changes, bytes_up=up + moved[0],
            bytes_down=down + moved[1], bytes_moved=sum(moved), step_seconds=seconds, split=controller.engine.profile,
            deployment=controller.deployment, rates=self.rates,
            set_rates=[(rate.seconds, rate.up_bytes_per_second, rate.down_bytes_per_second) for rate in following.set]
            if following is not None
            else [],
        )  # fmt: skip

    @contextlib.contextmanager
    def _following(self) -> Iterator[Following | None]:
        if self.trace is None:
            yield None
            return
        edge, server, coordinator = self.two.edge, self.two.server, self.session.coordinator
        with Following(
            coordinator, self.trace, up=(edge, server), down=(server, edge), delay_seconds=self.settings.delay
        ) as following:
            yield following

    def tell(self, event: str, /, **facts: Any) -> None:
        """Log a change as what it is: another cut, K or width."""
        if event != "recovered":
            super().tell(event, **facts)
            return
        change = self.steering.changed(facts)
        if change is None:  # it only looked at the link
            self.record.event("looked", **facts)
            return
        more = {name: facts[name] for name in ("replayed", "generation")}
        self.record.event("redeployed", **change_facts(change), **more)
        if self.say is not None:
            self.say(changed_text(change, self.graph.network, self.steering.ends.alone))


def change_facts(change: Redeployed) -> dict[str, Any]:
    """Return one change as the run's record stores it."""
    return {
        "before": msgspec.to_builtins(change.before), "after": msgspec.to_builtins(change.after),
        "reason": change.reason, "step": change.step, "seconds": change.seconds, "bytes_moved": change.bytes_moved,
    }  # fmt: skip


REASONS = {
    "rates": "the link has changed", "phase": "another K begins", "lost": "the server is lost",
    "back": "the server is back",
}  # fmt: skip


def deployment_text(deployment: Deployment, network: Network, alone: int) -> str:
    """Return a deployment in words: where the cut is, how far the edge runs ahead, how features are packed."""
    if deployment.cut == alone:
        return "everything at the edge"
    k = "no bound" if deployment.k is None else f"K={deployment.k}"
    return f"cut before layer {deployment.cut} ({network.layers[deployment.cut].name}), {k}, {deployment.bits} bits"


def changed_text(change: Redeployed, network: Network, alone: int) -> str:
    moved = f", {format_bytes(change.bytes_moved)} moved" if change.bytes_moved else ""
    return (
        f"Step {change.step}: {deployment_text(change.after, network, alone)}, as {REASONS[change.reason]} "
        f"({change.seconds:.2f} s{moved})."
    )


def deployments(result: SplitResult, network: Network) -> list[tuple[int, str, str, float, int]]:
    """Return rows of: first step, deployment, reason, seconds that getting there took, bytes that moved."""
    assert result.deployment is not None
    alone = result.split.edge_only if result.split is not None else len(network.layers)
    first = result.changes[0].before if result.changes else result.deployment
    rows = [(result.cuts[0][0], deployment_text(first, network, alone), "the beginning", 0.0, 0)]
    for change in result.changes:
        text = deployment_text(change.after, network, alone)
        rows.append((change.step, text, REASONS[change.reason], change.seconds, change.bytes_moved))
    return rows

"""One call of `mh.split_train` with its two ends at hand: measure, decide, follow, tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import msgspec

from manyhands.executor.optimizers import slots
from manyhands.executor.packing_cost import packing_cost
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.calibration import Calibration
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.facts.trace import LinkTrace
from manyhands.facts.units import format_bytes
from manyhands.job.base import Guide, Job, OnStep
from manyhands.job.options import Lasting
from manyhands.job.result import TrainResult
from manyhands.planner.split import Deployment, LinkRates, SplitProfile
from manyhands.planner.split_profile import candidate_cuts, split_profile
from manyhands.plans.planning import batch_norm_named
from manyhands.runtime.controller import Controller
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.following import Following
from manyhands.session.measuring import measure
from manyhands.split.calibration import calibrated, find_calibration
from manyhands.split.controller import REDEPLOY_SECONDS, Redeployed, SplitPilot, Wanted
from manyhands.split.plans import (
    CONVENTIONAL,
    Ends,
    Phases,
    bits_of,
    cut_of,
    labels_of,
    mode_of,
    phases_of,
    phases_text,
    side_of,
)
from manyhands.split.session import Two, linked, look_at_link, rates_of

LEAST_BITS = 8
"""What features are packed in at least, where no calibration says otherwise."""
LATER_PART = 0.05
"""Of the epochs: a calibration's K for the first weights, then that for later ones (the paper: 8 of 160)."""
CHECKPOINT_PART = 0.1
"""A checkpoint fetches the server's part: that may take so much of the link's time."""


@dataclass
class SplitResult(TrainResult):
    """What training gave. The module holds the trained weights. Bytes are those between edge and server."""

    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(step, cut): from this step on, the layers before the cut were upstream."""
    changes: list[Redeployed] = field(default_factory=list)
    """Every change of cut, K or bits, and why."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Features, gradients, and layers that changed sides."""
    bytes_moved: int = 0
    """Of these, layers that changed sides."""
    step_seconds: list[float] = field(default_factory=list)
    """Of each step, as rounds ended."""
    split: SplitProfile | None = None
    """What the decisions were made from."""
    deployment: Deployment | None = None
    """The last one."""
    rates: LinkRates | None = None
    """What the link was taken to give at the beginning."""
    set_rates: list[tuple[float, float, float]] = field(default_factory=list)
    """Where the link followed a trace: seconds, bytes per second up and down."""


@dataclass(frozen=True)
class Asked:
    """How the split is to be, checked before anything starts."""

    cut: int | str = "auto"
    bits: int | str = "auto"
    k: int | str | None = 5
    mode: str = "grouped"
    rival: str = ""
    labels: str = "edge"
    edge_side: str = "upstream"
    error_feedback: bool = True
    pack_gradients: bool = False
    least_bits: int | Mapping[int, int] | None = None
    memory_bytes: float | None = None
    delay_seconds: float = 0.0
    data_name: str = ""
    calibrate_seconds: float = 0.0
    allowed_drop: float = 0.01

    def __post_init__(self) -> None:
        self.phases, self.widths  # noqa: B018
        mode_of(self.mode), side_of(self.edge_side)
        Wanted(None, self.widths, "" if self.rival == CONVENTIONAL else self.rival)
        if labels_of(self.labels) == "cloud" and (
            self.edge_side == "downstream" or self.cut == "edge" or self.rival in ("edge-only", "jointdnn")
            or self.calibrate_seconds
        ):  # fmt: skip
            raise BadValue(
                "The labels are at the cloud: what computes the loss must be there, and nothing is calibrated here.",
                hint='Leave out labels="cloud", or edge_side, cut, rival and the calibration.',
            )
        if not 0 <= self.calibrate_seconds < float("inf") or not 0 < self.allowed_drop < 1:
            raise BadValue(
                f"Calibrating for {self.calibrate_seconds} s, allowing a drop of {self.allowed_drop}: the time must be "
                ">= 0, the drop between 0 and 1."
            )
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise BadValue(f"memory_bytes is {self.memory_bytes}; it must be > 0.")

    @property
    def phases(self) -> tuple[tuple[int, int | None], ...]:
        return phases_of(self.k)

    @property
    def widths(self) -> tuple[int, ...]:
        return bits_of(self.bits)

    def cut_in(self, network: Network) -> int | None:
        """The cut that is wanted; None: any."""
        alone = len(network.layers) if self.edge_side == "upstream" else 0
        return cut_of(self.cut, network, candidate_cuts(network), alone)

    @property
    def facts(self) -> dict[str, Any]:
        """What a run folder keeps."""
        k = "auto" if self.k == "auto" else phases_text(self.phases)
        return {
            "cut": self.cut, "bits": self.bits, "k": k, "mode": self.mode, "rival": self.rival,
            "edge_side": self.edge_side, "labels": self.labels, "error_feedback": self.error_feedback,
            "pack_gradients": self.pack_gradients,
        }  # fmt: skip


class SplitJob(Job):
    """One call of `split_train`, with its two ends at hand."""

    asked: Asked
    two: Two
    trace: LinkTrace | None
    steering: SplitPilot
    last_planned: PlannedRun

    def ask(
        self, asked: Asked, two: Two, trace: LinkTrace | None, backup_every: int | None, engine: dict[str, Any]
    ) -> None:
        self.asked, self.two, self.trace, self.backups, self.engine = asked, two, trace, backup_every, engine

    # Before it runs

    def prepared(self) -> PlannedRun:
        """Measure both ends and the link, decide, predict."""
        asked, two, network, options = self.asked, self.two, self.graph.network, self.options
        coordinator, size = self.session.coordinator, options.batch_size
        cluster, profile = measure(
            self.session, self.graph, size, optimizer=options.optimizer, say=self.say, ladder=(size,)
        )
        rates = self._first_rates(coordinator)
        cluster = linked(cluster, two.edge, two.server, rates)
        ends = Ends(
            network.name, len(network.layers), size, two.edge, two.server,
            side_of(asked.edge_side), mode_of(asked.mode), asked.error_feedback, asked.pack_gradients,
            slots(options.optimizer), batch_norm_named(options.batch_norm),
        )  # fmt: skip
        wanted = Wanted(asked.cut_in(network), asked.widths, asked.rival)
        self.steering = SplitPilot(
            ends, self._profile(cluster, profile), rates, wanted, self._phases(), options.order.steps_per_epoch,
            profile, cluster, first_step=self.start.steps_done, last_step=self.last_step,
            backup_every=self.backups,
            probe=lambda up, down: look_at_link(coordinator, two.edge, two.server, up, down), **self.engine,
        )  # fmt: skip
        self.rates = rates
        return self.checked(resolve(self.steering.plan, network, cluster), cluster, profile)

    def _first_rates(self, coordinator: Coordinator) -> LinkRates:
        """The trace's mean, or a look at the link."""
        trace, two = self.trace, self.two
        if trace is None:
            return rates_of(*look_at_link(coordinator, two.edge, two.server))
        if trace.is_one_way:
            note = f"The trace {trace.name} has one direction; it serves both."
            self.record.event("note", text=note)
            if self.say is not None:
                self.say(note)
        return LinkRates(trace.up.mean, trace.down.mean, self.asked.delay_seconds)

    def _profile(self, cluster: Cluster, profile: Profile) -> SplitProfile:
        asked, two, network = self.asked, self.two, self.graph.network
        members = self.session.coordinator.members
        slow = [members[name].facts.slowdown for name in (two.edge, two.server)]
        side = side_of(asked.edge_side)
        cost = packing_cost(threads=1).between(*(slow if side == "upstream" else slow[::-1]))
        measured = split_profile(
            network, profile.of(two.edge), profile.of(two.server), self.options.batch_size, edge_side=side,
            cuts=candidate_cuts(network) if asked.labels == "cloud" else None,
            optimizer_slots=slots(self.options.optimizer), least_bits=self._least_bits(),
            step_bytes_per_second=(
                cluster.device(two.edge).memory_bytes_per_second, cluster.device(two.server).memory_bytes_per_second,
            ),
        )  # fmt: skip
        return msgspec.structs.replace(
            measured, memory_bytes=asked.memory_bytes, packs_gradients=asked.pack_gradients,
            redeploy_seconds=REDEPLOY_SECONDS, phases=self._phases(), packing_seconds=cost["packing_seconds"],
            packing_seconds_per_byte=cost["packing_seconds_per_byte"],
            unpacking_seconds_per_byte=cost["unpacking_seconds_per_byte"],
            feedback_seconds_per_byte=cost["feedback_seconds_per_byte"],
        )  # fmt: skip

    @cached_property
    def _calibration(self) -> Calibration | None:
        """What short trainings found, now or before, if that is wanted."""
        asked, options = self.asked, self.options
        if asked.calibrate_seconds:
            found = calibrated(
                self.graph, options.data, self.test, options.optimizer, batch_size=options.batch_size,
                data=asked.data_name, seed=options.seed, seconds=asked.calibrate_seconds,
                allowed_drop=asked.allowed_drop, mode=mode_of(asked.mode), say=self.say,
            )  # fmt: skip
        else:
            kept = find_calibration(self.graph.network, asked.data_name, options.batch_size)
            if kept is None or not kept.is_complete:
                return None
            found = kept
        self.record.event("calibrated", bits=found.bits, k=found.k, later_k=found.later_k, seconds=found.seconds)
        return found

    def _least_bits(self) -> int | Mapping[int, int]:
        """By cut: as the user says, as a calibration found it, or eight."""
        if self.asked.bits != "auto":
            return min(self.asked.widths)
        if self.asked.least_bits is not None:
            return self.asked.least_bits
        return LEAST_BITS if self._calibration is None else self._calibration.least_bits

    def _phases(self) -> Phases:
        """K by epoch: as the user says, or as a calibration found it."""
        if self.asked.k != "auto" or self._calibration is None:
            return self.asked.phases
        return self._calibration.phases(max(1, round(LATER_PART * self.options.epochs)))

    # What `Job.run` asks

    def replanner(self, planned: PlannedRun, strategy: str, lasting: Lasting) -> Guide:
        return self.steering

    def pilot(self) -> Controller | None:
        return self.steering

    def backup_every(self, planned: PlannedRun, lasting: Lasting) -> int:
        return self.steering.backups()

    def checkpoint_every(self, planned: PlannedRun) -> int:
        """Not so often that fetching the server's part crowds the link."""
        usual = super().checkpoint_every(planned)
        pilot = self.steering
        running, rate = pilot.engine.profile.running_bytes, self.rates.down_bytes_per_second
        before = running[pilot.deployment.cut]
        there = running[-1] - before if self.asked.edge_side == "upstream" else before
        seconds = pilot.batch_seconds(pilot.deployment)
        if not there or not seconds or not rate:
            return usual
        return max(usual, int(there / rate / CHECKPOINT_PART / seconds))

    # While it runs

    def train(self, planned: PlannedRun, on_step: OnStep | None) -> SplitResult:
        pilot, two = self.steering, self.two
        seconds: list[float] = []

        def stepped(step: int, loss: float, took: float) -> None:
            pilot.stepped(step)
            seconds.append(took)
            if on_step is not None:
                on_step(step, loss, took)

        least = 1 if pilot.can_work_alone() else 2
        lasting = Lasting("auto", self.backups, least, 2)
        with self._following() as following:
            found, self.last_planned = self.run(planned, stepped, "auto", lasting)
        moved, between = pilot.moved_bytes(), found.bytes_between
        up, down = (between.get(pair, 0) for pair in ((two.edge, two.server), (two.server, two.edge)))
        own = {one.name: getattr(found, one.name) for one in fields(TrainResult)}
        return SplitResult(
            **own, cuts=pilot.cuts, changes=pilot.changes, bytes_up=up + moved[0], bytes_down=down + moved[1],
            bytes_moved=sum(moved), step_seconds=seconds, split=pilot.engine.profile, deployment=pilot.deployment,
            rates=self.rates,
            set_rates=[(one.seconds, one.up_bytes_per_second, one.down_bytes_per_second) for one in following.set]
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
            coordinator, self.trace, up=(edge, server), down=(server, edge), delay_seconds=self.asked.delay_seconds
        ) as following:
            yield following

    def tell(self, event: str, /, **facts: Any) -> None:
        """Changes are told as what they are: another cut, K or width."""
        if event != "recovered":
            super().tell(event, **facts)
            return
        change = self.steering.told(facts)
        if change is None:  # it only looked at the link
            self.record.event("looked", **facts)
            return
        more = {name: facts[name] for name in ("replayed", "generation")}
        self.record.event("redeployed", **change_facts(change), **more)
        if self.say is not None:
            self.say(changed_text(change, self.graph.network, self.steering.ends.alone))


def change_facts(change: Redeployed) -> dict[str, Any]:
    """One change as it is written down."""
    return {
        "before": msgspec.to_builtins(change.before), "after": msgspec.to_builtins(change.after),
        "reason": change.reason, "step": change.step, "seconds": change.seconds, "bytes_moved": change.bytes_moved,
    }  # fmt: skip


REASONS = {
    "rates": "the link has changed", "phase": "another K begins", "lost": "the server is lost",
    "back": "the server is back",
}  # fmt: skip


def deployment_text(deployment: Deployment, network: Network, alone: int) -> str:
    """In words: where the cut is, how far ahead, how packed."""
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
    """From which step, what, why, seconds that getting there took, bytes that moved."""
    assert result.deployment is not None
    alone = result.split.edge_only if result.split is not None else len(network.layers)
    first = result.changes[0].before if result.changes else result.deployment
    rows = [(result.cuts[0][0], deployment_text(first, network, alone), "the beginning", 0.0, 0)]
    for one in result.changes:
        text = deployment_text(one.after, network, alone)
        rows.append((one.step, text, REASONS[one.reason], one.seconds, one.bytes_moved))
    return rows

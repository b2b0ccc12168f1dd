"""The controller of a split: it watches the link, decides when to change the deployment, and makes the next plan.

It runs in the job's thread. It decides by Algorithm 2 or by a baseline (planner/). It measures the link by real
transfers: those of the job or, where the edge works alone, a short exchange while the job pauses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, OutOfMemory, TimedOut, WorkerLost, unknown
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel, Profile
from manyhands.planner.rates import LEAST_SECONDS, Engine, EngineSettings, Meter, Rates
from manyhands.planner.split import WIDTHS, Bound, Deployment, LinkRates, SplitProfile, seconds_of
from manyhands.planner.split_choice import BASELINES, STATIC, Chooser, choose
from manyhands.runtime.control_parts import Arrival
from manyhands.runtime.controller import Change
from manyhands.schedule.backup import COPY_BYTES_PER_SECOND
from manyhands.split.plans import Ends, Phases
from manyhands.split.session import Looked

FIRST_TAU = 100.0
"""Iterations that a deployment is assumed to last, before any has been observed."""
REDEPLOY_SECONDS = 0.1
"""Seconds that a change is assumed to take besides the transfer of layers, until one has been observed."""

BACKUP_PART = 0.01
"""The fraction of the link's time that copies of state may take."""
SELDOM_SECONDS = 600.0
"""Copies that would be further apart than this are not made: there are checkpoints, too."""

Probe = Callable[[int, int], tuple[Looked, Looked]]
"""A function that sends so many bytes up and down, or more of them, only to measure the rates."""


@dataclass(frozen=True)
class SplitChoice:
    """The choices that the user has fixed, and those that are still open."""

    cut: int | None = None
    """The layer before which the network is cut; None: any."""
    widths: tuple[int, ...] = WIDTHS
    rival: str = ""

    def __post_init__(self) -> None:
        if self.rival and self.rival not in BASELINES:
            raise unknown("rival", self.rival, BASELINES)
        if self.rival and self.cut is not None:
            raise BadValue(f"rival {self.rival} decides where to cut.", hint='Leave out cut, or write cut="auto".')

    @property
    def is_static(self) -> bool:
        """Whether the link's rates make no difference."""
        return self.rival in STATIC or (self.cut is not None and len(self.widths) == 1)

    @property
    def chooser(self) -> Chooser:
        if self.rival:
            return BASELINES[self.rival]
        return choose if self.cut is None else _At(self.cut)


@dataclass(frozen=True)
class _At:
    """Algorithm 2 where the cut is given: only the width is chosen, and K stays as it is."""

    cut: int

    def __call__(
        self, profile: SplitProfile, rates: LinkRates, tau: float, current: Deployment | None, k: Bound,
        widths: Sequence[int] = WIDTHS, *, drains: bool = False,
    ) -> Deployment:  # fmt: skip
        if self.cut == profile.edge_only:
            return Deployment(self.cut)
        if len(widths) == 1:
            return Deployment(self.cut, k, widths[0])
        restricted = msgspec.structs.replace(profile, cuts=(profile.cuts[profile.index(self.cut)],))
        return choose(restricted, rates, tau, current, k, widths, lower_k=False, drains=drains)


@dataclass
class Redeployed:
    """One change of the deployment, as it is reported."""

    step: int
    before: Deployment
    after: Deployment
    reason: str
    """The cause: "rates", "phase", "lost" or "back"."""
    seconds: float = 0.0
    bytes_moved: int = 0


@dataclass(frozen=True)
class Course:
    """The steps of a job, and K in each of its epochs."""

    phases: Phases
    steps_per_epoch: int
    first_step: int = 0
    last_step: int | None = None
    """None: the end is not known."""


@dataclass(frozen=True)
class LinkWatch:
    """The controller's view of the link, and when it changes the deployment."""

    probe: Probe | None = None
    clock: Callable[[], float] = time.monotonic
    meters: tuple[Meter, Meter] | None = None
    """Up and down; None: meters with the default memory."""
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(tau=FIRST_TAU))


class SplitController:
    """The controller of an elastic job that is split in two; it is also the job's `Replan`."""

    def __init__(
        self, ends: Ends, profile: SplitProfile, rates: LinkRates, choice: SplitChoice, course: Course,
        measured: Profile, cluster: Cluster, *, backup_every: int | None = 0, watch: LinkWatch | None = None,
    ) -> None:  # fmt: skip
        watch = watch or LinkWatch()
        self.ends, self.choice, self.course = ends, choice, course
        self.measured, self.cluster = measured, cluster
        self.probe, self.clock, self.backup_every = watch.probe, watch.clock, backup_every
        self.steps = course.first_step
        k, drains = self.k_at(course.first_step), ends.mode == "grouped"
        chooser = choice.chooser
        first = chooser(profile, rates, FIRST_TAU, None, k, choice.widths, drains=drains)
        up, down = watch.meters or (Meter(), Meter())
        self.engine = Engine(
            profile, Rates(rates, up=up, down=down), first, k=k, widths=choice.widths, chooser=chooser, drains=drains,
            ends_at=course.last_step, settings=watch.settings,
        )  # fmt: skip
        self.engine.probe(self.clock())  # the link was looked at just now
        self.deployment = first
        """The deployment that is running."""
        self.plan = ends.plan(first, self.batch_seconds(first))
        self.changes: list[Redeployed] = []
        self.cuts: list[tuple[int, int]] = [(course.first_step, first.cut)]
        self._wanted_sizes = (0, 0)
        self._pending: Redeployed | None = None

    def k_at(self, step: int) -> Bound:
        """Return K of the epoch that a step is in, unless a baseline has its own."""
        if self.choice.rival in ("k0", "unbounded"):
            return 0 if self.choice.rival == "k0" else None
        epoch = step // self.course.steps_per_epoch
        return next(k for start, k in reversed(self.course.phases) if start <= epoch)

    def batch_seconds(self, deployment: Deployment) -> float:
        """Return the predicted seconds of a mini-batch at the current rates; 0.0 where they are infinite."""
        engine = self.engine
        rates = engine.rates.now(self.clock())
        seconds = seconds_of(engine.profile, rates, FIRST_TAU, deployment, drains=engine.drains) / FIRST_TAU
        return seconds if seconds < float("inf") else 0.0

    # While a round runs

    def stop_at(self, step: int) -> int | None:
        """Return the step at which another K begins; None: there is none."""
        starts = [epoch * self.course.steps_per_epoch for epoch, _ in self.course.phases]
        return next((start for start in starts if start > step), None)

    def should_change(self, steps_done: int) -> bool:
        self.steps = steps_done
        if self.choice.is_static or not self.engine.is_linked:
            return False
        now = self.clock()
        if self.ends.is_alone(self.engine.current) and self.probe is not None and not any(self._wanted_sizes):
            self._wanted_sizes = self.engine.probe(now)
        if any(self._wanted_sizes):
            return True
        return self.engine.look(now, steps_done) is not None or self.engine.current != self.deployment

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        """Feed the meters with what came over the link, and how long that took."""
        now, rates = self.clock(), self.engine.rates
        ways = {(self.ends.server, self.ends.edge): rates.up, (self.ends.edge, self.ends.server): rates.down}
        for arrival in sorted(arrivals, key=lambda arrival: -arrival.ago):
            meter = ways.get((device, arrival.source))
            if meter is not None and arrival.seconds > 0:
                ended = now - arrival.ago
                meter.transfer(arrival.bytes, ended - arrival.seconds, ended)

    def began(self, plan: Plan, steps_done: int) -> None:
        """Note that the first round of a generation is done: the re-deployment is over."""
        self.steps = steps_done
        self.engine.deployed(self.clock())

    def stepped(self, step: int) -> None:
        self.steps = step + 1

    def changed(self, facts: Mapping[str, Any]) -> Redeployed | None:
        """Record how a re-deployment went; return the change to report, or None where the deployment is the same."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.step, pending.seconds = int(facts["step"]), float(facts["seconds"])
        pending.bytes_moved = int(facts["bytes_moved"])
        self.changes.append(pending)
        if pending.after.cut != self.cuts[-1][1]:
            self.cuts.append((pending.step, pending.after.cut))
        if pending.reason == "rates":
            self._learn_cost(pending)
        return pending

    def _learn_cost(self, change: Redeployed) -> None:
        """Update what a change takes besides its bytes: half the estimate so far, half what this change took."""
        engine = self.engine
        rates, is_up = engine.rates.now(self.clock()), self._goes_up(change)
        rate = rates.up_bytes_per_second if is_up else rates.down_bytes_per_second
        moving = change.bytes_moved / rate if rate else change.seconds
        fixed = (engine.profile.redeploy_seconds + max(0.0, change.seconds - moving)) / 2
        engine.profile = msgspec.structs.replace(engine.profile, redeploy_seconds=fixed)

    def _goes_up(self, change: Redeployed) -> bool:
        """Return whether layers go from the edge to the server."""
        return (change.after.cut < change.before.cut) == (self.ends.edge_side == "upstream")

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes of layers that changed sides: up and down.

        What comes from the edge's own checkpoint crosses no link.
        """
        up = sum(each.bytes_moved for each in self.changes if self._goes_up(each))
        down = sum(each.bytes_moved for each in self.changes if not self._goes_up(each) and each.reason != "lost")
        return up, down

    # Between rounds

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change:
        now, engine = self.clock(), self.engine
        if self.ends.edge not in names:
            raise WorkerLost(f"{self.ends.edge} is lost, and the data is there.", hint="Start it again, and resume.")
        engine.k = self.k_at(self.steps)
        if self.ends.server not in names:
            chosen, reason = self._alone(now), "lost"
        elif not engine.is_linked:
            engine.found(now)
            self._ask_link(engine.probe(now))
            chosen, reason = self._chosen(), "back"
        else:
            if any(self._wanted_sizes):
                self._ask_link(self._wanted_sizes)
            chosen = engine.current if self._is_within(engine.current) else self._chosen()
            reason = "phase" if chosen.cut == self.deployment.cut and chosen.k != self.deployment.k else "rates"
        self._wanted_sizes = (0, 0)
        return self._change(chosen, reason)

    def _change(self, chosen: Deployment, reason: str) -> Change:
        before = self._pending.before if self._pending is not None else self.deployment
        if chosen != self.engine.current:
            self.engine.take(chosen, self.clock(), self.steps)
        self._pending = Redeployed(self.steps, before, chosen, reason) if chosen != before else None
        self.deployment = chosen
        self.plan = self.ends.plan(chosen, self.batch_seconds(chosen))
        return Change(self.plan, self.kernels(self.plan), "redeployed", reason, self.backups())

    def _is_within(self, deployment: Deployment) -> bool:
        """Return whether a deployment's K is at most the allowed one, or exactly that where the cut is given."""
        k = self.engine.k
        if self.ends.is_alone(deployment) or self.choice.rival in STATIC:
            return True
        if self.choice.cut is not None:
            return deployment.k == k
        return k is None or (deployment.k is not None and deployment.k <= k)

    def _chosen(self) -> Deployment:
        """Return the best deployment now, without waiting to see whether it stays the best: the job pauses anyway."""
        engine = self.engine
        rates, tau = engine.rates.now(self.clock()), engine.horizon(self.steps)
        current: Deployment | None = engine.current
        if self.choice.rival in STATIC:  # as it was at the beginning
            current, rates = None, engine.rates.first
        return engine.chooser(engine.profile, rates, tau, current, engine.k, engine.widths, drains=engine.drains)

    def _alone(self, now: float) -> Deployment:
        deployment = self.engine.lost(now, self.steps)
        if deployment is None:
            raise OutOfMemory(
                f"{self.ends.server} is lost, and the memory of {self.ends.edge} is too small for all of "
                f"{self.ends.network}.",
                hint="Start the server again, and go on with this run.",
            )
        return deployment

    def backups(self) -> int:
        """Return the steps between two copies that the ends keep of each other's state.

        As many as the user says, or so many that copies take next to nothing of the link's time; 0: no copies, where
        they would be too seldom to be of use.
        """
        deployment, profile = self.deployment, self.engine.profile
        if self.ends.is_alone(deployment):
            return 0
        if self.backup_every is not None:
            return self.backup_every
        rates, step_seconds = self.engine.rates.now(self.clock()), max(self.batch_seconds(deployment), 1e-6)
        before = float(profile.running_bytes[deployment.cut])
        after = float(profile.running_bytes[-1]) - before
        at_edge, at_server = (before, after) if self.ends.edge_side == "upstream" else (after, before)
        ways = ((at_edge, rates.up_bytes_per_second), (at_server, rates.down_bytes_per_second))
        seconds = max(size / max(min(rate, COPY_BYTES_PER_SECOND), 1.0) for size, rate in ways) / BACKUP_PART
        return max(1, math.ceil(seconds / step_seconds)) if seconds <= SELDOM_SECONDS else 0

    def can_work_alone(self) -> bool:
        """Return whether the edge's memory is large enough for everything."""
        engine = self.engine
        lonely = [cut for cut in engine.profile.cuts if cut.layer == self.ends.alone]
        memory = engine.profile.memory_bytes
        return bool(lonely) and (memory is None or lonely[0].edge_bytes <= memory)

    def _ask_link(self, sizes: tuple[int, int]) -> None:
        """Send something only to measure the rates. A link that does not deliver it in time gives next to nothing."""
        if self.probe is None or not any(sizes):
            return
        rates, began = self.engine.rates, self.clock()
        try:
            looks = self.probe(*sizes)
        except TimedOut:
            now = self.clock()
            for meter, size in zip((rates.up, rates.down), sizes):
                if size:  # at best it ends now
                    meter.transfer(size, began, now)
            self.engine.probed(now, has_arrived=False)
            return
        now = self.clock()
        self.engine.probed(now, has_arrived=True)
        for meter, look in zip((rates.up, rates.down), looks):
            if look.seconds > 0:  # a link too fast to measure counts as if it had been measured for long enough
                times = max(1.0, LEAST_SECONDS / look.seconds)
                meter.transfer(times * look.byte_count, now - times * look.seconds, now)

    # What the job needs of a re-planner

    def kernels(self, plan: Plan) -> dict[str, Mapping[str, Kernel]]:
        return {name: self.measured.of(name).kernels for name in plan.devices}

    def present(self, plan: Plan, names: tuple[str, ...]) -> tuple[Cluster, Profile]:
        return self.cluster, self.measured

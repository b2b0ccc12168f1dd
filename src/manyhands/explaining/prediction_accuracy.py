"""How right a prediction was: every stage as planned beside as run, said where they differ, and learnt from.

What a stage took on a device is the median of its forward and backward seconds over the rounds of the last plan,
without the first ones. Stored profiles are corrected by it (planner/correction.py), so that the next plan knows better.
Never from a run with fewer than LEAST_STEPS such rounds, or one in which workers came, went or were slowed down on
purpose; and a profile belongs to a machine, a number of workers and a lab's time scale (session/measuring.py), so that
no run corrects another's.
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.executor.log import WARM_UP_ROUNDS, DeviceLog
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan_check import layer_range
from manyhands.facts.profile import DeviceProfile, Profile
from manyhands.facts.units import format_seconds
from manyhands.files.documents import read_document
from manyhands.graph.graph import Graph
from manyhands.planner.correction import Evidence, corrected, evidence, promises
from manyhands.planner.cost import CostModel
from manyhands.profiler.store import forget_sessions, load_profile, save_profile
from manyhands.schedule.policy import Schedule
from manyhands.session.measuring import profile_place
from manyhands.session.session import Session

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun

TOLERANCE = 0.15
"""Beyond this a prediction is called wrong."""
FEWEST_ROUNDS = 3
"""Of fewer rounds after the first ones nothing is said: as many as are traced."""
LEAST_STEPS = 10
"""Of fewer nothing is learnt."""


class StageTimes(msgspec.Struct, frozen=True):
    """One device in one stage: what it computed in a step, and what it did with the rest of it."""

    stage: int
    device: str
    layers: tuple[int, int]
    """The first, and the one after the last."""
    predicted_seconds: float
    """Forward and backward."""
    measured_seconds: float
    factor: float
    """Measured over predicted, without what moving bytes can explain."""
    steps: int
    """Rounds that what was measured is the median of."""

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 1.0

    @property
    def is_off(self) -> bool:
        return is_off(self.factor)


class Honesty(msgspec.Struct, frozen=True):
    """Predicted beside measured, of one step of the last plan."""

    predicted_seconds: float
    measured_seconds: float
    stages: tuple[StageTimes, ...]

    @property
    def steps(self) -> int:
        """Rounds that the medians are of: the fewest of any device."""
        return min(one.steps for one in self.stages)

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 1.0

    @property
    def worst(self) -> StageTimes | None:
        """Of the stages and devices that are off by too much, the one that is by most seconds."""
        off = [one for one in self.stages if one.is_off]
        return max(off, key=lambda one: abs(one.measured_seconds - one.predicted_seconds), default=None)

    def rest(self, device: str) -> tuple[float, float]:
        """Seconds of a step in which a device waits, exchanges or updates: predicted, measured."""
        own = [one for one in self.stages if one.device == device]
        predicted = self.predicted_seconds - sum(one.predicted_seconds for one in own)
        return max(0.0, predicted), max(0.0, self.measured_seconds - sum(one.measured_seconds for one in own))

    def to_dict(self) -> dict[str, Any]:
        """What stages.json holds."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for one, times in zip(found["stages"], self.stages):
            one["ratio"] = times.ratio
        found["steps"] = self.steps
        names = dict.fromkeys(one.device for one in self.stages)
        rests = {name: self.rest(name) for name in names}
        found["rest"] = {n: {"predicted_seconds": p, "measured_seconds": m} for n, (p, m) in rests.items()}
        return {**found, "ratio": self.ratio}


def is_off(ratio: float) -> bool:
    return ratio > 1 + TOLERANCE or ratio < 1 / (1 + TOLERANCE)


def compared(
    planned: PlannedRun, schedule: Schedule, logs: Mapping[str, DeviceLog], step_seconds: Sequence[float]
) -> Honesty | None:
    """How right the prediction was; None: the run was too short, or of order replay, whose rounds are not all alike.

    `step_seconds`: of every step of the run, the last ones by this plan.
    """
    plan = planned.plan
    if plan.order == "replay":
        return None
    promised = promises(schedule, CostModel(planned.network, planned.cluster, planned.profile))
    stages: list[StageTimes] = []
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            taken = logs[device].stage_seconds.get(number) if device in logs else None
            if taken is None or len(taken) < FEWEST_ROUNDS:
                return None
            measured, promise = statistics.median(taken), promised[number, device]
            own = promise.compute_seconds, measured, promise.factor(measured)
            stages.append(StageTimes(number, device, layer_range(stage), *own, len(taken)))
    rounds = max(logs[one.device].rounds for one in stages)
    steady = step_seconds[-rounds:][WARM_UP_ROUNDS:] or step_seconds
    return Honesty(planned.step_seconds, statistics.median(steady), tuple(stages))


def sentence(found: Honesty, folder: Path, learnt: str = "") -> str:
    """What is to be said of a prediction that was wrong; empty: it was right."""
    worst, texts = found.worst, []
    if worst is not None:
        others = sum(one.is_off for one in found.stages) - 1
        more = f" ({others} more {'are' if others > 1 else 'is'} off too)" if others else ""
        texts.append(
            f"Stage {worst.stage} on {worst.device} computed for {format_seconds(worst.measured_seconds)} a step, "
            f"{worst.ratio:.2f} times the {format_seconds(worst.predicted_seconds)} that were predicted{more}."
        )
        if is_off(found.ratio):
            texts.append(
                f"A step took {format_seconds(found.measured_seconds)}, {found.ratio:.2f} times the predicted "
                f"{format_seconds(found.predicted_seconds)}."
            )
    elif is_off(found.ratio):
        device = max((one.device for one in found.stages), key=lambda name: abs(_gap(found.rest(name))))
        predicted, measured = found.rest(device)
        texts.append(
            f"A step took {format_seconds(found.measured_seconds)}, {found.ratio:.2f} times the "
            f"{format_seconds(found.predicted_seconds)} that were predicted; stages computed as they should, but "
            f"{device} waited, exchanged and updated for {format_seconds(measured)}, not {format_seconds(predicted)}."
        )
    if not texts:
        return ""
    again = f"To measure anew: manyhands profile --refresh --run {shlex.quote(str(folder))}"
    return " ".join([*texts, *([learnt] if learnt else []), again])


def _gap(rest: tuple[float, float]) -> float:
    return rest[1] - rest[0]


# What is learnt


def correct_profiles(session: Session, graph: Graph, planned: PlannedRun, optimizer: Optimizer, found: Honesty) -> int:
    """Correct the stored profiles of a run's devices by what they took. Gives back from how many steps; 0: none was.

    A stored profile is judged by what itself would have promised, which need not be what the run was planned with.
    """
    members, plan, profile = session.coordinator.members, planned.plan, planned.profile
    taken = {(one.stage, one.device): one for one in found.stages if one.steps >= LEAST_STEPS}
    if not taken or any(members[name].facts.slowdown != 1 for name in plan.devices):
        return 0
    files: dict[Path, list[str]] = {}
    for name in plan.devices:
        files.setdefault(profile_place(session, graph, name, optimizer), []).append(name)
    stored = {path: _stored(path, graph, members[names[0]].facts.machine) for path, names in files.items()}
    known = {
        name: msgspec.structs.replace(own, device=name)
        for path, own in stored.items() if own is not None
        for name in files[path] if own.kernels == profile.of(name).kernels
    }  # fmt: skip
    network = graph.network
    schedule = Schedule(plan, network)
    promised = promises(schedule, CostModel(network, planned.cluster, Profile({**profile.devices, **known})))
    used, when = 0, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for path, own in stored.items():
        seen: list[Evidence] = []
        steps: list[int] = []
        for name in files[path]:
            for geometry in schedule.lowering.work[name].geometries if name in known else ():
                times = taken.get((geometry.index, name))
                if times is not None:
                    factor = promised[geometry.index, name].factor(times.measured_seconds)
                    seen.append(evidence(geometry, network, name, factor))
                    steps.append(times.steps)
        if own is None or not seen:
            continue
        better = corrected(own, seen, steps=min(steps), when=when)
        with contextlib.suppress(BadFile):  # a cache that cannot be written only costs accuracy
            if better is not own:
                save_profile(better, path)
                used = max(used, min(steps))
    return used


def _stored(path: Path, graph: Graph, machine: str) -> DeviceProfile | None:
    try:
        found = load_profile(path, graph.network)
    except ManyhandsError:
        return None
    return found if found.machine == machine else None


def forget_run(folder: str | Path) -> tuple[str, int]:
    """Forget what is stored of a run's network on its workers: its name, and how many profiles there were."""
    path = Path(folder) / "profile.json"
    if not path.exists():
        raise BadFile(f"{folder}: is no run folder: it has no profile.json.", hint="List them: ls runs")
    profiles = decode(read_document(path), dict[str, DeviceProfile], str(path))
    if not profiles:
        raise BadFile(f"{path}: holds no profile.")
    one = next(iter(profiles.values()))
    return f"{one.network} ({one.input})", forget_sessions(one.fingerprint)

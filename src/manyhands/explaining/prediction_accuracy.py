"""Prediction accuracy: every stage as planned beside as measured, reported where they differ, and used to correct
profiles.

The time of a stage on a device is the median of its forward and backward seconds over the rounds of the last plan,
without the first ones. Stored profiles are corrected by it (planner/correction.py), so that the next plan is better
informed. No profile is corrected by a run with fewer than LEAST_STEPS such rounds, or by one in which workers came,
went or were slowed down on purpose; and a profile belongs to a machine, a number of workers and a lab's time scale
(session/measuring.py), so that no run corrects another's.
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
from manyhands.planner.correction import TimingEvidence, corrected, evidence, promises
from manyhands.planner.cost import CostModel
from manyhands.profiler.store import forget_sessions, load_profile, save_profile
from manyhands.schedule.policy import Schedule
from manyhands.session.measuring import profile_place
from manyhands.session.session import Session

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun

TOLERANCE = 0.15
"""A prediction that is off by more is reported as wrong."""
FEWEST_ROUNDS = 3
"""With fewer rounds after the first ones nothing is reported: as many as are traced."""
LEAST_STEPS = 10
"""With fewer steps no profile is corrected."""


class StageTimes(msgspec.Struct, frozen=True):
    """One device in one stage: its predicted and measured seconds of computing in a step."""

    stage: int
    device: str
    layers: tuple[int, int]
    """The first layer, and the one after the last."""
    predicted_seconds: float
    """Forward and backward."""
    measured_seconds: float
    factor: float
    """Measured over predicted, without what moving bytes can explain."""
    steps: int
    """The number of rounds over which the measured median is taken."""

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 1.0

    @property
    def is_off(self) -> bool:
        return is_off(self.factor)


class PredictionAccuracy(msgspec.Struct, frozen=True):
    """Predicted beside measured seconds of one step of the last plan."""

    predicted_seconds: float
    measured_seconds: float
    stages: tuple[StageTimes, ...]

    @property
    def steps(self) -> int:
        """The fewest rounds of any device that a median is taken over."""
        return min(times.steps for times in self.stages)

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else 1.0

    @property
    def worst(self) -> StageTimes | None:
        """The stage and device, among those that are off by too much, that is off by the most seconds."""
        off = [times for times in self.stages if times.is_off]
        return max(off, key=lambda times: abs(times.measured_seconds - times.predicted_seconds), default=None)

    def rest(self, device: str) -> tuple[float, float]:
        """Return the seconds of a step in which a device waits, exchanges or updates: predicted, and measured."""
        of_device = [times for times in self.stages if times.device == device]
        predicted = self.predicted_seconds - sum(times.predicted_seconds for times in of_device)
        return max(0.0, predicted), max(0.0, self.measured_seconds - sum(times.measured_seconds for times in of_device))

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of stages.json."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        for written, times in zip(document["stages"], self.stages):
            written["ratio"] = times.ratio
        document["steps"] = self.steps
        names = dict.fromkeys(times.device for times in self.stages)
        rests = {name: self.rest(name) for name in names}
        document["rest"] = {n: {"predicted_seconds": p, "measured_seconds": m} for n, (p, m) in rests.items()}
        return {**document, "ratio": self.ratio}


def is_off(ratio: float) -> bool:
    return ratio > 1 + TOLERANCE or ratio < 1 / (1 + TOLERANCE)


def compared(
    planned: PlannedRun, schedule: Schedule, logs: Mapping[str, DeviceLog], step_seconds: Sequence[float]
) -> PredictionAccuracy | None:
    """Return the accuracy of a prediction. None if the run was too short, or of order replay, whose rounds differ.

    `step_seconds`: of every step of the run, the last ones by this plan.
    """
    plan = planned.plan
    if plan.order == "replay":
        return None
    promised = promises(schedule, CostModel(planned.network, planned.cluster, planned.profile))
    stages: list[StageTimes] = []
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            round_seconds = logs[device].stage_seconds.get(number) if device in logs else None
            if round_seconds is None or len(round_seconds) < FEWEST_ROUNDS:
                return None
            measured, promise = statistics.median(round_seconds), promised[number, device]
            seconds = promise.compute_seconds, measured, promise.factor(measured)
            stages.append(StageTimes(number, device, layer_range(stage), *seconds, len(round_seconds)))
    rounds = max(logs[times.device].rounds for times in stages)
    steady = step_seconds[-rounds:][WARM_UP_ROUNDS:] or step_seconds
    return PredictionAccuracy(planned.step_seconds, statistics.median(steady), tuple(stages))


def sentence(accuracy: PredictionAccuracy, folder: Path, learnt: str = "") -> str:
    """Return what to report about a prediction that was wrong; empty if it was right."""
    worst, texts = accuracy.worst, []
    if worst is not None:
        others = sum(times.is_off for times in accuracy.stages) - 1
        more = f" ({others} more {'are' if others > 1 else 'is'} off too)" if others else ""
        texts.append(
            f"Stage {worst.stage} on {worst.device} computed for {format_seconds(worst.measured_seconds)} a step, "
            f"{worst.ratio:.2f} times the {format_seconds(worst.predicted_seconds)} that were predicted{more}."
        )
        if is_off(accuracy.ratio):
            texts.append(
                f"A step took {format_seconds(accuracy.measured_seconds)}, {accuracy.ratio:.2f} times the predicted "
                f"{format_seconds(accuracy.predicted_seconds)}."
            )
    elif is_off(accuracy.ratio):
        device = max((times.device for times in accuracy.stages), key=lambda name: abs(_gap(accuracy.rest(name))))
        predicted, measured = accuracy.rest(device)
        texts.append(
            f"A step took {format_seconds(accuracy.measured_seconds)}, {accuracy.ratio:.2f} times the "
            f"{format_seconds(accuracy.predicted_seconds)} that were predicted; stages computed as they should, but "
            f"{device} waited, exchanged and updated for {format_seconds(measured)}, not {format_seconds(predicted)}."
        )
    if not texts:
        return ""
    again = f"To measure anew: manyhands profile --refresh --run {shlex.quote(str(folder))}"
    return " ".join([*texts, *([learnt] if learnt else []), again])


def _gap(seconds: tuple[float, float]) -> float:
    return seconds[1] - seconds[0]


# Corrections


def correct_profiles(
    session: Session, graph: Graph, planned: PlannedRun, optimizer: Optimizer, accuracy: PredictionAccuracy
) -> int:
    """Correct the stored profiles of a run's devices by their measured seconds. Return the number of steps used; 0:
    nothing was corrected.

    A stored profile is judged by its own prediction, which may differ from the one that the run was planned with.
    """
    members, plan, profile = session.coordinator.members, planned.plan, planned.profile
    times_by_stage = {(times.stage, times.device): times for times in accuracy.stages if times.steps >= LEAST_STEPS}
    if not times_by_stage or any(members[name].facts.slowdown != 1 for name in plan.devices):
        return 0
    files: dict[Path, list[str]] = {}
    for name in plan.devices:
        files.setdefault(profile_place(session, graph, name, optimizer), []).append(name)
    stored = {path: _stored(path, graph, members[names[0]].facts.machine) for path, names in files.items()}
    usable = {
        name: msgspec.structs.replace(profile_stored, device=name)
        for path, profile_stored in stored.items() if profile_stored is not None
        for name in files[path] if profile_stored.kernels == profile.of(name).kernels
    }  # fmt: skip
    network = graph.network
    schedule = Schedule(plan, network)
    promised = promises(schedule, CostModel(network, planned.cluster, Profile({**profile.devices, **usable})))
    used, when = 0, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for path, profile_stored in stored.items():
        all_evidence: list[TimingEvidence] = []
        steps: list[int] = []
        for name in files[path]:
            for geometry in schedule.lowering.work[name].geometries if name in usable else ():
                times = times_by_stage.get((geometry.index, name))
                if times is not None:
                    factor = promised[geometry.index, name].factor(times.measured_seconds)
                    all_evidence.append(evidence(geometry, network, name, factor))
                    steps.append(times.steps)
        if profile_stored is None or not all_evidence:
            continue
        better = corrected(profile_stored, all_evidence, steps=min(steps), when=when)
        with contextlib.suppress(BadFile):  # a cache that cannot be written only costs accuracy
            if better is not profile_stored:
                save_profile(better, path)
                used = max(used, min(steps))
    return used


def _stored(path: Path, graph: Graph, machine: str) -> DeviceProfile | None:
    try:
        stored = load_profile(path, graph.network)
    except ManyhandsError:
        return None
    return stored if stored.machine == machine else None


def forget_run(folder: str | Path) -> tuple[str, int]:
    """Delete what is stored about a run's network on its workers. Return its name, and how many profiles there were."""
    path = Path(folder) / "profile.json"
    if not path.exists():
        raise BadFile(f"{folder}: is no run folder: it has no profile.json.", hint="List them: ls runs")
    profiles = decode(read_document(path), dict[str, DeviceProfile], str(path))
    if not profiles:
        raise BadFile(f"{path}: holds no profile.")
    first = next(iter(profiles.values()))
    return f"{first.network} ({first.input})", forget_sessions(first.fingerprint)

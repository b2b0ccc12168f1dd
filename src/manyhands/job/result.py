"""What a training job returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.executor.log import DeviceLog
from manyhands.explaining.prediction_accuracy import PredictionAccuracy
from manyhands.explaining.tile_report import Traffic
from manyhands.facts.plan import Plan
from manyhands.job.evaluation import EvaluateResult


@dataclass
class TrainResult:
    """What training gave. The module holds the trained weights."""

    losses: list[float]
    """One per step."""
    plan: Plan
    folder: Path
    throughput: float
    """Samples per second, without the first steps."""
    predicted_seconds: float
    """Of one step, simulated before the run."""
    measured_seconds: float
    """Of one step, median without the first ones."""
    logs: dict[str, DeviceLog]
    planned_bytes: dict[tuple[str, str], int]
    """(from, to) -> bytes the plan says travel in a round: a step, but for order replay."""
    traffic: Traffic
    """What the plan says travels in a step, and what for."""
    checkpoint: Path
    steps: int
    scale: float | None = None
    """How many times slower than in life everything went; None: this was life, not a lab."""
    stands_in: bool = False
    """A lab was asked for; plain processes stood in, whose links were shaped and whose speed was this machine's."""
    test: EvaluateResult | None = None
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Each time workers were lost, joined or left: how it went on, from which step, after how many seconds."""
    staleness: list[int] = field(default_factory=list)
    """Of each step with order replay: by how many updates its gradient was late; -1: too many, it was discarded."""
    bytes_between: dict[tuple[str, str], int] = field(default_factory=dict)
    """(from, to) -> bytes that were sent in all rounds, without copies of state."""
    prediction_accuracy: PredictionAccuracy | None = None
    """Predicted beside measured, stage by stage; None: the run was too short to say."""
    problems: list[str] = field(default_factory=list)
    """What failed after the last step, a line each, such as pictures for which the disk had no room."""

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Device -> its tensor bytes when they were most, by part, counted in one step."""
        found = {name: self.logs[name] for name in self.plan.devices if name in self.logs}
        return {name: log.peak_parts for name, log in found.items() if log.peak_bytes}

    @property
    def bytes_by_use(self) -> dict[str, int]:
        """Bytes that the plan says travel in a step: input_output, boundary, weights (TILE Fig. 5.2c)."""
        return self.traffic.by_use

    @property
    def accuracy(self) -> float | None:
        """On the held-out data, where some was given."""
        return self.test.accuracy if self.test is not None else None

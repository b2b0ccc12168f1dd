"""The result of a training job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.data.length_order import LengthUse, padded_share
from manyhands.executor.log import DeviceLog
from manyhands.explaining.prediction_accuracy import PredictionAccuracy
from manyhands.explaining.tile_report import Traffic
from manyhands.facts.plan import Plan, plan_line
from manyhands.facts.summary import Summarized
from manyhands.facts.units import format_seconds
from manyhands.job.evaluation import EvaluateResult
from manyhands.job.validation import Validated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(repr=False)
class TrainResult(Summarized):
    """The result of training. The module holds the trained weights."""

    losses: list[float]
    """One per step."""
    plan: Plan
    folder: Path
    throughput: float
    """Samples per second, without the first steps."""
    predicted_seconds: float
    """Seconds of one step, simulated before the run."""
    measured_seconds: float
    """Seconds of one step, the median without the first ones."""
    logs: dict[str, DeviceLog]
    planned_bytes: dict[tuple[str, str], int]
    """(from, to) -> planned bytes sent in a round, which is a step except with order replay."""
    traffic: Traffic
    """Planned traffic of a step, by purpose."""
    checkpoint: Path
    steps: int
    adapter: Path | None = None
    """The folder with what was trained of a module that PEFT has wrapped, as PEFT writes it."""
    scale: float | None = None
    """Time scale of a lab: how many times slower than real time everything ran; None: in real time, not in a lab."""
    stands_in: bool = False
    """Whether plain processes stood in for a lab: with shaped links, at this machine's own speed."""
    test: EvaluateResult | None = None
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """For each time that workers were lost, joined or left: how the run went on, from which step, after how many
    seconds."""
    staleness: list[int] = field(default_factory=list)
    """For each step with order replay: by how many updates its gradient was late; -1: too many, it was discarded."""
    grad_norms: list[float] = field(default_factory=list)
    """One per step, of all gradients before they were clipped, with clip_norm or precision="fp16"; else empty."""
    skipped_steps: list[int] = field(default_factory=list)
    """With precision="fp16": steps of this process whose gradients overflowed, so that all devices skipped them."""
    ema: dict[str, Tensor] | None = None
    """The module's state_dict with averaged weights, with ema; else None."""
    bytes_between: dict[tuple[str, str], int] = field(default_factory=dict)
    """(from, to) -> bytes sent in all rounds, without backups of state."""
    prediction_accuracy: PredictionAccuracy | None = None
    """Predicted beside measured, stage by stage; None: the run was too short to tell."""
    data_wait_share: float = 0.0
    """The part of the time of the steps, without the first ones, in which all devices waited for the next batch to be
    loaded."""
    lengths: list[LengthUse] = field(default_factory=list)
    """With samples of different lengths: how many batches were padded to each, and how much of them is padding."""
    validation: list[Validated] = field(default_factory=list)
    """The results of every validation, those before the run was resumed too."""
    best_checkpoint: Path | None = None
    """The folder of the checkpoint with the best validation, if a BestCheckpoint was among the callbacks."""
    stopped_because: str | None = None
    """The reason that a callback gave to stop; None: none has."""
    problems: list[str] = field(default_factory=list)
    """Errors after the last step, a line each, such as pictures for which the disk had no room."""

    def summary(self) -> dict[str, str]:
        steps = f"{self.steps:,}"
        if self.losses:
            steps += f", loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g}"
        facts = {
            "steps": steps, "speed": f"{self.throughput:.4g} samples/s, {format_seconds(self.measured_seconds)} a step",
            "plan": plan_line(self.plan),
        }  # fmt: skip
        if self.test is not None:
            facts["held-out"] = self.test.line
        if self.recoveries:
            facts["recoveries"] = str(len(self.recoveries))
        if self.problems:
            facts["problems"] = "; ".join(self.problems)
        return {**facts, "folder": str(self.folder)}

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Device -> its tensor bytes at their peak, by part, counted in one step."""
        logs = {name: self.logs[name] for name in self.plan.devices if name in self.logs}
        return {name: log.peak_parts for name, log in logs.items() if log.peak_bytes}

    @property
    def padded_share(self) -> float:
        """The part of all positions of the batches that is padding; 0 where all samples have one shape."""
        return padded_share(self.lengths)

    @property
    def bytes_by_use(self) -> dict[str, int]:
        """Planned bytes sent in a step, by use: input_output, boundary, weights (TILE Fig. 5.2c)."""
        return self.traffic.by_use

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the held-out data, if any was given."""
        return self.test.accuracy if self.test is not None else None

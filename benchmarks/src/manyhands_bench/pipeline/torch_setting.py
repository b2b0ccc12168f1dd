"""The settings that PyTorch's processes run, shared by the bench and each of the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LIMIT_SECONDS = 120.0
"""The limit for any answer, and for any message between the processes."""


LEARNING_RATE, MOMENTUM = 1e-4, 0.9


@dataclass(frozen=True)
class TorchSetting:
    """A model at an input size, and the samples of a mini-batch."""

    model: str
    shape: tuple[int, ...]
    samples: int
    micro_batches: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{self.model} {size}, batch {self.samples} in {self.micro_batches} micro-batches"


@dataclass(frozen=True)
class TorchVariant:
    """One of PyTorch's ways, with everything that a person would choose by hand."""

    kind: str
    """'1f1b', 'gpipe' or 'ddp'."""
    ranks: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    """For a pipeline: stage i has units [bounds[i], bounds[i + 1])."""
    micro_batches: int = 1
    shares: tuple[int, ...] = ()
    """For 'ddp': samples of each rank."""
    channels_last: bool = False
    """Whether weights and inputs, and so everything in between, have this memory format."""

    def __str__(self) -> str:
        form = ", channels_last" if self.channels_last else ""
        if self.kind == "ddp":
            return f"DDP with {'+'.join(map(str, self.shares))} samples, default buckets{form}"
        name = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}[self.kind]
        cuts = ", ".join(map(str, self.bounds[1:-1]))
        return f"{name} with {len(self.ranks)} stages cut at {cuts}, {self.micro_batches} micro-batches{form}"


class BareRound(NamedTuple):
    """The seconds of a stage's computing in a round: each micro-batch's forward pass (on the last stage with the loss),
    its backward pass, and the optimiser's step."""

    forward: list[float]
    backward: list[float]
    step: float

"""One micro-batch in flight on one device, and its life cycle.

In each stage of the device a micro-batch goes through these phases:

    FED ──▶ FORWARD ──▶ AWAITING_GRADIENTS ──▶ BACKWARD ──▶ DONE      training
               ▲                │
               └────────────────┘                                     order replay: run again on the weights of now
    FED ──▶ FORWARD ──────────────────────────────────────▶ DONE      inference, and stages below all that trains
    any phase ───────────────────────────────────────▶ DISCARDED      order replay: its gradients came too late
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from manyhands.graph.piece import Context
from manyhands.schedule.actions import Reduce, ReduceKey

if TYPE_CHECKING:
    from manyhands.executor.process_groups import AllGather


class Phase(Enum):
    """The phase of a micro-batch in one stage."""

    FED = "fed"
    FORWARD = "forward"
    AWAITING_GRADIENTS = "awaiting gradients"
    BACKWARD = "backward"
    DONE = "done"
    """The last pass has ended; weight gradients that were put off may yet be computed."""
    DISCARDED = "discarded"


_FED, _FORWARD, _AWAITING, _BACKWARD, _DONE, _DISCARDED = Phase  # a name is found faster than an enum's member
_BEFORE: dict[Phase, tuple[Phase, ...]] = {
    _FORWARD: (_FED, _FORWARD, _AWAITING),
    _AWAITING: (_FORWARD,),
    _BACKWARD: (_AWAITING, _BACKWARD),
    _DONE: (_FORWARD, _BACKWARD),
    _DISCARDED: tuple(Phase),
}
"""Phase -> the phases that it may follow."""


class InFlightMicroBatch:
    """One micro-batch on one device, from its inputs until nothing is kept of it."""

    __slots__ = ("at_home", "contexts", "number", "pending_statistics", "phases", "rows", "targets", "updates_before")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: int | None = None
        """How many of its rows are samples; None: all."""
        self.at_home: dict[str, torch.Tensor] = {}
        """Inputs that this device holds for others, whole."""
        self.targets: dict[str, torch.Tensor] = {}
        self.phases: dict[int, Phase] = {}
        """Stage -> its phase there; a stage that is not named has not begun: FED."""
        self.contexts: dict[int, Context] = {}
        """Stage -> the context in which its operators run."""
        self.pending_statistics: dict[ReduceKey, tuple[Reduce, torch.Tensor, AllGather | None]] = {}
        """All-gathers of statistics that are yet to be waited for, with this device's row, and their place in a process
        group; None: messages carry them."""
        self.updates_before: int | None = None
        """Updates of the weights before its forward pass, where this device runs ahead."""

    def enter(self, stage: int, phase: Phase) -> None:
        """Go on to a phase in a stage; it is an error if the life cycle has no such step."""
        before = self.phases.get(stage, _FED)
        if before is not phase:
            assert before in _BEFORE[phase], f"m{self.number} in s{stage} is {before.value}; it cannot be {phase.value}"
            self.phases[stage] = phase

"""The result of one round of actions on one device."""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.executor.late_loss import LateLoss
from manyhands.executor.projections import SumRecord


@dataclass
class RoundResult:
    """The result of one round on this device: its part of the losses, where it computes them."""

    step: int
    losses: list[float] = field(default_factory=list)
    """One loss, or with order replay one for each step of the round."""
    pending: LateLoss | None = None
    """The loss of the round, where it is not known yet; see `Executor.settle`."""
    staleness: list[int] = field(default_factory=list)
    """Updates between the forward pass of each step and its own, where this device runs ahead; -1: discarded."""
    grad_norms: list[float] = field(default_factory=list)
    """The norm of all gradients of each update, before they were clipped, where the plan's devices exchange it."""
    seconds: float = 0.0
    sums: list[SumRecord] = field(default_factory=list)
    """This device's records of the sums of gradients: see `runtime.agreement`."""
    not_finite_from: str = ""
    """The device that the first non-finite numbers came from: another, or this one itself."""

    def add_loss(self, number: float, *, is_step: bool) -> None:
        """Add the loss of a micro-batch to the round's, or append it where every micro-batch is a step of its own."""
        if is_step or not self.losses:
            self.losses.append(number)
        else:
            self.losses[0] += number

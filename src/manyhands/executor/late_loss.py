"""The loss of a round that a GPU is still computing: it is waited for when the next round is on its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LateLoss:
    """A number on its way from a GPU to memory."""

    def __init__(self, losses: Sequence[torch.Tensor]) -> None:
        """`losses`: those of the round's micro-batches, whose sum it is."""
        total = sum_of(losses)
        self._copied: torch.cuda.Event | None = None
        if total.is_cuda:
            self._number = torch.empty((), dtype=total.dtype, pin_memory=True)
            self._number.copy_(total, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._number = total

    def wait(self) -> float:
        """Wait for the number, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)


def sum_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, formed in float64 as Python forms that of numbers."""
    return torch.stack([loss.double() for loss in losses]).sum() if len(losses) > 1 else losses[0].double()

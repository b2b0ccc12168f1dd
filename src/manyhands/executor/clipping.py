"""Clips the gradients of one device, by the norm of all devices' gradients or number by number.

The norm's parts are those of `schedule.gradient_norm`: a device gives [sum of squares, numbers that are not finite] of
its own, and adds up what all have given, in the order of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from manyhands.facts.clipping import Clipping
from manyhands.schedule.gradient_norm import NUMBERS

_COARSE = (torch.float16, torch.bfloat16)


class GradientTotals(NamedTuple):
    """The numbers of all gradients of an update, the same on every device."""

    squares: float
    not_finite: float
    """How many numbers of the gradients are not finite."""

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor]) -> GradientTotals:
        """Return the sum of what the devices have given, added in their order."""
        sums = [0.0] * NUMBERS
        for row in rows:
            sums = [total + number for total, number in zip(sums, row.tolist(), strict=True)]
        return cls(*sums)


def part_of_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a device's part of the totals: the sum of its gradients' squares, and how many numbers are not finite."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros(NUMBERS, dtype=torch.float64)
    norms = [
        torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in _COARSE else None) for each in gradients
    ]
    total = float(torch.stack([norm.double() for norm in norms]).square().sum())
    not_finite = 0 if math.isfinite(total) else sum(int((~torch.isfinite(each)).sum()) for each in gradients)
    return torch.tensor([total, float(not_finite)], dtype=torch.float64)


def clip(gradients: Iterable[torch.Tensor], clipping: Clipping, totals: GradientTotals | None) -> None:
    """Clip gradients in place."""
    if clipping.value is not None:
        for gradient in gradients:
            gradient.clamp_(-clipping.value, clipping.value)
    elif clipping.norm is not None:
        assert totals is not None, "the plan has the exchange of the norm"
        factor = clipping.factor(totals.norm)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

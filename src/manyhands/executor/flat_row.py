"""Gradients laid end to end in one row of memory, so that they are added up at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy
import torch

from manyhands.graph.weights import memory_order
from manyhands.schedule.actions import Reduce
from manyhands.transport.memory import as_bytes


class FlatRow:
    """A row of numbers on one device, in memory that is used again and again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def filled(
        self, reduce: Reduce, gradients: Sequence[torch.Tensor], place: torch.device, more: int = 0
    ) -> tuple[torch.Tensor, FlatGradients]:
        """Return a row with these gradients on a device, with room for `more` numbers after them, and their places in
        it."""
        staged = [gradient.to(place) for gradient in gradients]  # the same, where they lie there already
        if reduce.weights:  # stages may lay out their copies of a weight differently
            staged = [gradient.contiguous() for gradient in staged]
        count, dtype = sum(gradient.numel() for gradient in staged), staged[0].dtype
        row, laid_out = self._room(count + more, dtype, place), FlatGradients(gradients, staged)
        laid_out.copy_into(row)
        return row, laid_out

    def _room(self, count: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        if self._memory.dtype != dtype or self._memory.device != place or self._memory.numel() < count:
            self._memory = torch.empty(count, dtype=dtype, device=place)
        return self._memory[:count]


class FlatGradients:
    """Gradients, and where they are in a row."""

    def __init__(self, gradients: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        """`staged`: the same gradients on the row's device."""
        self._gradients, self._staged = gradients, staged
        self._rows = [in_memory_order(gradient) for gradient in staged]
        self._ends = [0, *accumulate(row.numel() for row in self._rows)]

    def copy_into(self, row: torch.Tensor) -> None:
        for numbers, (first, last) in zip(self._rows, pairwise(self._ends)):
            _copy(numbers, row[first:last])

    def take_from(self, row: torch.Tensor) -> None:
        """Put what the row has become where the gradients are."""
        for numbers, (first, last) in zip(self._rows, pairwise(self._ends)):
            _copy(row[first:last], numbers)
        for gradient, copy in zip(self._gradients, self._staged):
            if gradient is not copy:
                gradient.copy_(copy)


def in_memory_order(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory as one row, in the order in which it lies."""
    if not gradient.is_contiguous():
        gradient = gradient.permute(memory_order(gradient))
    return gradient.detach().view(-1)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy numbers; between processors' memory on this thread alone, as torch would start threads that fight for the
    cores that compute."""
    if target.is_cpu:
        numpy.copyto(numpy.frombuffer(as_bytes(target), "uint8"), numpy.frombuffer(as_bytes(source), "uint8"))
    else:
        target.copy_(source)

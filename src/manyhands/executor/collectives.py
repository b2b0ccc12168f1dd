"""Reductions of one device that go through process groups of torch.distributed, in place of messages.

A bucket of gradients is copied into one row, summed by the library, and copied back. The order in which the library
adds is its own: sums differ from those by messages in the last bits, and are the same on all devices. What statistics
are made of is gathered, and combined here in the order of the devices, as always.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy
import torch

from manyhands.executor.measured_choice import MeasuredChoice
from manyhands.executor.process_groups import STAMP_NUMBERS, AllGather, GroupKey, ProcessGroups
from manyhands.executor.projections import SumRecord, numbers_in, projection, projection_and_norm
from manyhands.facts.network import Network
from manyhands.graph.weights import memory_order
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import chunk_points, element_bytes, topic
from manyhands.transport.memory import as_bytes


class Collectives:
    """Forms sums by process groups, always or where they are faster."""

    def __init__(self, groups: ProcessGroups, *, is_measured: bool, first_step: int, stride: int) -> None:
        """`is_measured`: whether messages are used where they are faster. `first_step`: of the generation, whose rounds
        have `stride` steps each."""
        self.groups, self.is_measured = groups, is_measured
        self._first_step, self._stride = first_step, stride
        self._choices: defaultdict[GroupKey, MeasuredChoice] = defaultdict(MeasuredChoice)
        self._row = torch.empty(0)
        self.counts: Counter[str] = Counter()
        """Group -> reductions that have gone through it."""

    def close(self) -> None:
        """End all groups, whatever they wait for."""
        self.groups.close()

    def takes(self, reduce: Reduce, step: int) -> bool:
        """Return whether this reduction goes through its group; all of its devices return the same."""
        if not self.is_measured:
            return True
        key, number = GroupKey.of(reduce), self._round(step)
        choice = self._choices[key]
        if choice.is_due(number):
            times = torch.tensor(choice.times(), dtype=torch.float64)
            rows = self.groups.begin_all_gather(key, times, f"times {key}").finish(torch.float64)
            choice.decide([(float(builtin), float(of_torch)) for builtin, of_torch in rows])
        return choice.uses_torch(number)

    def took(self, reduce: Reduce, step: int, seconds: float) -> None:
        """Note how long this device has waited for a reduction."""
        if self.is_measured:
            self._choices[GroupKey.of(reduce)].took(self._round(step), seconds)

    def _round(self, step: int) -> int:
        return (step - self._first_step) // self._stride

    def sum(self, reduce: Reduce, network: Network, step: int, gradients: Sequence[torch.Tensor]) -> SumRecord:
        """Add up gradients in place, and return this device's record of the sum."""
        key = GroupKey.of(reduce)
        place, dtype = self.groups.device_of(key), gradients[0].dtype
        points, size = chunk_points(reduce, network), element_bytes(reduce, network)
        staged = [gradient.to(place) for gradient in gradients]  # the same, where they lie there already
        if reduce.weights:  # stages may lay out their copies of a weight differently
            staged = [gradient.contiguous() for gradient in staged]
        numbers = self._room(points[-1] + STAMP_NUMBERS, dtype, place)
        rows = [_dense(gradient) for gradient in staged]
        ends = [0, *numpy.cumsum([row.numel() for row in rows]).tolist()]
        for row, (first, last) in zip(rows, pairwise(ends)):
            _copy(row, numbers[first:last])

        def chunks() -> list[list[numpy.ndarray]]:
            memory = as_bytes(numbers.cpu())
            return [[numbers_in(memory[size * first : size * last], dtype)] for first, last in pairwise(points)]

        before = [projection_and_norm(chunk) for chunk in chunks()]
        self.counts[str(key)] += 1
        self.groups.all_reduce(key, numbers, f"{topic(reduce, 0, 0)} of step {step}")
        after = tuple(projection(chunk) for chunk in chunks())
        for row, (first, last) in zip(rows, pairwise(ends)):
            _copy(numbers[first:last], row)
        for gradient, copy in zip(gradients, staged):
            if gradient is not copy:
                gradient.copy_(copy)
        return SumRecord(
            reduce.stage, reduce.first, reduce.last, reduce.micro_batch, tuple(total for total, _ in before),
            tuple(norm for _, norm in before), (), (), after, tied=reduce.weights[0] if reduce.weights else "",
        )  # fmt: skip

    def begin_gather(self, reduce: Reduce, step: int, row: torch.Tensor) -> AllGather:
        """Begin to give this device's row to all, and to receive theirs."""
        key = GroupKey.of(reduce)
        self.counts[str(key)] += 1
        return self.groups.begin_all_gather(key, row, f"{topic(reduce, 0, 0)} of step {step}")

    def _room(self, count: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        """Return memory for so many numbers, used again and again."""
        if self._row.dtype != dtype or self._row.device != place or self._row.numel() < count:
            self._row = torch.empty(count, dtype=dtype, device=place)
        return self._row[:count]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
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

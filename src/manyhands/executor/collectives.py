"""Reductions of one device that go through process groups of torch.distributed, in place of messages.

A bucket of gradients is copied into one row, summed by the library, and copied back. The order in which the library
adds is its own: sums differ from those by messages in the last bits, and are the same on all devices. What statistics
are made of is gathered, and combined here in the order of the devices, as always.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch

from manyhands.executor.flat_row import FlatRow
from manyhands.executor.gpu_projections import projected
from manyhands.executor.measured_choice import MeasuredChoice
from manyhands.executor.process_groups import STAMP_NUMBERS, AllGather, GroupKey, ProcessGroups
from manyhands.executor.projections import SumRecord, numbers_in, projection_and_norm
from manyhands.facts.network import Network
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
        self._row = FlatRow()
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
            choice.decide(number, [row.tolist() for row in rows])
        return choice.uses_torch(number)

    def took(self, reduce: Reduce, step: int, seconds: float) -> None:
        """Note how long this device has waited for a reduction."""
        if self.is_measured:
            self._choices[GroupKey.of(reduce)].took(self._round(step), seconds)

    @property
    def is_trying(self) -> bool:
        """Whether it is not known yet which way is the faster for some of the groups that were asked for."""
        return any(choice.is_trial for choice in self._choices.values())

    def _round(self, step: int) -> int:
        return (step - self._first_step) // self._stride

    def sum(self, reduce: Reduce, network: Network, step: int, gradients: Sequence[torch.Tensor]) -> SumRecord:
        """Add up gradients in place, and return this device's record of the sum."""
        key = GroupKey.of(reduce)
        place, dtype = self.groups.device_of(key), gradients[0].dtype
        points, size = chunk_points(reduce, network), element_bytes(reduce, network)
        numbers, laid_out = self._row.filled(reduce, gradients, place, more=STAMP_NUMBERS)

        def projections() -> list[tuple[float | None, float]]:
            if numbers.is_cuda:
                return projected([[numbers[first:last]] for first, last in pairwise(points)])
            memory = as_bytes(numbers)
            places = [(size * first, size * last) for first, last in pairwise(points)]
            return [projection_and_norm([numbers_in(memory[first:last], dtype)]) for first, last in places]

        before = projections()
        self.counts[str(key)] += 1
        self.groups.all_reduce(key, numbers, f"{topic(reduce, 0, 0)} of step {step}")
        after = tuple(total for total, _ in projections())
        laid_out.take_from(numbers)
        return SumRecord(
            reduce.stage, reduce.first, reduce.last, reduce.micro_batch, tuple(total for total, _ in before),
            tuple(norm for _, norm in before), (), (), after, tied=reduce.weights[0] if reduce.weights else "",
        )  # fmt: skip

    def begin_gather(self, reduce: Reduce, step: int, row: torch.Tensor) -> AllGather:
        """Begin to give this device's row to all, and to receive theirs."""
        key = GroupKey.of(reduce)
        self.counts[str(key)] += 1
        return self.groups.begin_all_gather(key, row, f"{topic(reduce, 0, 0)} of step {step}")

"""The numbers that a schedule changes from step to step: read from PyTorch's groups, sent, and given to a device.

Schedulers run in the coordinator, on PyTorch's own objects. What they made of a step's learning rates, momenta, betas
and weight decays travels as float64, all groups of the optimizer in one message, and so is the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from manyhands.executor.messages import COORDINATOR
from manyhands.executor.torch_optimizers import SCHEDULED, stand_ins
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.transport.endpoint import Endpoint


def rates_topic(place: int) -> str:
    """Return the topic of a step's numbers; `place`: which step of the round it is."""
    return f"rates {place}"


class Accumulation(NamedTuple):
    """The use of the gradients of one step, where several steps add up theirs for one update."""

    share: float
    """By what they are multiplied before they are added."""
    updates: bool
    """Whether the weights are then updated; else the sum is kept for the step after."""


EACH_UPDATES = Accumulation(1.0, True)


@dataclass(frozen=True)
class RateLayout:
    """The numbers of each group that travel, in their order; after them those of an accumulation, if there is one."""

    groups: tuple[tuple[tuple[str, int], ...], ...]
    """Options of each group, each with how many numbers it has; 0: it is a number itself."""
    accumulates: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> RateLayout:
        return cls.of_groups(stand_ins(optimizer)[1], optimizer.accumulates)

    @classmethod
    def of_groups(cls, groups: Sequence[Mapping[str, Any]], accumulates: bool = False) -> RateLayout:
        """Return the layout for groups of PyTorch's."""
        sized = []
        for group in groups:
            present = [name for name in SCHEDULED if _is_number(group.get(name)) or _are_numbers(group.get(name))]
            sized.append(tuple((name, 0 if _is_number(group[name]) else len(group[name])) for name in present))
        return cls(tuple(sized), accumulates)

    @property
    def count(self) -> int:
        return sum(max(size, 1) for group in self.groups for _, size in group) + 2 * self.accumulates

    @property
    def bytes(self) -> int:
        return 8 * self.count

    def read(self, groups: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
        """Return the numbers of PyTorch's groups as they are now."""
        numbers: list[float] = []
        for options, group in zip(self.groups, groups):
            for name, size in options:
                values = group[name] if size else (group[name],)
                numbers += [float(value) for value in values]
        if not all(map(math.isfinite, numbers)):
            raise BadValue("The schedule gives a learning rate, momentum or weight decay that is not finite.")
        return tuple(numbers)

    def options(self, numbers: Sequence[float]) -> list[dict[str, float | tuple[float, ...]]]:
        """Return the options of each group from the numbers that `read` returned."""
        left = iter(numbers)
        return [
            {name: tuple(next(left) for _ in range(size)) if size else next(left) for name, size in options}
            for options in self.groups
        ]

    def accumulation(self, numbers: Sequence[float]) -> Accumulation:
        """Return what becomes of the gradients, from the numbers of a step."""
        return Accumulation(numbers[-2], bool(numbers[-1])) if self.accumulates else EACH_UPDATES


def others(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of PyTorch's groups that do not travel, and which no schedule may change."""
    left_out = {"params", "param_names", *SCHEDULED, *_OF_SCHEDULES}
    return [{name: value for name, value in group.items() if name not in left_out} for group in groups]


_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_lr", "base_momentum", "max_momentum", "swa_lr")
"""What schedulers keep in groups for themselves."""


class ArrivingRates:
    """Receives the numbers of each step on a device."""

    def __init__(self, endpoint: Endpoint, layout: RateLayout, steps_per_round: int) -> None:
        self._endpoint, self.layout, self._steps_per_round = endpoint, layout, steps_per_round

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of the messages of a round."""
        return {(COORDINATOR, rates_topic(place)): self.layout.bytes for place in range(self._steps_per_round)}

    def receive(self, step: int, place: int) -> list[float]:
        """Return the numbers of a step, once they are here; `step`: the first of its round."""
        numbers = torch.empty(self.layout.count, dtype=torch.float64)
        self._endpoint.mailbox.receive(COORDINATOR, step, rates_topic(place), [numbers])
        return numbers.tolist()


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_number, value))

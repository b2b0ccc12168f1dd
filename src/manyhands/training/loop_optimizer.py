"""The optimizer of a user's own loop: PyTorch's object, whose rates the loop's schedulers may change at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands.executor.rates import EACH_UPDATES, Accumulation, RateLayout, others
from manyhands.facts.errors import BadValue
from manyhands.job.given_optimizer import GivenOptimizer
from manyhands.runtime.order import RunState


class LoopOptimizer:
    """Reads the numbers of PyTorch's groups before every step, and sends them along with it."""

    def __init__(self, given: GivenOptimizer, *, accumulates: bool = False) -> None:
        """`accumulates`: several steps may add up their gradients for one update."""
        self.given = given
        if accumulates:
            given.optimizer = given.optimizer.accumulating()
        self._groups: list[dict[str, Any]] = [
            group for torch_optimizer in given.objects for group in torch_optimizer.param_groups
        ]
        self._layout = RateLayout.of_groups(self._groups, accumulates)
        self._fixed = others(self._groups)
        self._numbers: dict[int, tuple[float, ...]] = {}
        """Step -> the numbers with which it was asked for, since the last checkpoint."""
        for torch_optimizer in given.objects:
            torch_optimizer.__dict__["_opt_called"] = True  # else schedules warn that no step came before theirs

    @property
    def rates(self) -> LoopOptimizer | None:
        """The numbers of each step; None: they follow from the optimizer's own description."""
        return self if self._groups else None

    def note(self, step: int, accumulation: Accumulation = EACH_UPDATES) -> None:
        """Note the numbers that the groups have now, for a step, and what becomes of its gradients."""
        now = others(self._groups)
        if len(now) != len(self._fixed) or any(
            new.get(name) != value for new, fixed in zip(now, self._fixed) for name, value in fixed.items()
        ):
            raise BadValue(
                "The optimizer's groups or options have changed since the loop began.",
                hint="Its lr, momentum, betas and weight_decay may change from step to step; for anything else close "
                "the step and prepare another.",
            )
        numbers = self._layout.read(self._groups)
        self._numbers[step] = (*numbers, *map(float, accumulation)) if self._layout.accumulates else numbers

    def check_unchanged(self, step: int) -> None:
        """Refuse numbers that were changed after a step was begun with others."""
        begun_with, now = self._numbers.get(step, ()), self._layout.read(self._groups)
        if begun_with and begun_with[: len(now)] != now:
            raise BadValue(
                "The optimizer's lr, momentum, betas or weight_decay changed between a step and its update, which the "
                "workers have made with those from before.",
                hint="Change them before training_step, or after the update.",
            )

    def is_known(self, step: int) -> bool:
        return step in self._numbers

    def at(self, step: int) -> tuple[float, ...]:
        return self._numbers[step]

    def forget_before(self, step: int) -> None:
        """Forget the numbers of steps that will not be run again."""
        for old in [noted for noted in self._numbers if noted < step]:
            del self._numbers[old]

    def take_back(self, state: RunState) -> None:
        """Give PyTorch's objects the state after the last step."""
        self.given.take_back(state.optimizer, state.scalars)
        self._fixed = others(self._groups)


class AbsentGradient(torch.Tensor):
    """A stand-in for a parameter's gradient after `loss.backward()` of a step that the workers have done: whoever looks
    at it is told that it is not here."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise BadValue(
            "Gradients are summed and used on the workers: there are none here to be clipped, scaled or read.",
            hint="Take out the line that uses them; what acts on gradients is an option of mh.prepare.",
        )


def mark_absent(model: nn.Module) -> None:
    """Put an absent gradient into every trained parameter."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            parameter.grad = zero.expand(parameter.shape).as_subclass(AbsentGradient)


def clear_absent(model: nn.Module) -> None:
    """Take out what `mark_absent` has put in."""
    for parameter in model.parameters():
        if type(parameter.grad) is AbsentGradient:
            parameter.grad = None

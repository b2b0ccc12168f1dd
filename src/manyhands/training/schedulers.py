"""Records the schedules that `configure_optimizers` makes, as data: the arguments of each constructor call.

A scheduler of PyTorch does not keep its arguments (OneCycleLR keeps no max_lr), and changes its optimiser as soon as it
is made. So the constructors are watched while the user's function runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from manyhands.executor.by_name import classes
from manyhands.executor.optimizers import build
from manyhands.executor.schedules import resolve_schedule, schedule_names
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer

Pair = tuple[str, dict[str, Any]]
_STEPWISE = 'Return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}}, counted in steps.'
_IN_SEQUENCE = "Let one follow the other: SequentialLR(optimizer, [first, second], milestones=[5])."


class Configuring:
    """Records the schedulers that are made within a `with` statement."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, dict[str, Any]]] = {}
        """id of a scheduler -> the scheduler, so that its id is not reused, and its arguments."""
        self._groups: dict[int, Mapping[str, Any]] = {}
        """id of an optimiser -> its options before any scheduler changed them."""
        self._originals: list[tuple[type, Callable[..., None]]] = []

    def __enter__(self) -> Configuring:
        for kind in classes(lr_scheduler, LRScheduler).values():
            if "__init__" in vars(kind):
                self._originals.append((kind, kind.__init__))
                kind.__init__ = self._watched(kind.__init__)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, original in self._originals:
            kind.__init__ = original  # type: ignore[misc]
        self._originals.clear()

    def _watched(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def noted(scheduler: Any, *positional: Any, **named: Any) -> None:
            bound = inspect.signature(original).bind(scheduler, *positional, **named).arguments
            optimizer = bound.get("optimizer")
            if isinstance(optimizer, torch.optim.Optimizer):
                self._groups.setdefault(id(optimizer), _copied(optimizer.param_groups[0]))
            if id(scheduler) not in self._made:  # not the arguments that a user's subclass passes to PyTorch's
                self._made[id(scheduler)] = (scheduler, dict(list(bound.items())[1:]))
            original(scheduler, *positional, **named)

        return noted

    def group_of(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
        """Return the options of an optimiser with one group, as its user gave them."""
        return self._groups.get(id(optimizer)) or _copied(optimizer.param_groups[0])

    def schedule_of(self, schedulers: list[Any]) -> tuple[list[Pair], list[int] | None]:
        """Return consecutive schedules with their milestones, from what Lightning accepts as lr_scheduler(s)."""
        if len(schedulers) > 1:
            raise BadValue(
                f"configure_optimizers gives {len(schedulers)} schedules, which would all be applied at every step; "
                "there can be one.",
                hint=_IN_SEQUENCE,
            )
        if not schedulers:
            return [], None
        settings = schedulers[0] if isinstance(schedulers[0], dict) else {"scheduler": schedulers[0]}
        scheduler, milestones = settings.get("scheduler"), None
        if isinstance(scheduler, SequentialLR):
            arguments = self._given(scheduler)
            pairs, milestones = (
                [self._pair(scheduler) for scheduler in arguments["schedulers"]],
                list(arguments["milestones"]),
            )
        else:
            pairs = [self._pair(scheduler)]
        _check_by_step(type(scheduler).__name__, settings)
        return pairs, milestones

    def _pair(self, scheduler: Any) -> Pair:
        name = type(scheduler).__name__
        if isinstance(scheduler, (SequentialLR, ChainedScheduler)):
            raise BadValue(f"A {name} cannot be used here: there is one schedule at a time.", hint=_IN_SEQUENCE)
        if type(scheduler) not in classes(lr_scheduler, object).values():
            raise BadValue(
                f"The schedule {name} is no class of torch.optim.lr_scheduler, and no code travels to workers.",
                hint=f"Use one of {', '.join(schedule_names())}",
            )
        resolve_schedule(name)
        arguments = {option: _plain(value) for option, value in self._given(scheduler).items() if option != "optimizer"}
        if arguments.pop("last_epoch", -1) != -1:
            raise BadValue(f"The schedule {name} begins in the middle (last_epoch).", hint="Leave last_epoch out.")
        arguments.pop("verbose", None)
        return name, arguments

    def _given(self, scheduler: Any) -> dict[str, Any]:
        if id(scheduler) not in self._made:
            raise BadValue(
                f"The schedule {type(scheduler).__name__} was not made in configure_optimizers, so its options are "
                "not known.",
                hint="Make optimiser and scheduler within configure_optimizers.",
            )
        return self._made[id(scheduler)][1]


def _check_by_step(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a schedule that Lightning would not step once after every step of the optimiser."""
    if settings.get("interval", "epoch") != "step":
        raise BadValue(f"The schedule {name} is one of epochs; here the learning rate follows steps.", hint=_STEPWISE)
    if settings.get("frequency", 1) != 1:
        raise BadValue(
            f"The schedule {name} steps once in {settings['frequency']} steps (frequency); here it does after each.",
            hint="Leave frequency out, and count in steps.",
        )


def check_begun(optimizer: Optimizer, torch_optimizer: torch.optim.Optimizer) -> None:
    """Refuse the optimiser that was read if its first learning rate differs from that of the user's own objects."""
    read, rate = build(optimizer, {}).learning_rate, float(torch_optimizer.param_groups[0]["lr"])
    if read != rate:
        raise BadValue(
            f"The learning rate is {rate} after configure_optimizers; by its optimiser and schedule it is {read}.",
            hint="Do not step a schedule, nor set rates by hand, in configure_optimizers.",
        )


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group. Tensors are cloned: a rate that is a tensor is changed in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, (tuple, list, range)) else value

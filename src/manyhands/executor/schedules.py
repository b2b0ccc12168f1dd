"""Learning-rate schedules of an optimiser fact -> PyTorch's schedulers: several follow one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from manyhands.executor.by_name import check_options, classes, resolve, wrapped
from manyhands.executor.rates import RateLayout
from manyhands.executor.torch_optimizers import stand_ins
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer

_AS_SCHEDULER = "give it in Python: scheduler="
_A_LIST = "schedules that follow one another are given as a list, schedule=[first, second], milestones=[5]"
REFUSED = {
    "ReduceLROnPlateau": f"it needs a metric; {_AS_SCHEDULER}lambda optimizer: ReduceLROnPlateau(optimizer)",
    "LambdaLR": f"it needs a function; {_AS_SCHEDULER}lambda optimizer: LambdaLR(optimizer, function)",
    "MultiplicativeLR": f"it needs a function; {_AS_SCHEDULER}lambda optimizer: MultiplicativeLR(optimizer, function)",
    "SequentialLR": _A_LIST,
    "ChainedScheduler": f"{_A_LIST}; or {_AS_SCHEDULER}lambda optimizer: ChainedScheduler([first, second])",
}


def schedule_names() -> list[str]:
    """Return the names of this PyTorch's schedules that can be given by name."""
    return sorted(set(_known()) - set(REFUSED))


def resolve_schedule(name: str) -> type[LRScheduler]:
    """Return the class of a schedule; one that needs more than a name and options is refused, with those that may be
    used."""
    kind: type[LRScheduler] = resolve("schedule", name, _known(), REFUSED)
    return kind


def scheduler(optimizer: Optimizer, built: torch.optim.Optimizer) -> LRScheduler | None:
    """Return the scheduler that sets the rates of `built`, PyTorch's optimiser: made as with PyTorch alone, in the same
    order, so that rates are the same to the last bit."""
    made = []
    for name, options in optimizer.schedule:
        kind = resolve_schedule(name)
        check_options(kind, options)
        made.append(wrapped(kind.__name__, options, lambda: kind(built, **options)))  # type: ignore[arg-type] # noqa: B023
    if len(made) < 2:
        return made[0] if made else None
    return SequentialLR(built, made, list(optimizer.milestones))


def at_start(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser as it is at its first step, without its schedule.

    Measuring and trying plans take as many steps as they need, which may be more than the schedule has.
    """
    if not optimizer.schedule:
        return optimizer
    made, groups = stand_ins(optimizer)
    for torch_optimizer in made:
        scheduler(optimizer, torch_optimizer)
    layout = RateLayout.of_groups(groups)
    return optimizer.without_schedule().with_options(layout.options(layout.read(groups)))


def check_ends(schedulers: Sequence[Any], steps: int) -> None:
    """Refuse a run that is longer than one of its schedules can go on: OneCycleLR's total_steps."""
    for schedule, first, last in (span for each in schedulers for span in _spans(each, 0, steps)):
        most = getattr(schedule, "total_steps", None)
        if most is not None and last - first > most:
            name = type(schedule).__name__
            raise BadValue(
                f"The schedule {name} is over after {most} steps; it is to go on for {last - first}.",
                hint=f"Give it total_steps={last - first}, or train for fewer steps.",
            )


def _spans(schedule: Any, first: int, last: int) -> Iterator[tuple[Any, int, int]]:
    """Yield each scheduler within another, with the steps from which and up to which it is stepped."""
    parts = getattr(schedule, "_schedulers", None)
    if parts is None:
        yield schedule, first, last
    elif isinstance(schedule, SequentialLR):
        begins = [first, *(min(first + step, last) for step in schedule._milestones)]
        for part, begin, end in zip(parts, begins, [*begins[1:], last]):
            yield from _spans(part, begin, end)
    else:
        for part in parts:
            yield from _spans(part, first, last)


def _known() -> dict[str, type[LRScheduler]]:
    return classes(lr_scheduler, LRScheduler)

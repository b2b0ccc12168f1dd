"""Learning-rate schedules of an optimiser fact -> one of PyTorch's schedulers: several follow one another."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from manyhands.executor.by_name import check_options, classes, resolve, wrapped
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer

_NO_CODE = "it needs a function, and no code travels to workers"
_A_LIST = "schedules that follow one another are given as a list, schedule=[first, second], milestones=[5]"
REFUSED = {
    "ReduceLROnPlateau": "it needs a metric, and workers have none",
    "LambdaLR": _NO_CODE,
    "MultiplicativeLR": _NO_CODE,
    "SequentialLR": _A_LIST,
    "ChainedScheduler": f"there is one schedule at a time; {_A_LIST}",
}


def schedule_names() -> list[str]:
    """Return the names of this PyTorch's schedules that workers can run."""
    return sorted(set(_known()) - set(REFUSED))


def resolve_schedule(name: str) -> type[LRScheduler]:
    """Return the class of a schedule; one that workers cannot run is refused, with those that may be used."""
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


def check_length(optimizer: Optimizer, made: LRScheduler | None, steps: int) -> None:
    """Refuse a run that is longer than one of its schedules can go on: OneCycleLR's total_steps."""
    schedulers = made._schedulers if isinstance(made, SequentialLR) else [made]
    begins = (0, *optimizer.milestones)
    for schedule, begin, end in zip(schedulers, begins, (*optimizer.milestones, steps)):
        most = getattr(schedule, "total_steps", None)
        if most is not None and min(end, steps) - begin > most:
            name = type(schedule).__name__
            raise BadValue(
                f"The schedule {name} is over after {most} steps; it is to go on for {min(end, steps) - begin}.",
                hint=f"Give it total_steps={min(end, steps) - begin}, or train for fewer steps.",
            )


def _known() -> dict[str, type[LRScheduler]]:
    return classes(lr_scheduler, LRScheduler)

"""Options of optimisers and schedules as data: names, numbers, texts and lists of these, checked when given."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from manyhands.facts.errors import BadValue

Scalar = bool | int | float | str | None
Option = Scalar | tuple[Scalar, ...]
Options = tuple[tuple[str, Option], ...]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}(\.[A-Za-z_][A-Za-z0-9_]{0,99}){0,9}")
"""A class of torch.optim, or one of another package with all of its path."""
_ALLOWED = "Options may be numbers, true or false, texts, None, and lists of these."
PAIR_HINT = 'Write it like schedule=("CosineAnnealingLR", {"T_max": 100}), or a list of such pairs.'
_LENGTHS = {
    "constantlr": "total_iters", "cosineannealinglr": "T_max", "linearlr": "total_iters", "onecyclelr": "total_steps",
    "polynomiallr": "total_iters",
}  # fmt: skip
"""Schedules that come to an end, each with the option that says after how many steps; others never end."""


def checked_name(kind: str, name: object) -> str:
    pattern = _CLASS if kind == "optimizer" else NAME
    if not isinstance(name, str) or not pattern.fullmatch(name):
        expected = (
            "a class of torch.optim, by name" if kind == "optimizer" else "a class of torch.optim.lr_scheduler, by name"
        )
        raise BadValue(f"The {kind} is {name!r:.80}; it must be {expected}.")
    return name


def checked(owner: str, options: Mapping[Any, Any]) -> Options:
    return tuple((str(option), _option(owner, option, value)) for option, value in options.items())


def _option(owner: str, option: object, value: object) -> Option:
    if not isinstance(option, str) or not NAME.fullmatch(option):
        raise BadValue(f"{owner}: {option!r:.80} is not an option's name.")
    if isinstance(value, (list, tuple)):
        return tuple(_scalar(owner, option, item) for item in value)
    return _scalar(owner, option, value)


def _scalar(owner: str, option: str, value: object) -> Scalar:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)  # numpy's are floats too, but print otherwise
    if isinstance(value, float):
        raise BadValue(f"{owner}: {option} is {value}; it must be finite.")
    raise BadValue(f"{owner}: {option} is {value!r:.80}, of type {type(value).__name__}.", hint=_ALLOWED)


def checked_schedules(schedule: object) -> tuple[tuple[str, Options], ...]:
    """Return one (name, options) pair, or a list of them, as checked pairs."""
    if schedule is None:
        return ()
    if not isinstance(schedule, (list, tuple)):
        raise BadValue(f"The schedule is {schedule!r:.80}; it must be a pair of name and options.", hint=PAIR_HINT)
    pairs = [schedule] if schedule and isinstance(schedule[0], str) else schedule
    pairs_checked = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise BadValue(f"A schedule is {pair!r:.80}; it must be a pair of name and options.", hint=PAIR_HINT)
        name = checked_name("schedule", pair[0])
        pairs_checked.append((name, checked(name, pair[1])))
    return tuple(pairs_checked)


def checked_milestones(milestones: object, schedules: tuple[tuple[str, Options], ...]) -> tuple[int, ...]:
    """Return the steps at which each schedule but the first begins, as the caller gave them."""
    hint = "Each schedule but the first begins at one: schedule=[first, second], milestones=[5]."
    if not isinstance(milestones, (list, tuple)) or any(
        isinstance(item, bool) or not isinstance(item, int) for item in milestones
    ):
        raise BadValue(f"milestones is {milestones!r:.80}; it must be a list of steps.", hint=hint)
    if len(milestones) != max(len(schedules) - 1, 0):
        raise BadValue(f"There are {len(schedules)} schedule(s) and {len(milestones)} milestone(s).", hint=hint)
    if any(later <= earlier for earlier, later in zip((0, *milestones), milestones)):
        raise BadValue(f"milestones is {list(milestones)}; they must be above 0 and each above the one before it.")
    return tuple(int(item) for item in milestones)


def ends(schedules: tuple[tuple[str, Options], ...]) -> tuple[int, ...]:
    """Return the steps at which each schedule but the last ends, by its own options; where none says so it is refused,
    since PyTorch has no rule for it."""
    steps: list[int] = []
    for name, options in schedules[:-1]:
        option = _LENGTHS.get(name.lower())
        length = dict(options).get(option) if option is not None else None
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            length_text = f"its {option} is {length!r}" if option is not None else "it has no end of its own"
            raise BadValue(
                f"Schedules follow one another, but nothing says where {name} ends: {length_text}.",
                hint=f"Say at which step each of the others begins: milestones=[...], {len(schedules) - 1} number(s).",
            )
        steps.append((steps[-1] if steps else 0) + length)
    return tuple(steps)


def plain(options: Options) -> dict[str, Any]:
    return {option: list(value) if isinstance(value, tuple) else value for option, value in options}

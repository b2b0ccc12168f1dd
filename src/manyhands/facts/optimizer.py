"""The optimiser that trains the weights, as data: a class of torch.optim by name, options, learning-rate schedules.

    Optimizer("SGD", lr=0.1, momentum=0.9)
    Optimizer("Adam", lr=1e-3, schedule=("CosineAnnealingLR", {"T_max": 100}))
    Optimizer("SGD", lr=0.1, schedule=[("LinearLR", {"total_iters": 5}), ("ExponentialLR", {"gamma": 0.99})])
    Optimizer("SGD", lr=0.1, schedule=[("StepLR", {"step_size": 3}), ("ExponentialLR", {"gamma": 0.9})], milestones=[9])

A schedule steps once per optimiser step. Those of a list follow one another, as in PyTorch's SequentialLR: each begins
at its milestone, a number of steps. Without milestones each begins where the one before it ends, if that says where.

On the command line the same is one word, read by `parse`:

    SGD:lr=0.1,momentum=0.9
    Adam:lr=1e-3,betas=[0.9,0.99],schedule=CosineAnnealingLR,T_max=100
    SGD:lr=0.1,milestones=[9],schedule=StepLR,step_size=3,schedule=ExponentialLR,gamma=0.9

What follows `schedule=` belongs to that schedule; a second `schedule=` begins the next one. Whether PyTorch knows the
names and options is checked where PyTorch is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadValue

Scalar = bool | int | float | str | None
Option = Scalar | tuple[Scalar, ...]
_Options = tuple[tuple[str, Option], ...]
_ALLOWED = "Options may be numbers, true or false, texts, None, and lists of these."
_PAIR_HINT = 'Write it like schedule=("CosineAnnealingLR", {"T_max": 100}), or a list of such pairs.'
_TEXT_HINT = "Write it like SGD:lr=0.1,momentum=0.9 or Adam:lr=1e-3,schedule=CosineAnnealingLR,T_max=100"
_LENGTHS = {
    "constantlr": "total_iters", "cosineannealinglr": "T_max", "linearlr": "total_iters", "onecyclelr": "total_steps",
    "polynomiallr": "total_iters",
}  # fmt: skip
"""Schedules that come to an end, each with the option that says after how many steps; others never end."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_COMMA = re.compile(r",(?![^\[(]*[\])])")  # not those within brackets
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "none": None}


class Optimizer:
    """An optimiser's name and options, and its schedules. It never changes; equal ones are interchangeable.

    schedule    one pair (name, options) of torch.optim.lr_scheduler, or a list of pairs that follow one another
    milestones  of a list: the steps at which the second schedule begins, the third, ...; None: each where the one
                before it ends (total_iters, T_max, total_steps)
    """

    __slots__ = ("_milestones", "_name", "_options", "_schedule")
    _name: str
    _options: _Options
    _schedule: tuple[tuple[str, _Options], ...]
    _milestones: tuple[int, ...]

    def __init__(self, name: str, /, *, schedule: Any = (), milestones: Any = None, **options: Any) -> None:
        schedules = _checked_schedules(schedule)
        parts = (
            _ends(schedules) if milestones is None else _checked_milestones(milestones, schedules),
            _checked_name("optimizer", name), _checked(name, options), schedules,
        )  # fmt: skip
        for field, part in zip(self.__slots__, parts):
            object.__setattr__(self, field, part)

    @property
    def name(self) -> str:
        return self._name

    @property
    def options(self) -> dict[str, Option]:
        """A copy, in the order they were written."""
        return dict(self._options)

    @property
    def schedule(self) -> tuple[tuple[str, dict[str, Option]], ...]:
        """(name, options) of each schedule, in the order they follow one another."""
        return tuple((name, dict(options)) for name, options in self._schedule)

    @property
    def milestones(self) -> tuple[int, ...]:
        """The steps at which the second schedule begins, the third, ..."""
        return self._milestones

    def to_dict(self) -> dict[str, Any]:
        """Return a plain document that `from_dict` reads back to an equal optimiser."""
        schedule = [[name, _plain(options)] for name, options in self._schedule]
        document: dict[str, Any] = {"name": self.name, "options": _plain(self._options)}
        if schedule:
            document["schedule"] = schedule
        if self._milestones:
            document["milestones"] = list(self._milestones)
        return document

    def to_text(self) -> str:
        """Return one word for the command line that `parse` reads back, for options as they are typed: texts in words
        without commas, lists that hold something."""
        words = _typed(self._options)
        if self._milestones:
            words.append(f"milestones=[{','.join(map(str, self._milestones))}]")
        for name, options in self._schedule:
            words += [f"schedule={name}", *_typed(options)]
        return f"{self.name}:{','.join(words)}" if words else self.name

    @classmethod
    def from_dict(cls, document: Any) -> Optimizer:
        read = decode(document, _Document, "optimizer", BadValue)
        for field in ("schedule", "milestones"):
            if field in read.options:
                raise BadValue(
                    f"optimizer: '{field}' is among the options; it is a field beside them.", hint=_PAIR_HINT
                )
        return cls(read.name, schedule=read.schedule, milestones=read.milestones, **read.options)

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"An Optimizer cannot be changed ({field}); make another.")

    def __delattr__(self, field: str) -> None:
        raise AttributeError(f"An Optimizer cannot be changed ({field}); make another.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented
        own_parts, other_parts = ((spec.name, spec.options, spec.schedule, spec.milestones) for spec in (self, other))
        return own_parts == other_parts

    def __hash__(self) -> int:
        schedules = ((name, frozenset(options)) for name, options in self._schedule)
        return hash((self._name, frozenset(self._options), self._milestones, *schedules))

    def __repr__(self) -> str:
        words = [repr(self.name), *(f"{option}={value!r}" for option, value in self._options)]
        if self._schedule:
            words.append(f"schedule={self.schedule[0] if len(self._schedule) == 1 else list(self.schedule)!r}")
        if self._milestones:
            words.append(f"milestones={list(self._milestones)!r}")
        return f"Optimizer({', '.join(words)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts for pickling, with which copy.copy and copy.deepcopy work although nothing can be set."""
        return (Optimizer.from_dict, (self.to_dict(),))


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    options: dict[str, Any] = {}
    schedule: list[tuple[str, dict[str, Any]]] = []
    milestones: list[int] | None = None


def parse(text: str) -> Optimizer:
    """Return the optimiser that is written on the command line; see the top of this file."""
    name, colon, options_text = text.strip().partition(":")
    if not _NAME.fullmatch(name):
        raise BadValue(f"optimizer '{text:.120}': '{name:.60}' is not an optimiser's name.", hint=_TEXT_HINT)
    options: dict[str, Any] = {}
    schedules: list[tuple[str, dict[str, Any]]] = []
    for part in _COMMA.split(options_text) if colon else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not _NAME.fullmatch(option) or not equals or not value:
            raise BadValue(f"optimizer '{text:.120}': '{part:.60}' is not option=value.", hint=_TEXT_HINT)
        if option == "schedule":
            schedules.append((value, {}))
            continue
        owner, into = schedules[-1] if schedules else (name, options)
        if option in into:
            raise BadValue(f"optimizer '{text:.120}': {option} of {owner} is given twice.")
        into[option] = _value(text, part, value)
    return Optimizer(name, schedule=schedules, **options)


def _value(text: str, part: str, value: str) -> Option:
    if value[0] not in "[(":
        return _word(value)
    if value[-1] != {"[": "]", "(": ")"}[value[0]]:
        raise BadValue(f"optimizer '{text:.120}': the bracket in '{part:.60}' is not closed.", hint=_TEXT_HINT)
    words = [word.strip() for word in value[1:-1].split(",")]
    if "" in words:
        raise BadValue(f"optimizer '{text:.120}': a value is missing in '{part:.60}'.", hint=_TEXT_HINT)
    return tuple(map(_word, words))


def _word(word: str) -> Scalar:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _checked_name(kind: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = (
            "a class of torch.optim, by name" if kind == "optimizer" else "a class of torch.optim.lr_scheduler, by name"
        )
        raise BadValue(f"The {kind} is {name!r:.80}; it must be {expected}.")
    return name


def _checked(owner: str, options: Mapping[Any, Any]) -> _Options:
    return tuple((str(option), _checked_option(owner, option, value)) for option, value in options.items())


def _checked_option(owner: str, option: object, value: object) -> Option:
    if not isinstance(option, str) or not _NAME.fullmatch(option):
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


def _checked_schedules(schedule: object) -> tuple[tuple[str, _Options], ...]:
    """Return one (name, options) pair, or a list of them, as checked pairs."""
    if schedule is None:
        return ()
    if not isinstance(schedule, (list, tuple)):
        raise BadValue(f"The schedule is {schedule!r:.80}; it must be a pair of name and options.", hint=_PAIR_HINT)
    pairs = [schedule] if schedule and isinstance(schedule[0], str) else schedule
    checked = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise BadValue(f"A schedule is {pair!r:.80}; it must be a pair of name and options.", hint=_PAIR_HINT)
        name = _checked_name("schedule", pair[0])
        checked.append((name, _checked(name, pair[1])))
    return tuple(checked)


def _checked_milestones(milestones: object, schedules: tuple[tuple[str, _Options], ...]) -> tuple[int, ...]:
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


def _ends(schedules: tuple[tuple[str, _Options], ...]) -> tuple[int, ...]:
    """Return the steps at which each schedule but the last ends, by its own options; where none says so it is refused,
    since PyTorch has no rule for it."""
    ends: list[int] = []
    for name, options in schedules[:-1]:
        option = _LENGTHS.get(name.lower())
        length = dict(options).get(option) if option is not None else None
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            length_text = f"its {option} is {length!r}" if option is not None else "it has no end of its own"
            raise BadValue(
                f"Schedules follow one another, but nothing says where {name} ends: {length_text}.",
                hint=f"Say at which step each of the others begins: milestones=[...], {len(schedules) - 1} number(s).",
            )
        ends.append((ends[-1] if ends else 0) + length)
    return tuple(ends)


def _typed(options: _Options) -> list[str]:
    """Return option=value of each, as `parse` reads it."""
    typed = []
    for option, value in options:
        text = f"[{','.join(map(_typed_scalar, value))}]" if isinstance(value, tuple) else _typed_scalar(value)
        typed.append(f"{option}={text}")
    return typed


def _typed_scalar(value: Scalar) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _plain(options: _Options) -> dict[str, Any]:
    return {option: list(value) if isinstance(value, tuple) else value for option, value in options}

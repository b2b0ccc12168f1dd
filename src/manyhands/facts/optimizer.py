"""The optimiser that trains the weights, as data: a class of torch.optim by name, options, learning-rate schedules.

    Optimizer("SGD", lr=0.1, momentum=0.9)
    Optimizer("Adam", lr=1e-3, schedule=("CosineAnnealingLR", {"T_max": 100}))
    Optimizer("SGD", lr=0.1, schedule=[("LinearLR", {"total_iters": 5}), ("ExponentialLR", {"gamma": 0.99})])
    Optimizer("SGD", lr=0.1, schedule=[("StepLR", {"step_size": 3}), ("ExponentialLR", {"gamma": 0.9})], milestones=[9])

    Optimizer("AdamW", lr=1e-3, groups=[{"weights": ["*.bias"], "weight_decay": 0.0}])

Weights in no group have the options themselves; `optimizer_groups` says more. A schedule steps once per optimiser
step. Those of a list follow one another, as in PyTorch's SequentialLR: each begins at its milestone, a number of steps.
Without milestones each begins where the one before it ends, if that says where.

On the command line the same is one word, read by `parse`:

    SGD:lr=0.1,momentum=0.9
    Adam:lr=1e-3,betas=[0.9,0.99],schedule=CosineAnnealingLR,T_max=100
    SGD:lr=0.1,milestones=[9],schedule=StepLR,step_size=3,schedule=ExponentialLR,gamma=0.9

What follows `schedule=` belongs to that schedule; a second `schedule=` begins the next one. Whether PyTorch knows the
names and options is checked where PyTorch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer_groups import GroupDocument, OptimizerGroup, checked_groups, places
from manyhands.facts.optimizer_options import (
    NAME,
    PAIR_HINT,
    Option,
    Options,
    Scalar,
    checked,
    checked_milestones,
    checked_name,
    checked_schedules,
    ends,
    plain,
)

_TEXT_HINT = "Write it like SGD:lr=0.1,momentum=0.9 or Adam:lr=1e-3,schedule=CosineAnnealingLR,T_max=100"
_COMMA = re.compile(r",(?![^\[(]*[\])])")  # not those within brackets
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "none": None}


class Optimizer:
    """An optimiser's name and options, its groups of weights, and its schedules. It never changes; equal ones are
    interchangeable.

    schedule    one pair (name, options) of torch.optim.lr_scheduler, or a list of pairs that follow one another
    milestones  of a list: the steps at which the second schedule begins, the third, ...; None: each where the one
                before it ends (total_iters, T_max, total_steps)
    groups      dicts of weights (names, or patterns like "*.bias"), options that differ from those of the optimizer,
                and, where they are trained by another class, "optimizer": its name
    """

    __slots__ = ("_accumulates", "_groups", "_milestones", "_name", "_options", "_schedule")
    _accumulates: bool
    _groups: tuple[OptimizerGroup, ...]
    _name: str
    _options: Options
    _schedule: tuple[tuple[str, Options], ...]
    _milestones: tuple[int, ...]

    def __init__(
        self, name: str, /, *, schedule: Any = (), milestones: Any = None, groups: Any = (), **options: Any
    ) -> None:
        schedules = checked_schedules(schedule)
        own_options = checked(checked_name("optimizer", name), options)
        parts = (
            False,
            checked_groups(groups, name, own_options),
            ends(schedules) if milestones is None else checked_milestones(milestones, schedules),
            name, own_options, schedules,
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

    @property
    def groups(self) -> tuple[OptimizerGroup, ...]:
        """The groups of weights that differ from the rest."""
        return self._groups

    @property
    def all_groups(self) -> tuple[OptimizerGroup, ...]:
        """The groups, and before them, under no names, that of the weights which are in none."""
        groups = (OptimizerGroup((), self._name, self._options), *self._groups)
        return tuple(replace(group, accumulates=True) for group in groups) if self._accumulates else groups

    @property
    def accumulates(self) -> bool:
        """Whether several steps may add up their gradients for one update; each says so with its rates."""
        return self._accumulates

    def accumulating(self) -> Optimizer:
        """Return the same optimizer, with which several steps may add up their gradients for one update."""
        return self._copy(_accumulates=True)

    @property
    def group_numbers(self) -> dict[str, int]:
        """Weight -> the number of its group in `all_groups`, where groups have names and no patterns; others: 0."""
        return {name: n for n, group in reversed(list(enumerate(self._groups, 1))) for name in group.weights}

    def with_options(self, options: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Return the same optimizer with some options of each of `all_groups` changed."""
        changed = [
            replace(group, options=checked(group.name, {**dict(group.options), **new}))
            for group, new in zip(self.all_groups, options)
        ]
        return self._copy(_options=changed[0].options, _groups=tuple(changed[1:]))

    def over(self, weights: Sequence[Sequence[str]]) -> Optimizer:
        """Return the same optimizer with names in place of patterns; `weights`: each weight's names, of which a tied
        one has several. What fits none of them is refused."""
        if not self._groups:
            return self
        named: list[list[str]] = [[] for _ in self._groups]
        for names, place in zip(weights, places(self._groups, weights)):
            if place is not None:
                named[place] += names
        return self._copy(
            _groups=tuple(replace(group, weights=tuple(names)) for group, names in zip(self._groups, named))
        )

    def without_schedule(self) -> Optimizer:
        """Return the same optimizer without its schedules."""
        return self._copy(_schedule=(), _milestones=())

    def _copy(self, **changed: Any) -> Optimizer:
        made = object.__new__(Optimizer)
        for field in self.__slots__:
            object.__setattr__(made, field, changed.get(field, getattr(self, field)))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return a plain document that `from_dict` reads back to an equal optimiser."""
        schedule = [[name, plain(options)] for name, options in self._schedule]
        document: dict[str, Any] = {"name": self.name, "options": plain(self._options)}
        if schedule:
            document["schedule"] = schedule
        if self._milestones:
            document["milestones"] = list(self._milestones)
        if self._groups:
            document["groups"] = [group.to_dict() for group in self._groups]
        if self._accumulates:
            document["accumulates"] = True
        return document

    def to_text(self) -> str:
        """Return one word for the command line that `parse` reads back, for options as they are typed: texts in words
        without commas, lists that hold something. Groups cannot be typed."""
        words = _typed(self._options)
        if self._milestones:
            words.append(f"milestones=[{','.join(map(str, self._milestones))}]")
        for name, options in self._schedule:
            words += [f"schedule={name}", *_typed(options)]
        return f"{self.name}:{','.join(words)}" if words else self.name

    @classmethod
    def from_dict(cls, document: Any) -> Optimizer:
        read = decode(document, _Document, "optimizer", BadValue)
        for field in ("schedule", "milestones", "groups"):
            if field in read.options:
                raise BadValue(f"optimizer: '{field}' is among the options; it is a field beside them.", hint=PAIR_HINT)
        groups = [group.given() for group in read.groups]
        made = cls(read.name, schedule=read.schedule, milestones=read.milestones, groups=groups, **read.options)
        return made.accumulating() if read.accumulates else made

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"An Optimizer cannot be changed ({field}); make another.")

    def __delattr__(self, field: str) -> None:
        raise AttributeError(f"An Optimizer cannot be changed ({field}); make another.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented
        own_parts, other_parts = (
            (
                spec.name, spec.options, spec.schedule, spec.milestones, spec.accumulates,
                [group.to_dict() for group in spec.groups],
            )
            for spec in (self, other)
        )  # fmt: skip
        return own_parts == other_parts

    def __hash__(self) -> int:
        schedules = ((name, frozenset(options)) for name, options in self._schedule)
        groups = ((group.weights, group.name, frozenset(group.options)) for group in self._groups)
        return hash((self._name, frozenset(self._options), self._milestones, *schedules, *groups))

    def __repr__(self) -> str:
        words = [repr(self.name), *(f"{option}={value!r}" for option, value in self._options)]
        if self._schedule:
            words.append(f"schedule={self.schedule[0] if len(self._schedule) == 1 else list(self.schedule)!r}")
        if self._milestones:
            words.append(f"milestones={list(self._milestones)!r}")
        if self._groups:
            words.append(f"groups={[group.to_dict()['options'] | _kept(group) for group in self._groups]!r}")
        return f"Optimizer({', '.join(words)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts for pickling, with which copy.copy and copy.deepcopy work although nothing can be set."""
        return (Optimizer.from_dict, (self.to_dict(),))


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    options: dict[str, Any] = {}
    schedule: list[tuple[str, dict[str, Any]]] = []
    milestones: list[int] | None = None
    groups: list[GroupDocument] = []
    accumulates: bool = False


def parse(text: str) -> Optimizer:
    """Return the optimiser that is written on the command line; see the top of this file."""
    name, colon, options_text = text.strip().partition(":")
    if not NAME.fullmatch(name):
        raise BadValue(f"optimizer '{text:.120}': '{name:.60}' is not an optimiser's name.", hint=_TEXT_HINT)
    options: dict[str, Any] = {}
    schedules: list[tuple[str, dict[str, Any]]] = []
    for part in _COMMA.split(options_text) if colon else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not NAME.fullmatch(option) or not equals or not value:
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


def _kept(group: OptimizerGroup) -> dict[str, Any]:
    return {"weights": list(group.weights), "optimizer": group.name}


def _typed(options: Options) -> list[str]:
    """Return option=value of each, as `parse` reads it."""
    typed = []
    for option, value in options:
        text = f"[{','.join(map(_typed_scalar, value))}]" if isinstance(value, tuple) else _typed_scalar(value)
        typed.append(f"{option}={text}")
    return typed


def _typed_scalar(value: Scalar) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

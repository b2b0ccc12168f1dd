"""Groups of weights that are trained otherwise than the rest: with other options, or by another class.

    groups=[{"weights": ["*.bias", "*norm*"], "weight_decay": 0.0}]
    groups=[{"weights": ["head.*"], "optimizer": "AdamW", "lr": 1e-3}]

A weight belongs to the first group of which an entry is its name, or a pattern (*, ?) that fits its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer_options import Options, checked, checked_name, plain

MOST_GROUPS = 10_000
MOST_NAMES = 1_000_000
_LONGEST_NAME = 1000
_HINT = 'Write groups=[{"weights": ["*.bias"], "weight_decay": 0.0}].'


@dataclass(frozen=True)
class OptimizerGroup:
    """The class and the options by which some weights are trained."""

    weights: tuple[str, ...]
    """Their names, or patterns of names."""
    name: str
    """The class."""
    options: Options
    """All that were given, those of the optimizer included where the class is the same."""
    accumulates: bool = False
    """Whether several steps may add up their gradients for one update, as those of the whole optimizer do."""

    def to_dict(self) -> dict[str, Any]:
        return {"weights": list(self.weights), "name": self.name, "options": plain(self.options)}


class GroupDocument(msgspec.Struct, forbid_unknown_fields=True):
    weights: list[str]
    name: str
    options: dict[str, Any] = {}

    def given(self) -> dict[str, Any]:
        """Return the group as `Optimizer` takes it."""
        return {**self.options, "weights": self.weights, "optimizer": self.name}


def checked_groups(groups: object, name: str, options: Options) -> tuple[OptimizerGroup, ...]:
    """Return the groups that were given to an optimizer of this class with these options."""
    if not isinstance(groups, (list, tuple)):
        raise BadValue(f"groups is {groups!r:.80}; it must be a list of groups.", hint=_HINT)
    if len(groups) > MOST_GROUPS:
        raise BadValue(f"There are {len(groups)} groups; there can be {MOST_GROUPS}.")
    made = tuple(_checked_group(group, name, options) for group in groups)
    if sum(len(group.weights) for group in made) > MOST_NAMES:
        raise BadValue(f"The groups name more than {MOST_NAMES:,} weights.")
    return made


def _checked_group(group: object, name: str, options: Options) -> OptimizerGroup:
    if not isinstance(group, Mapping) or "weights" not in group:
        raise BadValue(f"A group is {group!r:.80}; it must say its weights and options.", hint=_HINT)
    weights = group["weights"]
    if not isinstance(weights, (list, tuple)) or not all(isinstance(w, str) for w in weights):
        raise BadValue(f"The weights of a group are {weights!r:.80}; they must be a list of names.", hint=_HINT)
    for weight in weights:
        if not 0 < len(weight) <= _LONGEST_NAME:
            raise BadValue(f"A group names the weight '{weight:.60}'; a name has 1 to {_LONGEST_NAME} letters.")
    for field in ("schedule", "milestones", "groups"):
        if field in group:
            raise BadValue(f"A group has '{field}', which is of the whole optimizer.", hint=_HINT)
    kind = checked_name("optimizer", group.get("optimizer", name))
    given = {option: value for option, value in group.items() if option not in ("weights", "optimizer")}
    inherited = dict(options) if kind.lower() == name.lower() else {}
    return OptimizerGroup(tuple(weights), kind, tuple({**inherited, **dict(checked(kind, given))}.items()))


def places(groups: Sequence[OptimizerGroup], weights: Sequence[Sequence[str]]) -> list[int | None]:
    """Return for each weight, given by all of its names, the group that it belongs to; None: to none.

    An entry that fits no weight is refused: it would be a mistake that nobody notices.
    """
    exact: dict[str, int] = {}
    patterns: list[tuple[int, str]] = []
    for number, group in enumerate(groups):
        for entry in group.weights:
            exact.setdefault(entry, number)
            if any(sign in entry for sign in "*?["):
                patterns.append((number, entry))
    numbers: list[int | None] = []
    used: set[str] = set()
    for names in weights:
        fitting = [exact[name] for name in names if name in exact]
        used |= {name for name in names if name in exact}
        for number, pattern in patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                used.add(pattern)
                fitting.append(number)
        numbers.append(min(fitting, default=None))
    for entry in dict.fromkeys(entry for group in groups for entry in group.weights):
        if entry not in used:
            raise BadValue(
                f"A group of the optimizer names '{entry:.120}', which is no weight of the model.",
                hint="The names are those of model.named_parameters(), like layer1.0.bias or *.bias.",
            )
    return numbers

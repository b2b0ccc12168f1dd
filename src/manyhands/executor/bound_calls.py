"""A device's round as calls: each action is bound once to all that carries it out, and called in every round.

    action ──bind──▶ call      runner, boxes, topic, peers: whatever follows from the plan is looked up here
    call()                     what remains: tensors, messages, waits

A fixed order has the same actions in every round, so that a round is a list of calls after the first one. Event-driven
orders make theirs anew; these are bound when they are due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manyhands.schedule.actions import Action

Call = Callable[[], None]
Binder = Callable[[Any], Call]
MOST_KEPT = 20_000
"""The most calls that are kept: actions that are made anew in every round would add up."""


class _Bound(NamedTuple):
    """A call, and the action that it carries out: kept, so that no other can have its identity."""

    action: Action
    call: Call


class BoundCalls:
    """The calls of one device's actions on one graph."""

    def __init__(self, binders: Mapping[type[Action], Binder]) -> None:
        self._binders = binders
        self._bound: dict[int, _Bound] = {}
        """By the actions' identity, which is found faster than an equal action."""

    def of(self, action: Action) -> Call:
        """Return the call that carries out an action."""
        bound = self._bound.get(id(action))
        if bound is None or bound.action is not action:
            if len(self._bound) >= MOST_KEPT:
                self._bound.clear()
            bound = self._bound[id(action)] = _Bound(action, self._binders[type(action)](action))
        return bound.call

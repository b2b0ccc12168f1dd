"""Policies, which decide what one device does next.

A fixed order answers from a list known in advance; an event-driven one looks at what has arrived.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from manyhands.schedule.actions import Action, Message, Receive
from manyhands.schedule.device_work import DeviceWork

WAIT: Literal["wait"] = "wait"
DONE: Literal["done"] = "done"
Answer = Action | Literal["wait", "done"]


@dataclass
class DeviceState:
    """The state that a policy may use: the messages that have arrived here, as (source, message), and the feed."""

    arrived: Container[tuple[str, Message]] = field(default_factory=set)
    fed: Container[int] | None = None
    """Micro-batches whose inputs and targets are at hand; None: all are."""


class Policy(Protocol):
    """A decision on what one device does next. `wait`: nothing can be done until something arrives."""

    def next(self, state: DeviceState) -> Answer: ...


class FixedOrder:
    """A policy that follows a list known in advance, whatever arrives."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = tuple(actions)
        self._place = 0

    def next(self, state: DeviceState) -> Answer:
        if self._place == len(self.actions):
            return DONE
        self._place += 1
        return self.actions[self._place - 1]


class EagerOrder:
    """A policy: backward as soon as gradients have arrived, else forward if fewer than `ahead` micro-batches are held.

    Unlike 1F1B it does not insist on taking turns: a late gradient does not stop the next forward pass.
    """

    def __init__(self, work: DeviceWork, micro_batches: int, ahead: int, lead: int) -> None:
        self.work, self.micro_batches, self.ahead, self.lead = work, micro_batches, ahead, lead
        self.announced = self.forwards = self.backwards = 0
        self._pending: list[Action] = []
        self._finished = False

    def next(self, state: DeviceState) -> Answer:
        if not self._pending:
            self._choose(state)
        if self._pending:
            return self._pending.pop(0)
        return DONE if self._finished else WAIT

    def _choose(self, state: DeviceState) -> None:
        if self._finished:
            return
        while self.announced < min(self.micro_batches, self.forwards + self.lead):
            self._pending += self.work.inputs(self.announced)
            self.announced += 1
        if self._pending:  # inputs others wait for do not wait for what this device waits for
            return
        while self.backwards < self.forwards:
            is_last = self.backwards == self.micro_batches - 1
            actions = self.work.backward(self.backwards, is_last=is_last)
            if not has_arrived(actions, state):
                break
            self.backwards += 1
            if actions:  # none: nothing is trained here or below
                self._pending = actions
                return
        if self.backwards == self.micro_batches:
            self._pending, self._finished = self.work.finish(), True
            return
        if self.forwards < self.micro_batches and self.forwards - self.backwards < self.ahead:
            actions = self.work.forward(self.forwards)
            if has_arrived(actions, state):
                self.forwards += 1
                self._pending = actions


def has_arrived(actions: list[Action], state: DeviceState) -> bool:
    """Return whether what must be received before computing can begin is at hand."""
    return all(
        (action.source, action.message) in state.arrived
        for action in actions
        if isinstance(action, Receive) and action.message.kind in ("value", "gradient", "input")
    )

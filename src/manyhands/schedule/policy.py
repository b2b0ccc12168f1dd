"""A schedule is a policy: asked what to do next, it answers with an action, 'wait', or 'done'.

A fixed order answers from a list known in advance. An event-driven one looks at what has arrived. Simulator and
executor ask the same policies; what they were answered is the log, and the log is the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.schedule.actions import Action, Message, Receive
from manyhands.schedule.orders import passes
from manyhands.schedule.work import DeviceWork, Lowering

WAIT: Literal["wait"] = "wait"
DONE: Literal["done"] = "done"
Answer = Action | Literal["wait", "done"]


@dataclass
class DeviceState:
    """What a policy may look at: the messages that have arrived at this device, as (source, message)."""

    arrived: set[tuple[str, Message]] = field(default_factory=set)


class Policy(Protocol):
    """Decides what one device does next. `wait`: nothing can be done until something arrives."""

    def next(self, state: DeviceState) -> Answer: ...


class FixedOrder:
    """A list known in advance, whatever arrives."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = tuple(actions)
        self._place = 0

    def next(self, state: DeviceState) -> Answer:
        if self._place == len(self.actions):
            return DONE
        self._place += 1
        return self.actions[self._place - 1]


class EagerOrder:
    """Backward as soon as its gradients have arrived, else forward if fewer than `ahead` micro-batches are held.

    Unlike 1F1B it does not insist on turns: a late gradient does not stop the next forward pass.
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
        if self.backwards == self.micro_batches:
            self._pending, self._finished = self.work.finish(), True
            return
        if self.backwards < self.forwards:
            is_last = self.backwards == self.micro_batches - 1
            actions = self.work.backward(self.backwards, is_last=is_last)
            if _has_arrived(actions, state):
                self.backwards += 1
                self._pending = actions
                return
        if self.forwards < self.micro_batches and self.forwards - self.backwards < self.ahead:
            actions = self.work.forward(self.forwards)
            if _has_arrived(actions, state):
                self.forwards += 1
                self._pending = actions


def _has_arrived(actions: list[Action], state: DeviceState) -> bool:
    """Whether what must be received before the first computing is at hand."""
    return all(
        (action.source, action.message) in state.arrived
        for action in actions
        if isinstance(action, Receive) and action.message.kind in ("value", "gradient", "input")
    )


class Schedule:
    """A plan's policies, one per device, and for a fixed order the whole list in advance."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan, self.network = plan, network
        self.lowering = Lowering(plan, network)
        self.is_fixed = plan.order != "eager"
        self.actions: dict[str, tuple[Action, ...]] = {}
        if self.is_fixed:
            self.actions = {device: tuple(self._list(work)) for device, work in self.lowering.work.items()}

    @property
    def _lead(self) -> int:
        """How many micro-batches ahead inputs are sent from their home: as far as the first stage may run ahead."""
        if self.plan.order == "sequential":
            return 1
        return self.plan.warm_up_of(0) if self.plan.order in ("1f1b", "eager") else self.plan.micro_batches

    def _list(self, work: DeviceWork) -> list[Action]:
        plan = self.plan
        if not work.geometries:
            return [action for number in range(plan.micro_batches) for action in work.inputs(number)]
        result = [action for number in range(self._lead) for action in work.inputs(number)]
        done = 0
        for kind, number in passes(plan, work.stage):
            if kind == "forward":
                if number + self._lead < plan.micro_batches:
                    result.extend(work.inputs(number + self._lead))
                result.extend(work.forward(number))
            else:
                done += 1
                result.extend(work.backward(number, is_last=done == plan.micro_batches))
        result.extend(work.finish())
        return result

    def every_action(self, device: str) -> Iterator[Action]:
        """All actions of a round on a device; for an event-driven order, in some order."""
        if self.is_fixed:
            yield from self.actions[device]
            return
        work, count = self.lowering.work[device], self.plan.micro_batches
        for number in range(count):
            yield from work.inputs(number)
            if work.geometries:
                yield from work.forward(number)
                yield from work.backward(number, is_last=number == count - 1)
        yield from work.finish()

    def policy_of(self, device: str) -> Policy:
        """A fresh policy for one device."""
        if self.is_fixed:
            return FixedOrder(self.actions[device])
        work = self.lowering.work[device]
        if not work.geometries:
            return FixedOrder(self._list(work))
        return EagerOrder(work, self.plan.micro_batches, self.plan.warm_up_of(work.stage), self._lead)

    def policies(self) -> dict[str, Policy]:
        """A fresh policy for every device."""
        return {device: self.policy_of(device) for device in self.lowering.work}

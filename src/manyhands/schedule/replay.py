"""Running ahead of the gradients, and catching up by feature replay (SPLIT §4.1).

Every micro-batch is a mini-batch of its own: the optimiser steps after each. Stages before the last run forward while
earlier gradients are still on their way. Drawn for K = 2, forward as digits, replayed forward with update as letters:

    upstream     0 1 2 . . a b c 3 4 5 . . d e f     grouped: the next group waits for all of the last
                 0 1 2 . . a 3 b 4 c 5 d e f         window: never more than K+1 under way
    downstream     0a1b2c ...                        plain, one after another

A mini-batch that began when nothing was under way finds the weights as they were: its forward pass is kept. Any other
keeps only what came in, and is run again on the current weights when its gradient has arrived.
"""

from __future__ import annotations

from manyhands.facts.plan import Replay
from manyhands.schedule.actions import Action, Discard, Receive
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.policies import DONE, WAIT, Answer, DeviceState, has_arrived


def plain_list(work: DeviceWork, count: int) -> list[Action]:
    """Return all actions of a round, in some order."""
    actions = [action for number in range(count) for action in work.inputs(number)]
    if work.geometries:
        for number in range(count):
            actions += work.forward(number) + work.backward(number, is_last=True) + work.steps(number)
    return actions


class MiniBatches:
    """A policy for several mini-batches in a round, each begun when it is at hand.

    A round may end early: no device has begun what was not fed to any.
    """

    def __init__(self, work: DeviceWork, count: int) -> None:
        self.work, self.count = work, count
        self.done = 0
        self._pending: list[Action] = [action for number in range(count) for action in work.inputs(number)]

    def end_at(self, count: int) -> None:
        """End the round after fewer mini-batches, but no fewer than were fed."""
        self.count = max(self.done, min(self.count, count))

    def next(self, state: DeviceState) -> Answer:
        if not self._pending:
            self._choose(state)
        if self._pending:
            return self._pending.pop(0)
        return DONE if self.done >= self.count else WAIT

    def _choose(self, state: DeviceState) -> None:
        raise NotImplementedError

    def _is_at_hand(self, number: int, actions: list[Action], state: DeviceState) -> bool:
        return (state.fed is None or number in state.fed) and has_arrived(actions, state)


class PlainOrder(MiniBatches):
    """A policy of forward, backward, step, one mini-batch after another: downstream, or alone."""

    def _choose(self, state: DeviceState) -> None:
        number, work = self.done, self.work
        if number < self.count and work.geometries:
            actions = work.forward(number)
            if self._is_at_hand(number, actions, state):
                self._pending = actions + work.backward(number, is_last=True) + work.steps(number)
                self.done += 1
        elif not work.geometries:
            self.done = self.count


class ReplayOrder(MiniBatches):
    """A policy that updates as soon as a gradient has arrived, else runs forward as far as the bound lets it."""

    def __init__(self, work: DeviceWork, count: int, replay: Replay, ahead: int | None = None) -> None:
        super().__init__(work, count)
        self.bound, self.mode = replay.k, replay.mode
        self.group = count if replay.k is None else replay.k + 1
        self.ahead = ahead or self.group
        self.forwards = self.updates = 0
        """The number of forward passes, and of the mini-batches that came back and were not too late."""
        self._learns = any(
            isinstance(action, Receive) and action.message.kind == "gradient" for action in work.backward_actions
        )
        self._since: dict[int, int] = {}
        """Mini-batch under way -> updates before its forward pass."""
        self._kept: set[int] = set()
        """Mini-batches whose forward pass need not be run again."""

    def _choose(self, state: DeviceState) -> None:
        if not self._learns:
            self._run_ahead(state)
            return
        number = self.done
        if number < self.forwards:
            actions = self.work.backward(number, is_last=True)
            if has_arrived(actions, state):
                self.done += 1
                self._pending = self._catch_up(number, actions)
                return
        number = self.forwards
        if number < self.count and self._may_begin(number):
            is_fresh = self.done == self.forwards
            actions = self.work.forward(number) if is_fresh else self.work.ahead(number)
            if self._is_at_hand(number, actions, state):
                self.forwards += 1
                self._since[number] = self.updates
                if is_fresh:
                    self._kept.add(number)
                self._pending = actions

    def _run_ahead(self, state: DeviceState) -> None:
        """Run the next mini-batch forward where nothing is trained, and nothing comes back."""
        if self.forwards < self.count:
            actions = self.work.ahead(self.forwards)
            if self._is_at_hand(self.forwards, actions, state):
                self._pending = [*actions, *self._discarded(self.forwards)]
                self.forwards += 1
                self.done += 1

    def _may_begin(self, number: int) -> bool:
        if self.mode == "grouped" and self.bound is not None:
            return self.done >= number // self.group * self.group
        return self.forwards - self.done < self.ahead

    def _catch_up(self, number: int, actions: list[Action]) -> list[Action]:
        received = [action for action in actions if isinstance(action, Receive)]
        if self.bound is not None and self.updates - self._since.pop(number) > self.bound:
            return [*received, *self._discarded(number)]
        self.updates += 1
        others = [action for action in actions if not isinstance(action, Receive)]
        replayed = [] if number in self._kept else self.work.again(number)
        return [*received, *replayed, *others, *self.work.steps(number)]

    def _discarded(self, number: int) -> list[Action]:
        return [Discard(geometry.index, number) for geometry in self.work.geometries]

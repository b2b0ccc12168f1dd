"""Two samples under way on a device (DECNN Algorithm 1): while one waits for others, the next is computed.

    sample 0   ####..##..####          . waits at a synchronisation point
    sample 1       ##  ##    ..####    computed meanwhile, chunk by chunk; never further than sample 0 is

Whatever the current sample needs next goes first as soon as it has arrived, so the next sample costs it a chunk at
most. The next sample never waits: it is set aside as soon as something it needs has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from manyhands.facts.network import Network
from manyhands.schedule.actions import Action, Forward, Receive, Reduce
from manyhands.schedule.device_work import DeviceWork
from manyhands.schedule.policies import DeviceState
from manyhands.schedule.replay import MiniBatches

MOST_CHUNKS = 16
"""The chunks that a pass is cut into, about: each costs the interpreter as much as an operator or more."""


def in_chunks(actions: Sequence[Action], network: Network) -> Iterator[Action]:
    """Yield the actions with every forward action cut before operators that compute much, into chunks of at least
    1/MOST_CHUNKS of the pass.

    Such a chunk is what is run of the next sample before looking at the current one again.
    """
    passes = [action for action in actions if isinstance(action, Forward) and not action.part]
    least = sum(network.ops[op].macs for action in passes for op in range(action.first, action.last)) / MOST_CHUNKS
    for action in actions:
        if not isinstance(action, Forward) or action.part:
            yield action
            continue
        first, macs = action.first, 0
        for op in range(action.first, action.last):
            if network.ops[op].macs and macs and macs >= least:
                yield msgspec.structs.replace(action, first=first, last=op)
                first, macs = op, 0
            macs += network.ops[op].macs
        yield msgspec.structs.replace(action, first=first)


class InterleavedOrder(MiniBatches):
    """The order that runs the current sample first and, while it waits, the next, which does not overtake it."""

    def __init__(self, work: DeviceWork, count: int, chunks: Callable[[int], Sequence[Action]]) -> None:
        super().__init__(work, count)
        self._pending.clear()  # a sample's inputs are sent when it is begun: later ones may not have arrived
        self._chunks = chunks
        self._lists: dict[int, Sequence[Action]] = {}
        self._places: dict[int, int] = {}
        """Micro-batch under way -> how many of its actions have begun."""
        if not work.geometries and not work.before:
            self.done = count
        self.answered = 0
        """The number of samples of which everything has been done, not only begun."""

    def _list(self, number: int) -> Sequence[Action]:
        actions = self._lists.get(number)
        if actions is None:
            actions = self._lists[number] = self._chunks(number)
            self._places[number] = 0
        return actions

    def _choose(self, state: DeviceState) -> None:
        self.answered = self.done
        if self.done >= self.count:
            return
        current = self.done
        if self._goes_on(current, state):
            self._begin(current, to_the_end=True)
            if self._places[current] == len(self._list(current)):
                self._lists.pop(current)
                self._places.pop(current)
                self.done += 1
        elif current + 1 < self.count and self._may_follow(current) and self._goes_on(current + 1, state):
            self._begin(current + 1)

    def _may_follow(self, current: int) -> bool:
        """Return whether the next sample is behind the current one, and would not wait for another device."""
        following = self._list(current + 1)
        place = self._places[current + 1]
        return place < self._places[current] and not isinstance(following[place], Reduce)

    def _goes_on(self, number: int, state: DeviceState) -> bool:
        """Return whether a sample's next action has what it needs."""
        actions = self._list(number)
        place = self._places[number]
        if place == 0 and state.fed is not None and number not in state.fed:
            return False
        action = actions[place]
        return not isinstance(action, Receive) or (action.source, action.message) in state.arrived

    def _begin(self, number: int, *, to_the_end: bool = False) -> None:
        """Begin a sample's next action; of computing, one chunk, or all up to where something else is to be done."""
        actions, place = self._lists[number], self._places[number]
        action = actions[place]
        place += 1
        while to_the_end and place < len(actions) and (joined := _joined(action, actions[place])) is not None:
            action = joined
            place += 1
        self._pending = [action]
        self._places[number] = place


def _joined(action: Action, following: Action) -> Action | None:
    """Return two forward actions as one, if the second continues the first; else None."""
    if not isinstance(action, Forward) or not isinstance(following, Forward) or action.part or following.part:
        return None
    if action.stage != following.stage or action.last != following.first:
        return None
    return msgspec.structs.replace(action, last=following.last)

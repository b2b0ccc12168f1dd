"""Backups of one generation as the coordinator sees them: where each copy is, and the last step that is safe."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from manyhands.runtime.checksums import combined
from manyhands.runtime.control_messages import Held, Hold, Holds, Retain, SendState, State
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.stalls import Verdict
from manyhands.schedule.backup import holders, is_due

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

MOST_BACKUPS_BEHIND = 2
"""With more backups than this not yet safe, no further step is fed: they take memory on the workers."""
_NO_LIMIT = 2**53


class Backups:
    """Sends copies to the devices that hold them, and finds out when all copies of a step are where they belong."""

    def __init__(self, run: Run) -> None:
        self.run, self.every = run, run.order.backup_every
        self.holders = holders(run.order.plan, run.handout.weights, run.handout.stepped) if self.every else {}
        self.safe_step = run.first if run.order.located is None else -1
        """The last step of which every weight is in at least two places, or at the coordinator."""
        self.bytes_sent = 0
        self._kept: dict[int, set[str]] = defaultdict(set)
        self._held: dict[int, set[str]] = defaultdict(set)
        self._offered: dict[tuple[str, int], Hold] = {}
        """(worker, step) -> the message to the holder with what the worker reported of its copy."""

    def is_backup(self, step: int) -> bool:
        """Return whether every device keeps a copy after this many steps."""
        if not self.every or step == self.run.first:
            return bool(self.every)
        return is_due(self.run.steps.round_of(step - 1), step, self.every)

    def kept(self, name: str, message: State, listed: tuple[TensorEntry, ...]) -> None:
        """Note that a worker has a copy of its own state, and offer it to its holder."""
        if not self.is_backup(message.step):
            return
        self._kept[message.step].add(name)
        holder = self.holders.get(name)
        if holder is not None:
            hold = Hold(self.run.generation, name, message.step, listed, message.scalars, message.checksums)
            self._offered[name, message.step] = hold
            self.run.coordinator.send(holder, hold)
        self._look(message.step)

    def holds(self, name: str, message: Holds) -> None:
        """Request a copy for a worker that has made room for it."""
        if self.holders.get(message.source) == name:
            send = SendState(self.run.generation, message.step, name, message.attempt)
            self.run.coordinator.send(message.source, send)

    def held(self, name: str, message: Held) -> None:
        """Note that a copy has arrived. One that differs from what was offered is requested again, once."""
        hold = self._offered.get((message.source, message.step))
        if self.holders.get(message.source) != name or hold is None or message.attempt != hold.attempt:
            return
        if message.checksum == combined(hold.checksums):
            del self._offered[message.source, message.step]
            self._held[message.step].add(message.source)
            self._look(message.step)
            return
        source, step = message.source, message.step
        mismatch = f"the copy of {source}'s state after step {step} that {name} received is not what {source} has"
        if hold.attempt:  # before it was sent again, the source has looked at its own: see `State.has_changed`
            raise self.run.evicted(Verdict(name, f"for the second time {mismatch}, which has not changed"))
        self.run.hooks.log_event("note", text=f"T{mismatch[1:]}: it is sent again.")
        self._offered[source, step] = hold = msgspec.structs.replace(hold, attempt=1)
        self.run.coordinator.send(name, hold)

    def _look(self, step: int) -> None:
        is_safe = self._kept[step] >= set(self.run.names) and self._held[step] >= set(self.holders)
        if not is_safe or step < self.safe_step:
            return
        self.safe_step = step
        for table in (self._kept, self._held):
            for old_step in [kept_step for kept_step in table if kept_step <= step]:
                del table[old_step]
        wanted_snapshot = self.run.wanted_snapshot
        first = step if wanted_snapshot is None else min(step, wanted_snapshot)
        for name in self.run.participants:
            self.run.coordinator.send(name, Retain(first, _NO_LIMIT))
        self.run.hooks.on_safe(step)

    def owing(self) -> list[tuple[str, str]]:
        """Return, for the oldest step that is not safe, each device whose copy is missing with the device to hold it.

        A pair is twice the same name where the device has not even reported that it has a copy.
        """
        begun = [step for step in {*self._kept, *self._held} if step > self.safe_step]
        if not begun:
            return []
        kept_names, held_names = self._kept[min(begun)], self._held[min(begun)]
        without_copy = [(name, name) for name in self.run.names if name not in kept_names]
        return without_copy or [(name, holder) for name, holder in self.holders.items() if name not in held_names]

    def is_behind(self, fed: int) -> bool:
        """Return whether too many backups of steps that were fed are not safe yet, so that workers should wait."""
        if not self.every:
            return False
        safe = max(self.safe_step, self.run.first)
        every = max(self.every, self.run.stride)
        return fed // every - safe // every > MOST_BACKUPS_BEHIND

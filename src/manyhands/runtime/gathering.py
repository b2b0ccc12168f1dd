"""Gathers snapshots from every stage, off the main path."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import TimedOut
from manyhands.runtime import state
from manyhands.runtime.checksums import checksums
from manyhands.runtime.control_messages import SendState, State
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.keeping import topic
from manyhands.runtime.order import RunState
from manyhands.runtime.stalls import Verdict

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

MOST_SNAPSHOTS_BEHIND = 2
"""With more snapshots than this not yet saved, no further step is fed: they take memory on the workers."""
_SAVE_SECONDS = 120.0


class Gathering:
    """Snapshots from every stage, joined off the main path and passed on in order.

    A snapshot is passed on once the steps before it have been reported, so that no record of them is missing if the run
    ends then.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.latest: RunState | None = None
        self._parts: dict[int, dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]] = defaultdict(dict)
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._arrived: set[int] = set()
        """Steps of snapshots of which every part has arrived; they may not be saved yet."""
        self._ended = run.first - 1
        self._saved = 0
        self._constants = state.constant_weights(run.order.graph.network, is_training=run.order.plan.is_training)
        self._is_closed = False
        self._error: BaseException | None = None
        self._verdict: Verdict | None = None
        """The worker whose snapshot differed twice from what it offered."""

    def take(self, name: str, message: State, listed: tuple[TensorEntry, ...]) -> None:
        """Make room for a worker's snapshot, request it, and wait for it on a thread."""
        thread = threading.Thread(target=self._receive, args=(name, message, listed), name="gathering", daemon=True)
        self._threads = [*(earlier for earlier in self._threads if earlier.is_alive()), thread]
        thread.start()

    def _receive(self, name: str, message: State, listed: tuple[TensorEntry, ...]) -> None:
        try:
            tensors = self._fetched(name, message, listed, 0)
            if tensors is None:
                tensors = self._fetched(name, message, listed, 1)
            if tensors is None:
                self._verdict = Verdict(
                    name, f"what it sends as its state after step {message.step} is not what it has"
                )
                return
            with self._change:
                parts = self._parts[message.step]
                parts[name] = (tensors, message.scalars)
                if len(parts) < len(self.run.keepers):
                    return
                snapshot = self._joined(message.step)
                limit = self.run.order.wait_limit_seconds + 60  # the run itself ends before that
                if not self._change.wait_for(lambda: self._is_closed or self._is_next(message.step), limit):
                    raise TimedOut(f"The snapshot after step {message.step} could not be kept for {limit:g} s.")
                if self._is_closed:
                    return
            self.run.hooks.on_snapshot(snapshot)
            with self._change:
                self.latest = snapshot
                self._saved += 1
                self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            self.run.coordinator.wake()

    def _fetched(
        self, name: str, message: State, listed: tuple[TensorEntry, ...], attempt: int
    ) -> dict[str, torch.Tensor] | None:
        """Return a worker's snapshot; None where what arrived is not what it offered."""
        tensors = state.empty(listed)
        mailbox, step, message_topic = self.run.coordinator.endpoint.mailbox, message.step, topic(message.step, attempt)
        mailbox.expect(name, message_topic, state.byte_count(listed))
        mailbox.post(name, step, message_topic, list(tensors.values()))
        self.run.coordinator.send(name, SendState(self.run.generation, step, COORDINATOR, attempt))
        mailbox.receive(name, step, message_topic, list(tensors.values()))
        return tensors if checksums(tensors.values()) == message.checksums else None

    def _is_next(self, step: int) -> bool:
        return self._ended >= step - 1 and self.run.order.snapshots[self._saved] == step

    def _joined(self, step: int) -> RunState:
        snapshot = RunState({}, steps_done=step)
        parts = self._parts.pop(step)
        self._arrived.add(step)
        for tensors, scalars in (parts[name] for name in reversed(self.run.keepers)):
            snapshot.weights |= state.of(state.WEIGHT, tensors)
            snapshot.optimizer |= state.of(state.OPTIMIZER, tensors)
            snapshot.scalars |= scalars
        start = self.run.order.start.weights
        snapshot.weights |= {name: start[name] for name in self._constants}
        return snapshot

    def ended(self, step: int) -> None:
        """Note that a step has ended and was reported."""
        with self._change:
            self._ended = step
            self._change.notify_all()

    def is_behind(self, fed: int) -> bool:
        """Return whether too many snapshots of steps that were fed are not saved yet, so that workers should wait."""
        due = bisect.bisect_right(self.run.order.snapshots, fed)
        return due - self._saved > MOST_SNAPSHOTS_BEHIND

    @property
    def wanted_step(self) -> int | None:
        """The step of the oldest snapshot that is not saved yet."""
        snapshots = self.run.order.snapshots
        return snapshots[self._saved] if self._saved < len(snapshots) else None

    def owing(self) -> list[str]:
        """Return the devices whose part of the oldest snapshot has not arrived; a slow disk is not their fault."""
        step = self.wanted_step
        with self._change:
            if step is None or step in self._arrived:
                return []
            return [name for name in self.run.keepers if name not in self._parts.get(step, {})]

    def is_complete(self) -> bool:
        return self._saved == len(self.run.order.snapshots)

    def check(self) -> None:
        if self._verdict is not None:
            raise self.run.evicted(self._verdict)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all threads, waiting for a snapshot that is being saved."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(_SAVE_SECONDS)

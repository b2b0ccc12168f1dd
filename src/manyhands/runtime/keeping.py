"""Copies of state that a worker keeps against losses: its own after some steps, and those it holds for others.

They outlive generations: what was kept in one is where the next begins. They do not outlive a job.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.runtime import state
from manyhands.runtime.checksums import checksums, combined
from manyhands.runtime.control_messages import Held, Hold
from manyhands.runtime.control_parts import TensorEntry
from manyhands.transport.endpoint import Endpoint

STATE = "state"
"""The message with what a device starts with, one from each who has some of it."""


@dataclass
class Kept:
    """State after some step, as far as it is here."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    """Of tensors that are copies, from when they were made."""


def topic(step: int, attempt: int = 0) -> str:
    """The message with a copy of a device's state; `attempt`: how often it was sent before."""
    return f"state {step}" if not attempt else f"state {step} again {attempt}"


class Keeping:
    """What is here, by steps done. Asked by the thread that works and by the one that listens."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._since = -1
        """The generation with which the job began whose state this is."""
        self._kept: dict[int, Kept] = {}
        self._arriving: dict[tuple[str, int], tuple[Hold, dict[str, torch.Tensor]]] = {}

    def begin(self, since: int) -> None:
        """A job goes on, or another one begins: what was kept of an earlier one is forgotten."""
        with self._lock:
            if since != self._since:
                self._since = since
                self._kept.clear()

    def keep(
        self, step: int, tensors: dict[str, torch.Tensor], scalars: dict[str, Any], sums: Sequence[int] = ()
    ) -> None:
        """Add to what there is of a step. The tensors must not change from now on. `sums`: checksums, if known."""
        with self._lock:
            stored = self._kept.setdefault(step, Kept())
            stored.tensors = {**stored.tensors, **tensors}
            stored.scalars = {**stored.scalars, **scalars}
            others = {name: checksum for name, checksum in stored.checksums.items() if name not in tensors}
            stored.checksums = others | dict(zip(tensors, sums))

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """What there is of a step."""
        with self._lock:
            stored = self._kept.get(step)
            return dict(stored.tensors) if stored is not None else {}

    def checksums_at(self, step: int) -> dict[str, int]:
        """Of what there is of a step, where they are known."""
        with self._lock:
            stored = self._kept.get(step)
            return dict(stored.checksums) if stored is not None else {}

    def retain(self, first: int, last: int, *, is_between_kept: bool = True) -> None:
        """Forget all other steps."""
        with self._lock:
            wanted_steps = range(first, last + 1) if is_between_kept else (first, last)
            self._kept = {step: stored for step, stored in self._kept.items() if step in wanted_steps}

    def listing(
        self,
    ) -> tuple[dict[int, tuple[TensorEntry, ...]], dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
        """What there is by steps: tensors, scalars, checksums."""
        with self._lock:
            return (
                {step: state.entries(stored.tensors) for step, stored in self._kept.items()},
                {step: stored.scalars for step, stored in self._kept.items()},
                {step: dict(stored.checksums) for step, stored in self._kept.items()},
            )

    # Copies of others

    def make_room(self, message: Hold) -> None:
        """Another worker's copy may come."""
        size = state.byte_count(message.tensors)
        tensors = state.empty(message.tensors)
        name = topic(message.step, message.attempt)
        self.endpoint.mailbox.expect(message.source, name, size)
        self.endpoint.mailbox.post(message.source, message.step, name, list(tensors.values()))
        with self._lock:
            self._arriving[message.source, message.step] = (message, tensors)

    def collect(self) -> list[Held]:
        """Copies that have come since the last time. One that differs from what was announced is not kept."""
        with self._lock:
            arriving = list(self._arriving.items())
        held = []
        for (source, step), (message, tensors) in arriving:
            if self.endpoint.mailbox.collect(source, step, topic(step, message.attempt)):
                sums = checksums(tensors.values())
                if sums == message.checksums:
                    self.keep(step, tensors, message.scalars, sums)
                held.append(Held(message.generation, source, step, combined(sums), message.attempt))
                with self._lock:
                    self._arriving.pop((source, step), None)
        return held

    def expect_nobody(self) -> None:
        """The generation is over: what has not come will not."""
        self.collect()
        with self._lock:
            self._arriving.clear()

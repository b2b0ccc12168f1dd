"""Keeps copies of state on a worker against losses: its own after some steps, and those it holds for others.

The copies outlive generations: the next one begins from copies of the one before. They do not outlive a job.
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
"""The topic of messages with the state a device starts with, one from each device that has part of it."""


@dataclass
class Kept:
    """State after some step, as far as this worker has it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums of tensors that are copies, from when the copies were made."""


def topic(step: int, attempt: int = 0) -> str:
    """Return the topic of the message with a copy of a device's state; `attempt`: how often it was sent before."""
    return f"state {step}" if not attempt else f"state {step} again {attempt}"


class Keeping:
    """The state that this worker keeps, by steps completed. Used by the working and the listening thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._since = -1
        """The generation with which the job of this state began."""
        self._kept: dict[int, Kept] = {}
        self._arriving: dict[tuple[str, int], tuple[Hold, dict[str, torch.Tensor]]] = {}

    def begin(self, since: int) -> None:
        """Begin a generation of a job, and forget the state of an earlier job."""
        with self._lock:
            if since != self._since:
                self._since = since
                self._kept.clear()

    def keep(
        self, step: int, tensors: dict[str, torch.Tensor], scalars: dict[str, Any], sums: Sequence[int] = ()
    ) -> None:
        """Add to the state of a step. The tensors must not change from now on. `sums`: checksums, if known."""
        with self._lock:
            stored = self._kept.setdefault(step, Kept())
            stored.tensors = {**stored.tensors, **tensors}
            stored.scalars = {**stored.scalars, **scalars}
            others = {name: checksum for name, checksum in stored.checksums.items() if name not in tensors}
            stored.checksums = others | dict(zip(tensors, sums))

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """Return the tensors that are kept of a step."""
        with self._lock:
            stored = self._kept.get(step)
            return dict(stored.tensors) if stored is not None else {}

    def checksums_at(self, step: int) -> dict[str, int]:
        """Return the checksums of the tensors that are kept of a step, where they are known."""
        with self._lock:
            stored = self._kept.get(step)
            return dict(stored.checksums) if stored is not None else {}

    def retain(self, first: int, last: int, *, is_between_kept: bool = True) -> None:
        """Forget all steps other than these: `first` to `last`, or without `is_between_kept` only the two."""
        with self._lock:
            wanted_steps = range(first, last + 1) if is_between_kept else (first, last)
            self._kept = {step: stored for step, stored in self._kept.items() if step in wanted_steps}

    def listing(
        self,
    ) -> tuple[dict[int, tuple[TensorEntry, ...]], dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
        """Return the kept tensors, scalars and checksums, each by step."""
        with self._lock:
            return (
                {step: state.entries(stored.tensors) for step, stored in self._kept.items()},
                {step: stored.scalars for step, stored in self._kept.items()},
                {step: dict(stored.checksums) for step, stored in self._kept.items()},
            )

    # Copies of others

    def make_room(self, message: Hold) -> None:
        """Make room for a copy that another worker is to send."""
        size = state.byte_count(message.tensors)
        tensors = state.empty(message.tensors)
        name = topic(message.step, message.attempt)
        self.endpoint.mailbox.expect(message.source, name, size)
        self.endpoint.mailbox.post(message.source, message.step, name, list(tensors.values()))
        with self._lock:
            self._arriving[message.source, message.step] = (message, tensors)

    def collect(self) -> list[Held]:
        """Return copies that have arrived since the last call. One that differs from what was announced is not kept."""
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
        """Collect the copies that have arrived, and expect no others: the generation is over."""
        self.collect()
        with self._lock:
            self._arriving.clear()

"""The way of a GPU's batches: into pinned memory, to the GPU on a stream of their own, one round ahead.

    link ──▶ pinned memory ──▶ staging on the GPU ──▶ the tensors that every round reads
             (where a message   (copy stream, while    (compute stream; always the same
              is posted)         the GPU computes)      memory, as a CUDA graph needs)

Without this the GPU waits while bytes are copied to memory that was allocated anew, and from there to the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from manyhands.executor.boxes import empty
from manyhands.executor.messages import COORDINATOR, FeedPart
from manyhands.schedule.feeding import feed_topic
from manyhands.transport.mailbox import Mailbox

ROUNDS = 3
"""Rounds whose batches have memory at once: one is computed with, one is copied to the GPU, one arrives."""
MOST_PINNED_BYTES = 2 * 2**30
Rows = Callable[[int, FeedPart, torch.Tensor], torch.Tensor]
"""Part number, part and what was sent of it -> the samples themselves, where the device has them."""


@dataclass
class _Slot:
    """The memory of one micro-batch on its way."""

    pinned: list[torch.Tensor]
    staged: list[torch.Tensor]
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    """The copy to the GPU has ended: pinned memory may be written to."""
    read: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    """What was staged has been read: the next copy may begin."""
    is_copied: bool = False


def can_stage(parts: Sequence[FeedPart], micro_batches: int) -> bool:
    """Return whether there is something to stage, and memory may be pinned for that much."""
    return 0 < ROUNDS * micro_batches * sum(part.bytes for part in parts) <= MOST_PINNED_BYTES


class GpuStaging:
    """Receives the parts of micro-batches for a GPU, those of the next round while this one is computed."""

    def __init__(self, mailbox: Mailbox, parts: Sequence[FeedPart], device: torch.device, local_rows: Rows) -> None:
        self._mailbox, self._parts, self._device, self._local_rows = mailbox, parts, device, local_rows
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._fixed: dict[int, list[torch.Tensor]] = {}
        """Micro-batch -> the tensors that every round reads."""
        self._taken: dict[int, int] = {}
        """Micro-batch -> the step whose batch is in the tensors that rounds read."""
        self._free: dict[int, list[_Slot]] = {}
        self._slots: dict[tuple[int, int], _Slot] = {}
        """First step of the round and micro-batch -> memory that is posted, or filled."""

    def take(self, step: int, micro_batch: int) -> list[torch.Tensor]:
        """Wait for a micro-batch; return its parts on the GPU, in memory that is the same in every round."""
        if self._taken.get(micro_batch) == step:
            return self._fixed[micro_batch]
        slot = self._slot(step, micro_batch)
        self._copy(slot, step, micro_batch)
        self._taken[micro_batch] = step
        del self._slots[step, micro_batch]
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(slot.copied)
        fixed = self._fixed.get(micro_batch)
        if fixed is None:
            fixed = self._fixed[micro_batch] = [torch.empty_like(tensor) for tensor in slot.staged]
        torch._foreach_copy_(fixed, slot.staged)
        slot.read.record(compute)
        slot.is_copied = False
        self._free[micro_batch].append(slot)
        return fixed

    def look_ahead(self, step: int, micro_batches: int) -> None:
        """Begin to copy what has come of a round that is not under way yet, and post memory for what has not."""
        for micro_batch in range(micro_batches):
            slot = self._slot(step, micro_batch)
            if not slot.is_copied and self._mailbox.has_arrived(COORDINATOR, step, feed_topic(micro_batch)):
                self._copy(slot, step, micro_batch)
            self._slot(step + 1, micro_batch)  # its message may be on its way

    def _slot(self, step: int, micro_batch: int) -> _Slot:
        slot = self._slots.get((step, micro_batch))
        if slot is None:
            free = self._free.setdefault(micro_batch, [])
            slot = free.pop(0) if free else self._new_slot()
            slot.copied.synchronize()
            self._slots[step, micro_batch] = slot
            self._mailbox.post(COORDINATOR, step, feed_topic(micro_batch), slot.pinned)
        return slot

    def _new_slot(self) -> _Slot:
        return _Slot(
            [part.room().pin_memory() for part in self._parts],
            [empty(part.box, part.dtype).to(self._device) for part in self._parts],
        )

    def _copy(self, slot: _Slot, step: int, micro_batch: int) -> None:
        if slot.is_copied:
            return
        self._mailbox.receive(COORDINATOR, step, feed_topic(micro_batch), slot.pinned)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.read)
            for number, (part, sent, staged) in enumerate(zip(self._parts, slot.pinned, slot.staged)):
                tensor = self._local_rows(number, part, sent) if part.is_local else sent
                staged.copy_(tensor, non_blocking=True)
            slot.copied.record(self._stream)
        slot.is_copied = True

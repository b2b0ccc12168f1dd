"""A dataset that is resident on a device: all samples' rows of each part that it is fed, preloaded before step one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import psutil
import torch

from manyhands.data.preload import HINT
from manyhands.data.silo import check_rows
from manyhands.executor.boxes import dtype_of
from manyhands.executor.messages import FeedPart
from manyhands.facts.boxes import Box
from manyhands.facts.errors import OutOfMemory
from manyhands.facts.network import DTYPE_BYTES
from manyhands.facts.units import format_bytes

SAMPLES = "samples"
"""The message that fills a resident dataset."""


def resident_bytes(parts: Sequence[FeedPart], samples: int) -> int:
    """Return the bytes that parts take for so many samples."""
    return sum(samples * prod(part.box.shape[1:]) * DTYPE_BYTES[part.dtype] for part in parts if part.is_of_samples)


def resident_key(preload_key: str, parts: Sequence[FeedPart]) -> str:
    """Return a name for what is preloaded of these parts: a device that had data of this key before has all of it."""
    listed = [f"{part.name} {part.dtype} {Box(part.box.intervals[1:])}" for part in parts if part.is_of_samples]
    return hashlib.sha256("\n".join([preload_key, *listed]).encode()).hexdigest()


class ResidentDataset:
    """Holds the memory for all samples' parts, which is filled once."""

    def __init__(self, device: str, parts: Sequence[FeedPart], samples: int, key: str) -> None:
        self.bytes, room = resident_bytes(parts, samples), psutil.virtual_memory().available
        if self.bytes > room:
            raise OutOfMemory(
                f"{device} was to be given {format_bytes(self.bytes)} of samples; it has room for "
                f"{format_bytes(room)}.",
                hint=HINT,
            )
        self.where, self.samples, self.key = f"What was laid out at {device}", samples, key
        self.arrays = [
            torch.empty((samples, *part.box.shape[1:]), dtype=dtype_of(part.dtype))
            for part in parts
            if part.is_of_samples
        ]
        self.is_full = False

    def take(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Return some samples of a part."""
        check_rows(self.where, rows, self.samples)
        return self.arrays[number][rows]

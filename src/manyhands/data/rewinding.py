"""Batches that can be taken again: a run that goes back a few steps gets the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch

from manyhands.data.loader import Batch, Prefetcher

MOST_BYTES = 512 * 2**20
"""The most bytes of batches that are kept; batches of earlier steps are loaded again."""


class RewindableBatches(Protocol):
    """Batches of which a run may take some again."""

    can_come_again: ClassVar[bool]
    """Whether batches that were forgotten can be loaded again; else they are forgotten only once a checkpoint has what
    they led to."""

    def from_step(self, step: int) -> Iterator[Batch]: ...

    def forget_before(self, step: int) -> None: ...

    def samples_at(self, step: int) -> int | None:
        """Return how many samples a step's batch has; None: that is not known yet, or the same for all."""


class Rewindable:
    """An iterable of batches from any step on. Batches since `forget_before` are kept, as far as there is room."""

    can_come_again: ClassVar[bool] = True

    def __init__(self, open_at: Callable[[int], Prefetcher], first: int, most_bytes: int = MOST_BYTES) -> None:
        self._open_at, self._most_bytes = open_at, most_bytes
        self._source = open_at(first)
        self._next = self._loaded = first
        self._kept: dict[int, tuple[Batch, int]] = {}

    def __enter__(self) -> Rewindable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._source.close()

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches from a step on, be it forwards or backwards."""
        if step > self._loaded or any(earlier not in self._kept for earlier in range(step, self._loaded)):
            self._source.close()
            self._kept.clear()
            self._source = self._open_at(step)
            self._loaded = step
        self._next = step
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def samples_at(self, step: int) -> None:
        """None: all batches have one size."""

    def is_ready(self) -> bool:
        """Return whether the next batch need not be waited for."""
        return self._next < self._loaded or self._source.is_ready()

    def __next__(self) -> Batch:
        if self._next < self._loaded:
            batch, _ = self._kept[self._next]
        else:
            batch = next(self._source)
            self._kept[self._next] = (batch, _byte_count(batch))
            self._loaded += 1
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > self._most_bytes:
                del self._kept[min(self._kept)]
        self._next += 1
        return batch

    def forget_before(self, step: int) -> None:
        """Drop batches of earlier steps, which will not be needed again."""
        for old in [kept_step for kept_step in self._kept if kept_step < min(step, self._next)]:
            del self._kept[old]


def _byte_count(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    return sum(map(_byte_count, batch)) if isinstance(batch, (tuple, list)) else 0

"""Batches of a stream, loaded ahead on a thread and kept until they are safe: a run that goes back gets the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ClassVar

from manyhands.data.batch_errors import too_late
from manyhands.data.batch_parts import samples_in
from manyhands.data.batch_stream import Batch, BatchStream
from manyhands.data.kept import KeptBatches

AHEAD = 3
"""How many batches are loaded before they are asked for: as many as devices are fed ahead."""
_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0


class LoadedBatches:
    """An iterable of (step, inputs, targets), from any step on that was not forgotten."""

    can_come_again: ClassVar[bool] = False

    def __init__(
        self, stream: BatchStream, last_step: int, kept: KeptBatches, *, ahead: int = AHEAD,
        wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`wake` is called, from a thread, when the next batch has come."""
        self.stream, self.kept = stream, kept
        self._last, self._ahead, self._wake = last_step, ahead, wake
        self._next = self._furthest = self._loaded = stream.next_step
        self._samples: dict[int, int] = {}
        """Step -> how many samples its batch has."""
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        self._asked_at: float | None = None
        """Since when the next batch has been waited for."""
        stream.go_on()
        self._thread = threading.Thread(target=self._fill, name="batch loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> LoadedBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and the loader's workers, and forget all batches."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)
        self.stream.close()
        self.kept.close()

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield batches from a step on, be it forwards or backwards."""
        with self._changed:
            assert step >= self._loaded or step in self.kept, "a batch that may be run again is kept"
            self._next, self._asked_at = step, None
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def samples_at(self, step: int) -> int | None:
        """Return how many samples a step's batch has; None: it is not loaded."""
        with self._changed:
            return self._samples.get(step)

    def is_ready(self) -> bool:
        """Return whether the next batch, or the reason why there is none, is there."""
        with self._changed:
            return self._is_ready()

    def _is_ready(self) -> bool:
        if self._next < self._loaded or self._next >= self._last or self._error is not None:
            return True
        self._asked_at = self._asked_at or time.monotonic()
        return time.monotonic() - self._asked_at > self.stream.limit_seconds

    def __next__(self) -> Batch:
        with self._changed:
            while not self._is_ready():
                self._changed.wait(_POLL_SECONDS)
            step, self._asked_at = self._next, None
            if step >= self._last:
                raise StopIteration
            if step >= self._loaded and self._error is not None:
                raise self._error
            if step >= self._loaded:
                raise too_late(step, self.stream.limit_seconds)
            self._next += 1
            self._furthest = max(self._furthest, self._next)
            self._changed.notify_all()
        inputs, targets = self.kept.at(step)
        return step, inputs, targets

    def forget_before(self, step: int) -> None:
        """Drop batches of earlier steps, which will not be needed again."""
        with self._changed:
            for old in [kept for kept in self._samples if kept < min(step, self._next)]:
                del self._samples[old]
        self.kept.forget_before(min(step, self._next))
        self.stream.forget_starts_before(min(step, self._next))

    def _fill(self) -> None:
        try:
            while self._may_load():
                step, inputs, targets = self.stream.take()
                self.kept.add(step, (inputs, targets))
                with self._changed:
                    self._samples[step] = samples_in(inputs, step)
                    self._loaded = step + 1
                    self._changed.notify_all()
                self._wake()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._wake()

    def _may_load(self) -> bool:
        """Wait until there is room for another batch; return whether there is one to load."""
        with self._changed:
            while self._loaded >= self._furthest + self._ahead and not self._is_closed:
                self._changed.wait(_POLL_SECONDS)
            return not self._is_closed and self._loaded < self._last

"""Batches loaded ahead on one background thread, so that the step does not wait for the disk."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

from torch.utils.data import Dataset, Subset, default_collate

from manyhands.data.batch_memory import BatchMemory
from manyhands.data.order import BatchOrder
from manyhands.facts.errors import BadData, BadValue, ManyhandsError, TimedOut

Batch = tuple[int, Any, Any]
_MOST_THREADS = 8
_POLL_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_PAIR = "__getitem__ must return a pair: (input, target)."


class _MapStyle(Protocol):
    """A data set whose samples can be counted and taken by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Prefetcher:
    """An iterator that yields (step, inputs, targets) for each step from `first_step` up to, but not including,
    `last_step`.

    Loading begins at once; at most `ahead` batches wait. Closing ends the iteration. An error is raised where its batch
    would have come, after the batches before it.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        order: BatchOrder,
        first_step: int,
        last_step: int,
        ahead: int = 2,
        *,
        limit_seconds: float = 600.0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called, from a thread, when a batch has come."""
        if not 0 <= first_step <= last_step:
            raise BadValue(f"Batches from step {first_step} to {last_step}: 0 <= first <= last is needed.")
        if ahead < 1:
            raise BadValue(f"{ahead} batches loaded ahead; it must be 1 or more.")
        samples = _map_style(dataset)
        if order.samples > len(samples):
            raise BadData(f"The batch order is for {order.samples} samples; the data set has {len(samples)}.")
        self._limit_seconds = limit_seconds
        self._next_step = first_step
        self._waited_since: float | None = None
        self._ready = _ReadyBatches(ahead)
        # The thread refers to the ready batches, not to this object, so that a loader dropped unclosed is freed.
        self._thread = threading.Thread(
            target=_fill,
            args=(self._ready, samples, order, range(first_step, last_step), wake),
            daemon=True,
            name="prefetcher",
        )
        self._end = weakref.finalize(self, _end, self._ready, self._thread)
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def is_ready(self) -> bool:
        """Return whether the next batch, or the reason why there is none, is there."""
        self._waited_since = self._waited_since or time.monotonic()
        return self._ready.has_news or time.monotonic() - self._waited_since > self._limit_seconds

    def __next__(self) -> Batch:
        try:
            waited = time.monotonic() - self._waited_since if self._waited_since is not None else 0.0
            batch = self._ready.take(self._limit_seconds - waited)
        except TimeoutError:
            raise TimedOut(
                f"The batch of step {self._next_step} was not loaded within {self._limit_seconds:g} s.",
                hint="The data set's __getitem__ hangs, or the disk is very slow.",
            ) from None
        if batch is None:
            raise StopIteration
        self._next_step, self._waited_since = batch[0] + 1, None
        return batch

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, whatever it is doing. Only a sample being read is waited for, and not for long."""
        self._end()


def length(dataset: Dataset[Any] | Sequence[Any]) -> int:
    """Return how many samples a data set has, or raise an error for one without a length."""
    return len(_map_style(dataset))


def example(dataset: Dataset[Any] | Sequence[Any], samples: int) -> tuple[Any, Any]:
    """Return the first samples as one batch: fewer where the data set is shorter."""
    if samples < 1:
        raise BadValue(f"An example of {samples} samples; it must have 1 or more.")
    held = _map_style(dataset)
    if len(held) == 0:
        raise BadData("The data set has no samples.")
    indices = list(range(min(samples, len(held))))
    return _collate([sample_of(held, index) for index in indices], indices, BatchMemory())


class _ReadyBatches:
    """The batches that wait between the thread that loads and the one that takes. Closing it wakes both."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._complete = False
        self.closed = False

    def put(self, batch: Batch) -> None:
        with self._changed:
            while len(self._batches) >= self._places and not self.closed:
                self._changed.wait(_POLL_SECONDS)
            if not self.closed:
                self._batches.append(batch)
                self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._complete = True
            self._error = error
            self._changed.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether `take` returns or raises at once."""
        with self._changed:
            return bool(self._batches) or self._complete or self.closed

    def take(self, limit_seconds: float) -> Batch | None:
        """Return the next batch, or None when there will be no more."""
        deadline = time.monotonic() + limit_seconds
        with self._changed:
            while not self._batches:
                if self.closed:
                    return None
                if self._error is not None:
                    raise self._error
                if self._complete:
                    return None
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise TimeoutError
                self._changed.wait(min(left_seconds, _POLL_SECONDS))
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._batches.clear()
            self._changed.notify_all()


def _fill(ready: _ReadyBatches, dataset: _MapStyle, order: BatchOrder, steps: range, wake: Callable[[], None]) -> None:
    """Load batches in the background; whatever happens, the thread that takes them learns that no more will come."""
    threads, memory = _threads_for(dataset), BatchMemory()
    pool = ThreadPoolExecutor(threads, "pictures") if threads > 1 else None
    read: Callable[..., Iterable[Any]] = map if pool is None else pool.map
    try:
        for step in steps:
            indices, padded = order.indices(step), order.padded(dataset, step)
            samples = []
            for sample in read(partial(sample_of, padded), indices):
                if ready.closed:
                    return
                samples.append(sample)
            ready.put((step, *_collate(samples, indices, memory)))
            wake()
        ready.finish()
    except BaseException as error:
        ready.finish(error)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
    wake()


def _threads_for(dataset: Any) -> int:
    """Return how many threads read the samples of a data set: one, unless it says that it may be read by several. Half
    of the cores, since workers compute on them."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if not getattr(dataset, "is_read_by_threads", False):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // 2))


def _end(ready: _ReadyBatches, thread: threading.Thread) -> None:
    ready.close()
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):  # it was never started
            thread.join(_JOIN_SECONDS)


def _map_style(dataset: Dataset[Any] | Sequence[Any]) -> _MapStyle:
    kind = type(dataset)
    take = getattr(kind, "__getitem__", None)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if take is Dataset.__getitem__:
        missing = sorted({*missing, "__getitem__"})
    if missing:
        raise BadData(
            f"The data set, a {kind.__name__}, has no {' and no '.join(missing)}.",
            hint="It must be map-style: samples are taken by number, so that a run can resume at any step. A stream of "
            "samples is made so by mh.collect(stream).",
        )
    samples = cast(_MapStyle, dataset)
    try:
        len(samples)
    except Exception as error:
        raise BadData(f"The data set, a {kind.__name__}, cannot tell its length: {_told(error)}") from error
    return samples


def sample_of(dataset: Any, index: int) -> tuple[Any, Any]:
    """Return a sample of a data set; whatever is wrong with it is said with its number."""
    try:
        sample = dataset[index]
    except ManyhandsError as error:
        named = error.message if error.message.startswith("Sample ") else f"Sample {index}: {error.message}"
        raise BadData(named, hint=error.hint) from error
    except Exception as error:
        raise BadData(f"Sample {index} cannot be loaded: {_told(error)}") from error
    if isinstance(sample, dict):
        names = [repr(str(name)) for name in sample]
        raise BadData(
            f"Sample {index} is a dict of {', '.join(names[:8])}, not a pair (input, target).",
            hint=f"Say which is which: mh.Pairs(data, {(names or ['input'])[0]}, {(names or ['target'])[-1]}).",
        )
    if not isinstance(sample, (tuple, list)):
        raise BadData(f"Sample {index} is a {type(sample).__name__}, not a pair (input, target).", hint=_PAIR)
    if len(sample) != 2:
        hint = f"{_PAIR} Or say which parts: mh.Pairs(data, 0, {len(sample) - 1})." if len(sample) > 2 else _PAIR
        raise BadData(f"Sample {index} has {len(sample)} parts; a pair (input, target) has 2.", hint=hint)
    return sample[0], sample[1]


def _collate(samples: list[tuple[Any, Any]], indices: list[int], memory: BatchMemory) -> tuple[Any, Any]:
    inputs, targets = zip(*samples)
    return _stack("input", list(inputs), indices, memory), _stack("target", list(targets), indices, memory)


def _stack(part: str, values: list[Any], indices: list[int], memory: BatchMemory) -> Any:
    if any(base.__module__.startswith("PIL.") for base in type(values[0]).__mro__):
        raise BadData(
            f"The {part} of sample {indices[0]} is a picture ({type(values[0]).__name__}), not a tensor.",
            hint="Give the data set a transform: transform=torchvision.transforms.ToTensor(); without torchvision: "
            "torch.from_numpy(numpy.array(picture)).permute(2, 0, 1) / 255.",
        )
    first = _form(values[0])
    for index, value in zip(indices, values):
        if _form(value) != first:
            raise BadData(
                f"The {part} of sample {index} has the shape {_form(value)}; that of sample {indices[0]} has {first}.",
                hint="All samples of a data set must have one shape: crop, resize or pad them in __getitem__; or, if "
                "they differ in their length alone, write lengths=(32, 64, 128), say, and batches are padded to these.",
            )
    try:
        stacked = memory.stack(values)
        if stacked is None:
            stacked = default_collate(values)
    except Exception as error:
        raise BadData(
            f"The {part}s of samples {indices[0]} to {indices[-1]} do not make a batch: {_told(error)}",
            hint="Samples are tensors, numbers, arrays, or tuples and dicts of them.",
        ) from error
    # torch makes a list of the parts; a model's arguments are a tuple again.
    return tuple(stacked) if type(values[0]) is tuple else stacked


def _form(value: Any) -> Any:
    """Return the shape of a tensor or array, or of each part of a tuple or dict."""
    if isinstance(value, dict):
        return {key: _form(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_form(part) for part in value]
    shape = getattr(value, "shape", ())
    return tuple(shape) if isinstance(shape, Sequence) else ()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}".removesuffix(": ")

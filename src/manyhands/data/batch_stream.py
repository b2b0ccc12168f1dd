"""Batches as they are given: a DataLoader, or anything that yields batches, read once through, epoch after epoch.

    a DataLoader        iterated anew in every epoch, with its workers, sampler and collate_fn; set_epoch is called
    an IterableDataset  of samples, with a batch size: as a DataLoader of it
    an iterable         of batches: iterated anew in every epoch
    a function          that returns an iterator of batches: called in every epoch
    an iterator         (a generator): there is one epoch

Nothing is read whole, and nothing is read twice: who may need a batch again keeps it (`loaded.py`). A resumed run reads
the epoch under way from its beginning, with the random states that it began with, and skips what was trained.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sized
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any

import msgspec
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from manyhands.data import random_states
from manyhands.data.batch_errors import another_shape, deaths_named, failed, larger, too_late
from manyhands.data.batch_parts import BatchParts, BatchSamples, form, samples_in
from manyhands.data.given import Pairs
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadData, BadFile, BadValue, ManyhandsError

Batch = tuple[int, Any, Any]
LIMIT_SECONDS = 600.0
"""How long a batch may take, unless the DataLoader has a timeout of its own."""
_MARGIN_SECONDS = 60.0
_DYING_SECONDS = 1.0


class EpochStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of an epoch, as a checkpoint has it."""

    epoch: int
    step: int
    """The step of its first batch."""
    random: dict[str, str]
    """The states of random generators before it."""


class BatchStream:
    """Batches that come as they come. One thread at a time takes them."""

    def __init__(self, source: Any, parts: BatchParts | None = None) -> None:
        self.source, self.parts = source, parts or BatchParts(is_copied=_reuses_memory(source))
        self.name = getattr(source, "__name__", "") if callable(source) else type(source).__name__
        self.expects_whole_epochs = False
        """Whether the run's length was told in epochs, so that each must have as many batches as was said."""
        self.step = 0
        """The step of the next batch that is taken."""
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._in_epoch = -1, 0
        self._starts: list[EpochStart] = []
        self._held: Batch | None = None
        """The first batch, which was taken to see what batches are like."""
        self._states: dict[str, str] = {}
        self._first: tuple[Any, Any, Any] | None = None
        """The inputs, targets and form of the first batch."""

    # What is known of it

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of batches of an epoch; None: it is known when the epoch ends."""
        if not isinstance(self.source, Sized) or callable(self.source):
            return None
        try:
            count = len(self.source)
        except (TypeError, NotImplementedError):
            return None
        return count

    @property
    def next_step(self) -> int:
        """The step of the batch that `take` returns next."""
        return self.step if self._held is None else self._held[0]

    @property
    def incomplete_samples(self) -> int:
        """The samples of the incomplete last batch of an epoch, where that is known; 0: there is none."""
        sampler = getattr(self.source, "batch_sampler", None)
        if type(sampler) is not BatchSampler or sampler.drop_last or isinstance(self.source.dataset, IterableDataset):
            return 0
        try:
            return len(sampler.sampler) % sampler.batch_size  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return 0

    @property
    def limit_seconds(self) -> float:
        """The longest that a batch is waited for; a DataLoader's own timeout comes first, and it says more."""
        timeout = float(getattr(self.source, "timeout", 0) or 0)
        return timeout + _MARGIN_SECONDS if timeout > 0 else LIMIT_SECONDS

    @property
    def batch_size(self) -> int:
        """The number of samples of the first batch; others may have fewer."""
        return samples_in(self.first_batch()[0], self.step)

    def first_batch(self) -> tuple[Any, Any]:
        """Return inputs and targets of the first batch; it is trained on, too."""
        if self._first is None:
            # A loader begun by the main thread would have the death of a worker raise there, wherever that is by then.
            taken: Future[Batch] = Future()
            threading.Thread(target=self._take_first, args=(taken,), name="first batch", daemon=True).start()
            try:
                with deaths_named(lambda: 0):
                    self._held = taken.result(self.limit_seconds)
            except TimeoutError:
                raise too_late(0, self.limit_seconds) from None
            self.pause()
        assert self._first is not None
        return self._first[0], self._first[1]

    def _take_first(self, taken: Future[Batch]) -> None:
        try:
            taken.set_result(self.take())
        except BaseException as error:
            taken.set_exception(error)

    def samples(self) -> BatchSamples:
        """Return the samples of the first batch."""
        return BatchSamples(*self.first_batch())

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step's batch was taken in."""
        return next((start.epoch for start in reversed(self._starts) if start.step <= step), 0)

    @property
    def is_drawn_by_persistent_workers(self) -> bool:
        """Whether random numbers depend on all that a loader's workers drew before, which nobody can put back."""
        return bool(getattr(self.source, "num_workers", 0) and getattr(self.source, "persistent_workers", False))

    # Where it is

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the beginning of the epoch that a step is in, to be resumed at this step."""
        start = next((start for start in reversed(self._starts) if start.step <= step), None)
        return {} if start is None else dict(msgspec.to_builtins(start))

    def forget_starts_before(self, step: int) -> None:
        """Forget the beginnings of epochs that were over before a step."""
        later = [place for place, start in enumerate(self._starts) if start.step <= step]
        del self._starts[: later[-1] if later else 0]

    def resume(self, step: int, stored: Mapping[str, Any]) -> int:
        """Go to a step, in the epoch that `start_of` told of; return how many batches of that epoch were skipped."""
        start = decode(dict(stored), EpochStart, "the checkpoint's place in the data")
        if not 0 <= start.step <= step or start.epoch < 0:
            raise BadFile(f"The checkpoint of step {step} says that its epoch {start.epoch} began at {start.step}.")
        if self._is_one_pass and step == start.step:
            return 0
        self._held = None
        if not self._is_one_pass:  # else what was seen of it so far counts
            self.close()
            random_states.put_back(start.random, self.source)
            self._starts.clear()
            self._epoch, self._in_epoch, self.step = start.epoch - 1, 0, start.step
        while self._in_epoch < step - start.step:
            self._next_batch()
            if self._epoch > start.epoch:
                raise BadData(
                    f"Epoch {start.epoch} of the {self.name} has fewer than {step - start.step} batches, which the run "
                    "had trained of it.",
                    hint="Resume with the same data, or start a new run.",
                )
        self.step = step
        self.pause()
        return step - start.step

    def pause(self) -> None:
        """Remember the states of random generators: whatever else draws numbers meanwhile is not to change batches."""
        self._states = random_states.states_of(self.source)

    def go_on(self) -> None:
        """Put the states of random generators back to where they were at the last `pause`."""
        if self._states:
            random_states.put_back(self._states, self.source)
        self._states = {}

    def close(self) -> None:
        """End the epoch under way; a loader's workers end, unless they are to persist."""
        self._iterator = None

    # Taking

    def take(self) -> Batch:
        """Return the next batch: its step, inputs and targets."""
        if self._held is not None:
            batch, self._held = self._held, None
            return batch
        step = self.step
        inputs, targets = self.parts.of(self._next_batch(), step)
        self._check(step, inputs, targets)
        self.step += 1
        return step, inputs, targets

    @property
    def _is_one_pass(self) -> bool:
        return isinstance(self.source, Iterator)

    def _next_batch(self) -> Any:
        """Return the next batch as it is given, of a new epoch where the last has ended."""
        while True:
            try:
                if self._iterator is None:
                    self._begin_epoch()
                    assert self._iterator is not None
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            except ManyhandsError:
                raise
            except Exception as error:
                is_cut_off = isinstance(error, (OSError, EOFError))  # while a batch came from a worker, perhaps
                raise failed(error, self.step, self.name, self._dead_workers() if is_cut_off else ()) from error
            self._in_epoch += 1
            expected = self.batches_per_epoch
            if self.expects_whole_epochs and expected is not None and self._in_epoch > expected:
                raise self._other_length(f"goes on after {expected} batches", expected)
            return batch

    def _dead_workers(self) -> list[int]:
        """Return the process ids of a DataLoader's workers that have died."""
        workers = getattr(self._iterator, "_workers", ())
        if workers:
            wait([worker.sentinel for worker in workers], _DYING_SECONDS)  # its pipe is closed before it has ended
        return [worker.pid for worker in workers if worker.exitcode not in (None, 0)]

    def _begin_epoch(self) -> None:
        self._epoch, self._in_epoch = self._epoch + 1, 0
        states = {} if self._is_one_pass else random_states.states_of(self.source)
        self._starts.append(EpochStart(self._epoch, self.step, states))
        for holder in ("sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(self.source, holder, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        made = self.source() if callable(self.source) else self.source
        try:
            self._iterator = iter(made)
        except TypeError as error:
            raise BadData(
                f"{self.name} gives a {type(made).__name__}, which does not yield batches.",
                hint="Let the function be a generator: it yields pairs (inputs, targets).",
            ) from error

    def _end_epoch(self) -> None:
        self._iterator = None
        if not self._in_epoch:
            raise BadData(f"Epoch {self._epoch} of the {self.name} gave no batches.")
        if self._is_one_pass:
            raise BadData(
                f"The {self.name} ended after {self.step} batches, and cannot begin anew.",
                hint=f"Write steps={self.step}, or give the function that makes it: each epoch calls it again.",
            )
        expected = self.batches_per_epoch
        if self.expects_whole_epochs and expected is not None and self._in_epoch != expected:
            raise self._other_length(f"ended after {self._in_epoch} batches", expected)

    def _other_length(self, what: str, expected: int) -> BadData:
        return BadData(
            f"Epoch {self._epoch} of the {self.name} {what}; len() of it says {expected}.",
            hint="Write steps=..., in place of epochs: then each epoch is as long as it is.",
        )

    def _check(self, step: int, inputs: Any, targets: Any) -> None:
        """Refuse a batch of another shape than the first's, unless it has the same samples and fewer of them."""
        shapes = form((inputs, targets))
        if self._first is None:
            self._first = inputs, targets, shapes
        elif shapes != self._first[2]:
            self._check_misfit(step, inputs, targets)

    def _check_misfit(self, step: int, inputs: Any, targets: Any) -> None:
        assert self._first is not None
        misfit = another_shape(step, form((inputs, targets)), self._first[2])
        try:
            batch, first = BatchSamples(inputs, targets, step), BatchSamples(*self._first[:2])
        except BadData:
            raise misfit from None
        if not len(batch) or form(batch[0]) != form(first[0]):
            raise misfit
        if len(batch) > len(first):
            raise larger(step, len(batch), len(first))


def as_stream(data: Any, batch_size: int | None, labels: Collection[str] = ()) -> BatchStream | None:
    """Return data that comes in batches, or as a stream of samples; None: samples are taken by number.

    `labels`: what labels are called, where the network computes its own loss.
    """
    pairs = data if isinstance(data, Pairs) else None
    source = pairs.data if pairs is not None else data
    if isinstance(source, IterableDataset):
        if batch_size is None:
            raise BadValue(
                f"batch_size is not given; the {type(source).__name__} yields samples.",
                hint="Write batch_size=64. If it yields batches: torch.utils.data.DataLoader(data, batch_size=None).",
            )
        source = DataLoader(source, batch_size=batch_size, drop_last=True)
    elif not isinstance(source, DataLoader) and not yields_batches(source):
        return None
    return BatchStream(source, BatchParts(pairs, labels, _reuses_memory(source)))


def yields_batches(source: Any) -> bool:
    """Return whether something gives batches one after another, and no samples by number."""
    if isinstance(source, type) or hasattr(type(source), "__getitem__"):
        return False
    return hasattr(type(source), "__iter__") or callable(source)


def _reuses_memory(source: Any) -> bool:
    """Return whether the next batch may be made in the memory of one before: a DataLoader's own batches never are."""
    return not (isinstance(source, DataLoader) and source.collate_fn is default_collate)

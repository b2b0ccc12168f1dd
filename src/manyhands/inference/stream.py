"""Runs all samples of a source through an inference, in order, and counts and writes the answers."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy
import torch

from manyhands.data.wanted import SampleSource
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, TimedOut
from manyhands.files.documents import write_failed
from manyhands.inference.lines import Answer, Labels, json_line

if TYPE_CHECKING:
    from manyhands.inference.infer import Inference

UNDER_WAY = 32
ANSWER_SECONDS = 1200.0
"""Longest wait for one answer; the devices that compute it have shorter limits of their own."""
SUFFIXES = (".npy", ".jsonl")


class Asks(Protocol):
    """An object that answers samples, from any thread: an Inference."""

    def submit(self, sample: Any, limit_seconds: float = ...) -> Future[Any]: ...


class Late(TimedOut):
    """An answer did not come in time."""


def in_order(asks: Asks, samples: SampleSource, at_once: int, seconds: float = inf) -> Generator[Answer, None, None]:
    """Yield answers in the order of the samples, as soon as they are ready, all of them within `seconds`.

    `at_once` samples are submitted before the first of them is answered; with 1, each is timed alone.
    """
    end = time.monotonic() + seconds
    waiting: deque[tuple[int, _Timed]] = deque()

    def left() -> float:
        return max(0.0, min(end - time.monotonic(), ANSWER_SECONDS))

    def taken() -> Answer:
        index, timed = waiting[0]
        try:
            output = timed.future.result(left())
        except TimeoutError:
            raise Late(f"{samples.name(index)} was not answered in time.") from None
        waiting.popleft()
        return Answer(index, samples.name(index), output, timed.seconds)

    try:
        for index in range(len(samples)):
            if not left():
                raise Late(f"{samples.name(index)} was not asked in time.")
            waiting.append((index, _Timed(asks, samples[index], left())))
            while waiting and (len(waiting) >= at_once or waiting[0][1].future.done()):
                yield taken()
        while waiting:
            yield taken()
    finally:
        for _, timed in waiting:
            timed.future.cancel()


class _Timed:
    """A submitted sample, and how long its answer took."""

    def __init__(self, asks: Asks, sample: Any, limit_seconds: float) -> None:
        self.began = self.ended = time.monotonic()
        self.future = asks.submit(sample, limit_seconds=limit_seconds)
        self.future.add_done_callback(self._note)

    def _note(self, future: Future[Any]) -> None:
        self.ended = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)


@dataclass
class Tally:
    """Counts of a stream: samples, right answers, seconds."""

    samples: int = 0
    right: int = 0
    judged: int = 0
    """Number of samples whose class is known."""
    seconds: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    def add(self, answer: Answer, labels: Labels, samples: SampleSource) -> None:
        self.samples += 1
        self.seconds.append(answer.seconds)
        self.ended = time.monotonic()
        if samples.targets and labels.has_top(answer.output):
            self.judged += 1
            self.right += int(answer.output.argmax()) == samples.targets[answer.index]

    def summary(self) -> dict[str, Any]:
        total = max(self.ended - self.began, 1e-9)
        return {
            "samples": self.samples,
            "seconds": total,
            "samples_per_second": self.samples / total,
            "median_latency_seconds": statistics.median(self.seconds) if self.seconds else None,
            "accuracy": self.right / self.judged if self.judged else None,
        }


class Output:
    """A file of answers: .jsonl, written line by line as they come, or .npy, one array of outputs, written whole."""

    def __init__(self, path: Path, count: int, labels: Labels, *, top: int, raw: bool) -> None:
        check_output(path)
        self.path, self.count, self.labels, self.top, self.raw = path, count, labels, top, raw
        self._lines: IO[bytes] | None = None
        self._array: Any = None
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Output:
        if self.path.suffix == ".jsonl":
            with self._failing():
                self._lines = open(self.path, "wb", buffering=0)
        return self

    def add(self, answer: Answer) -> None:
        with self._failing():
            if self._lines is not None:
                self._lines.write(json_line(self.labels.described(answer, top=self.top, raw=self.raw)))
                return
            if not isinstance(answer.output, torch.Tensor):
                raise BadValue(
                    f"The network returns a {type(answer.output).__name__}; a .npy file has one array.",
                    hint=f"Write lines: --output {self.path.with_suffix('.jsonl')}",
                )
            row = answer.output.detach().cpu().numpy()
            if self._array is None:
                shape = (self.count, *row.shape)
                self._array = numpy.lib.format.open_memmap(self._beside, "w+", row.dtype, shape)
            self._array[answer.index] = row

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._lines is not None:
                self._lines.close()
            if self._array is not None:
                self._array.flush()
                self._array = None
                if kind is None:
                    with self._failing():
                        os.replace(self._beside, self.path)
        finally:
            with contextlib.suppress(OSError):
                self._beside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_failed(self.path, error) from error


def check_output(path: Path) -> None:
    """Check that answers can be written to the path, before anything is computed."""
    if path.suffix not in SUFFIXES:
        raise BadValue(f"--output {path}: answers are written as .npy or .jsonl.", hint="--output answers.jsonl")
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise BadFile(f"{path}: {problem}.", hint="Give another file.")


def failed(running: Inference) -> ManyhandsError | None:
    """Return the error that ended a stream, if any."""
    error = running.streaming.error
    return error if isinstance(error, ManyhandsError) or error is None else ManyhandsError(str(error))

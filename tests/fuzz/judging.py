"""One parser under one input: what may come out, how long it may take, how much memory it may ask for."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz.mutation import Mutator
from manyhands.facts.errors import ManyhandsError

INPUT_SECONDS = 2.0
"""Of computing, for one input of at most 64 KB."""
INPUT_BYTES = 128 * 2**20
"""By which the process may grow over one input."""
ADDRESS_BYTES = 8 * 2**30
"""That the process may ask for beyond what it has when it begins: a larger demand fails at once."""


class TooLong(BaseException):
    """The time of an input is over. No parser may catch it."""


@dataclass(frozen=True)
class Fault:
    """What a parser should not have done."""

    target: str
    number: int
    what: str
    data: bytes = field(repr=False)
    trace: str = ""


@dataclass
class Target:
    """A parser, good inputs, and what it may say to bad ones."""

    name: str
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    kind: str = "bytes"
    allowed: tuple[type[BaseException], ...] = (ManyhandsError,)
    share: float = 1.0
    """Of all inputs, beside the others'."""
    finish: Callable[[bytes], bytes] | None = None
    """Puts right what would hide the rest: lengths, digests."""
    takes_seeds: bool = True
    """Whether at least one seed is taken: not so where a secret would be needed."""
    may_crash: bool = False
    """Whether native code runs on what an input says: then it is judged in a child process only."""

    def __post_init__(self) -> None:
        self.mutator = Mutator(self.seeds, self.kind, self.finish)

    def warm_up(self) -> None:
        """Have everything imported that is imported at the first use: no input is to pay for that."""
        for one in self.seeds[:2]:
            with contextlib.suppress(Exception):  # it is judged later
                self.run(one)

    def input(self, seed: int, number: int) -> bytes:
        return self.mutator.input(random.Random(f"{seed}/{self.name}/{number}"))


Build = Callable[[Path], Target]


class Judge:
    """Runs inputs and says what is wrong. In the main thread of its process: the clock is a signal."""

    def __init__(self, seconds: float = INPUT_SECONDS, most_bytes: int = INPUT_BYTES) -> None:
        self.seconds, self.most_bytes = seconds, most_bytes
        self.refused = 0
        """How many inputs were refused as they should be; the others were taken."""
        self._forgetting = -1
        with contextlib.suppress(OSError):  # Linux: what the most memory was can be forgotten; elsewhere it only grows
            self._forgetting = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)

    def judge(self, target: Target, data: bytes, number: int = -1) -> Fault | None:
        if self._forgetting >= 0:
            os.pwrite(self._forgetting, b"5", 0)
        before = _peak_bytes()
        what = trace = ""
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            target.run(data)
        except target.allowed as error:
            self.refused += 1
            what = _unprintable(error)
        except TooLong:
            what = f"takes longer than {self.seconds:g} s"
            trace = traceback.format_exc(limit=-12)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            what = f"{type(error).__name__} came out: {error!s:.200}"
            trace = traceback.format_exc(limit=-12)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        grown = _peak_bytes() - before
        if not what and grown > self.most_bytes:
            what = f"the process grew by {grown / 2**20:.0f} MB, more than {self.most_bytes / 2**20:.0f}"
        return Fault(target.name, number, what, data, trace) if what else None


def _unprintable(error: BaseException) -> str:
    """An error is for people: it can be printed, and is not longer than a page."""
    try:
        text = str(error)
    except Exception as problem:
        return f"{type(error).__name__} cannot be printed: {problem!r:.200}"
    return "" if len(text) <= 20_000 else f"{type(error).__name__} has a text of {len(text)} letters"


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def clock() -> Iterator[None]:
    """While this is open, an input whose time is over ends with TooLong."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """Of this process, from now on."""
    if sys.platform == "linux":
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + ADDRESS_BYTES, resource.RLIM_INFINITY))


def judge_some(judge: Judge, target: Target, seed: int, count: int, first: int = 0) -> tuple[list[Fault], float]:
    """The faults of so many inputs, and how long they took."""
    start = time.monotonic()
    found = [
        fault
        for number in range(first, first + count)
        if (fault := judge.judge(target, target.input(seed, number), number)) is not None
    ]
    return found, time.monotonic() - start

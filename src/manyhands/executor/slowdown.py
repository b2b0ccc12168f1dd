"""The slowdown of a device that stands for a slower one: after computing it sleeps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from manyhands.graph.accelerators import synchronize
from manyhands.profiler.layer_clocks import GpuClock

_LONGEST_HEAD_START_SECONDS = 0.05
_HEAD_START_FADES = 0.9


class Began(NamedTuple):
    """The beginning of what is to be stretched."""

    seconds: float
    """By the clock of seconds that count."""
    waited_seconds: float = 0.0
    """Those in which other devices had been waited for, until then."""
    clock: GpuClock | None = None
    """What times the kernels of a GPU; None: a processor computes."""


class Slowdown:
    """Makes what is computed take `factor` times as long; a factor of 1 changes nothing.

    A processor takes longer for all it does. On a GPU kernels do, by its own clock: a slower one computes while Python
    launches more of them. Its first round is not slowed: it loads kernels and opens libraries, which takes seconds on a
    fast GPU and on a slow one, and would take minutes if it were stretched by the factor.
    """

    def __init__(self, factor: float, torch_device: torch.device | None = None) -> None:
        self.factor, self.slows = factor, factor > 1.0
        self._gpu = torch_device if torch_device is not None and torch_device.type != "cpu" else None
        self.is_on = self.slows and self._gpu is None
        self._rounds = 0
        self._waited_seconds = 0.0
        self._head_start_seconds = 0.0
        """For so long a GPU is kept busy before its kernels are timed: what it took to launch such lately."""

    def begin_round(self) -> None:
        self.is_on = self.slows and (self._gpu is None or self._rounds > 0)
        self._rounds += 1

    def of_messages(self) -> Slowdown:
        """Return the slowdown of packing and unpacking: a GPU's copies to the machine's memory take no longer on a
        slower one, which may even share that memory with its processor."""
        return self if self._gpu is None else UNSLOWED

    def begin(self) -> Began:
        """Return the beginning of what `stretch` will stretch. A GPU ends what it was given first."""
        if self._gpu is None or not self.is_on:
            return Began(self._now())
        synchronize(self._gpu)
        began = self._now()
        clock = None
        if self._gpu.type == "cuda":
            clock = GpuClock(self._gpu, self._head_start_seconds)
            clock.start()
        return Began(began, self._waited_seconds, clock)

    def _now(self) -> float:
        """Return seconds that count: waiting for a core of a crowded machine does not, nor for other devices."""
        if self._gpu is None and torch.get_num_threads() == 1:
            return time.thread_time()
        return time.monotonic() - self._waited_seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave what happens inside out: waiting for other devices takes a slower one no longer."""
        if self._gpu is not None and self.is_on:
            synchronize(self._gpu)
        began = time.monotonic()
        yield
        self._waited_seconds += time.monotonic() - began

    def stretch(self, began: Began) -> None:
        """Sleep for what a slower device would take longer than this one has since then."""
        if not self.is_on:
            return
        if began.clock is None:
            if self._gpu is not None:
                synchronize(self._gpu)
            time.sleep((self.factor - 1.0) * (self._now() - began.seconds))
            return
        began.clock.stop()
        waited = self._waited_seconds - began.waited_seconds
        launched, computed = began.clock.launch_seconds()[0] - waited, began.clock.seconds()[0] - waited
        fading = _HEAD_START_FADES * self._head_start_seconds
        self._head_start_seconds = min(_LONGEST_HEAD_START_SECONDS, max(launched, fading))
        time.sleep(max(0.0, self.factor * computed - (self._now() - began.seconds)))


UNSLOWED = Slowdown(1.0)

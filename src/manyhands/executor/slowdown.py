"""The slowdown of a device that stands for a slower one: after computing it sleeps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from manyhands.graph.accelerators import synchronize


class Slowdown:
    """Makes what is computed take `factor` times as long; a factor of 1 changes nothing.

    A GPU's first round is not slowed: it loads kernels and opens libraries, which takes seconds on a fast GPU and on a
    slow one, and would take minutes if it were stretched by the factor. Nor are copies between a GPU and the machine's
    memory: a slower one, which may share that memory with its processor, takes no longer.
    """

    def __init__(self, factor: float, torch_device: torch.device | None = None) -> None:
        self.factor, self.slows = factor, factor > 1.0
        self._gpu = torch_device if torch_device is not None and torch_device.type != "cpu" else None
        self.is_on = self.slows and self._gpu is None
        self.slows_messages = self.slows and self._gpu is None
        self._rounds = 0
        self._waited_seconds = 0.0

    def begin_round(self) -> None:
        self.is_on = self.slows and (self._gpu is None or self._rounds > 0)
        self._rounds += 1

    def now(self) -> float:
        """Return seconds of computing, to be compared: on a crowded machine, waiting for a core is not slowed. A GPU
        that is slowed ends what it was given first."""
        if self._gpu is not None:
            if self.is_on:
                synchronize(self._gpu)
        elif torch.get_num_threads() == 1:
            return time.thread_time()
        return time.monotonic() - self._waited_seconds

    def now_of_message(self) -> float:
        """Return what to hand to `stretch_message`: a GPU that is slowed is not waited for."""
        return self.now() if self.slows_messages else 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave what happens inside out of `now`: waiting for other devices takes a slower one no longer."""
        if self._gpu is not None and self.is_on:
            synchronize(self._gpu)
        began = time.monotonic()
        yield
        self._waited_seconds += time.monotonic() - began

    def stretch_message(self, started: float) -> None:
        """Do the same as `stretch` for packing or unpacking a message."""
        if self.slows_messages:
            self.stretch(started)

    def stretch(self, started: float) -> None:
        """Sleep for what a slower device would take longer than this one has since `started`, by `now`."""
        if self.is_on:
            time.sleep((self.factor - 1.0) * (self.now() - started))


UNSLOWED = Slowdown(1.0)

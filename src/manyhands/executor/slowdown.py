"""The slowdown of a device that stands for a slower one: after computing it sleeps."""

from __future__ import annotations

import time

import torch

from manyhands.graph.accelerators import synchronize


class Slowdown:
    """Makes what is computed take `factor` times as long; a factor of 1 changes nothing.

    A GPU's first round is not slowed: it loads kernels and opens libraries, which takes seconds on a fast GPU and on a
    slow one, and would take minutes if it were stretched by the factor.
    """

    def __init__(self, factor: float, torch_device: torch.device | None = None) -> None:
        self.factor, self.slows = factor, factor > 1.0
        self._gpu = torch_device if torch_device is not None and torch_device.type != "cpu" else None
        self.is_on = self.slows and self._gpu is None
        self._rounds = 0

    def begin_round(self) -> None:
        self.is_on = self.slows and (self._gpu is None or self._rounds > 0)
        self._rounds += 1

    def now(self) -> float:
        """Return seconds of computing, to be compared: on a crowded machine, waiting for a core is not slowed. A GPU
        that is slowed ends what it was given first."""
        if self._gpu is not None:
            if self.is_on:
                synchronize(self._gpu)
            return time.monotonic()
        return time.thread_time() if torch.get_num_threads() == 1 else time.monotonic()

    def stretch(self, started: float) -> None:
        """Sleep for what a slower device would take longer than this one has since `started`, by `now`."""
        if self.is_on:
            time.sleep((self.factor - 1.0) * (self.now() - started))

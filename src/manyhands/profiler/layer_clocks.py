"""Stopwatches for layers that run one after another, and for whole steps: on a processor, and on a GPU.

A GPU is timed without gaps in which it would wait for Python: in a run many layers are in its queue at once, or a whole
round is launched as one graph. So it is kept busy until all that is timed is in its queue, and its own clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from manyhands.graph.accelerators import synchronize

_HEAD_START_SECONDS = 5e-4
"""For so long a GPU is kept busy before a layer, while Python launches the layer."""
_CYCLES_PER_SECOND = 2e9
"""A GPU's clock is seldom faster; with a slower one the head start is longer."""


class LayerClock(Protocol):
    """Times one layer after another."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> list[float]:
        """Return the seconds of every layer so far."""
        ...

    def launch_seconds(self) -> list[float]:
        """Return what Python took to launch each layer; 0 where it computes it."""
        ...


def layer_clock(device: torch.device, alone: bool = False) -> LayerClock:
    """Return a stopwatch for layers on a device. `alone`: time for which the one thread is paused does not count."""
    return GpuClock(device) if device.type == "cuda" else ProcessorClock(alone, device)


class ProcessorClock:
    """A stopwatch for layers that a processor computes.

    Where one thread computes, the total time is divided among the layers by their CPU time: a device that is paused
    for a while (a share of a core, other work) is paused in the midst of any layer, however short. A GPU whose clock
    cannot be read is waited for.
    """

    def __init__(self, alone: bool = False, device: torch.device | None = None) -> None:
        self._alone, self._device = alone, device or torch.device("cpu")
        self._divides = self._device.type == "cpu" and torch.get_num_threads() == 1
        self._taken: list[float] = []
        self._computed: list[float] = []

    def start(self) -> None:
        synchronize(self._device)
        self._began, self._computing = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        synchronize(self._device)
        self._computed.append(time.thread_time() - self._computing)
        self._taken.append(time.perf_counter() - self._began)

    def seconds(self) -> list[float]:
        if self._alone:
            return self._computed
        computed = sum(self._computed)
        if not self._divides or not computed:
            return self._taken
        factor = sum(self._taken) / computed
        return [factor * layer_seconds for layer_seconds in self._computed]

    def launch_seconds(self) -> list[float]:
        return [0.0] * len(self._taken)


class GpuClock:
    """A stopwatch for layers that a GPU computes."""

    def __init__(self, device: torch.device, head_start_seconds: float = _HEAD_START_SECONDS) -> None:
        self._device, self._cycles = device, int(head_start_seconds * _CYCLES_PER_SECOND)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._launches: list[float] = []

    def start(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._began.record()
        self._launching = time.perf_counter()

    def stop(self) -> None:
        self._launches.append(time.perf_counter() - self._launching)
        with torch.cuda.device(self._device):
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record()
        self._spans.append((self._began, ended))

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [began.elapsed_time(ended) / 1000 for began, ended in self._spans]

    def launch_seconds(self) -> list[float]:
        return self._launches


class CallTimer:
    """Times calls that compute on a device: whole steps, updates of weights. `alone`: time for which the one thread of
    a processor is paused does not count."""

    def __init__(self, device: torch.device, alone: bool = False) -> None:
        self._device, self._now = device, time.thread_time if alone else time.perf_counter
        self._launch_seconds = _HEAD_START_SECONDS
        """What Python took for the last call on a GPU."""

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds that a call takes its device."""
        if self._device.type != "cuda":
            start = self._now()
            run()
            synchronize(self._device)
            return self._now() - start
        start = time.perf_counter()
        clock = GpuClock(self._device, self._launch_seconds)
        clock.start()
        run()
        clock.stop()
        self._launch_seconds = time.perf_counter() - start
        return clock.seconds()[0]

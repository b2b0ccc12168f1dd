"""Measures what it takes a GPU to copy tensors to the machine's memory and back, on the way from and to other devices.

A worker on a processor has its tensors there already. What a GPU computes is copied there to be sent, and what comes is
copied from there: a fixed time for each tensor, in which Python waits until the GPU has done it, and the bytes.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from manyhands.graph.accelerators import synchronize

SMALL_BYTES, LARGE_BYTES = 4096, 16 * 2**20
REPEATS = 9


class HostCopies(NamedTuple):
    """Seconds of copying a tensor one way, the mean of both ways."""

    seconds: float
    """Of a small tensor."""
    seconds_per_gigabyte: float


def measure_host_copies(device: torch.device) -> HostCopies:
    """Return what copies take a GPU; a processor needs none."""
    if device.type == "cpu":
        return HostCopies(0.0, 0.0)
    small, large = (_round_trip(device, size) / 2 for size in (SMALL_BYTES, LARGE_BYTES))
    return HostCopies(small, max(0.0, large - small) / (LARGE_BYTES - SMALL_BYTES) * 1e9)


def _round_trip(device: torch.device, size: int) -> float:
    """Return the seconds in which so many bytes leave a GPU and come back, by way of pinned memory: the median."""
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    taken = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        synchronize(device)
        there.copy_(here, non_blocking=True)
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)

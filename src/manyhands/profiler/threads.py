"""Sets a number of threads that everything in this process uses while something is measured.

`torch.set_num_threads` does not affect everything: on Arm, oneDNN computes by the Arm Compute Library, which takes
torch's number of threads at its first call and keeps it. A process that has ever run a convolution on two threads runs
every later one on two, so that one thread seemed twice as fast, but only for what that library computes. Its threads
are OpenMP's, and OpenMP can be set to run parallel regions on the thread that starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from manyhands.graph.convolution_kernels import has_acl

_MAPPED = Path("/proc/self/maps")
_OPENMP = re.compile(r"(?m)\s(/\S*/lib(?:gomp|omp|iomp5)[\w.-]*\.so[\w.]*)$")


@contextlib.contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Run with so many threads (None: torch's setting), and afterwards with as many as before.

    One thread is one thread, whatever ran before. With several, the Arm Compute Library uses as many as torch had when
    it was first called.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        with _levels(0 if torch.get_num_threads() == 1 else 1):
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _levels(most: int) -> Iterator[None]:
    """Limit how deep OpenMP's parallel regions may be nested; 0: this thread's work is shared with no other thread."""
    before = [library.omp_get_max_active_levels() for library in _openmp()]
    for library in _openmp():
        library.omp_set_max_active_levels(most)
    try:
        yield
    finally:
        for library, levels in zip(_openmp(), before, strict=True):
            library.omp_set_max_active_levels(levels)


@lru_cache(maxsize=1)
def _openmp() -> tuple[ctypes.CDLL, ...]:
    """Return the OpenMP runtimes in this process, where they need the setting: torch's own, and perhaps others'
    copies."""
    if not has_acl() or not _MAPPED.exists():
        return ()
    paths = dict.fromkeys(_OPENMP.findall(_MAPPED.read_text()))
    return tuple(ctypes.CDLL(path) for path in paths)

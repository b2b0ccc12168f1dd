"""Boxes of tensors in memory: cutting them out of what a device holds, putting them into it, adding to it."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy
import torch

from manyhands.facts.boxes import Box
from manyhands.transport.memory import KNOWN_TO_NUMPY


def place_of(box: Box, hull: Box) -> tuple[slice, ...]:
    """Return where `box` lies in a tensor that holds `hull`, as slices."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box.intervals, hull.intervals))


Steps = tuple[tuple[int, int, int], ...]
"""The steps that cut a box out of a tensor: axis, start and length of each."""


_MOST_KEPT = 16384
"""The most answers about boxes that are cached: the same questions come up in every step."""


@lru_cache(maxsize=_MOST_KEPT)
def holds(hull: Box, box: Box) -> bool:
    """Return whether a tensor that holds `hull` holds all of `box`."""
    return hull.contains(box)


@lru_cache(maxsize=_MOST_KEPT)
def in_common(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes share; None: they share nothing."""
    common = first.intersect(second)
    return None if common.is_empty else common


@lru_cache(maxsize=_MOST_KEPT)
def steps_to(box: Box, hull: Box) -> Steps:
    """Return the steps that cut `box` out of a tensor that holds `hull`."""
    assert hull.contains(box), f"{box} is wanted, and only {hull} is here"
    if box.is_empty:  # wherever it lies
        return tuple((axis, 0, length) for axis, length in enumerate(box.shape) if length < hull.shape[axis])
    steps = []
    for axis, ((a, b), (c, d)) in enumerate(zip(box.intervals, hull.intervals)):
        if (a, b) != (c, d):
            steps.append((axis, a - c, b - a))
    return tuple(steps)


def narrowed(tensor: torch.Tensor, steps: Steps) -> torch.Tensor:
    """Return the view of a tensor that the steps cut out."""
    for axis, start, length in steps:
        tensor = tensor.narrow(axis, start, length)
    return tensor


def cut_out(tensor: torch.Tensor, hull: Box, box: Box) -> torch.Tensor:
    """Return a box of a tensor that holds `hull`: contiguous, without a copy where it is so already."""
    return narrowed(tensor.detach() if tensor.requires_grad else tensor, steps_to(box, hull)).contiguous()


def packed_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the CPU, copied if need be by this thread alone: torch would employ other threads,
    which then spin for a while on cores where devices compute."""
    if tensor.is_contiguous() or not tensor.is_cpu or tensor.requires_grad or tensor.dtype not in KNOWN_TO_NUMPY:
        return tensor.contiguous().cpu()
    return torch.from_numpy(numpy.ascontiguousarray(tensor.numpy()))


@cache
def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def empty(box: Box, dtype: str) -> torch.Tensor:
    """Return uninitialised memory on the CPU for a box that is about to arrive."""
    return torch.empty(box.shape, dtype=dtype_of(dtype))

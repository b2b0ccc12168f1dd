"""Boxes of tensors as memory: cut out of what a device holds, put into it, added to it."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy
import torch

from manyhands.facts.boxes import Box
from manyhands.transport.memory import KNOWN_TO_NUMPY


def place_of(box: Box, hull: Box) -> tuple[slice, ...]:
    """Where `box` lies in a tensor that holds `hull`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box.intervals, hull.intervals))


Steps = tuple[tuple[int, int, int], ...]
"""How a box is cut out of a tensor: along which axis, from where, how much."""


_MOST_KEPT = 16384
"""Answers about boxes: the same are asked for in every step."""


@lru_cache(maxsize=_MOST_KEPT)
def holds(hull: Box, box: Box) -> bool:
    """Whether a tensor that holds `hull` holds all of `box`."""
    return hull.contains(box)


@lru_cache(maxsize=_MOST_KEPT)
def in_common(one: Box, other: Box) -> Box | None:
    """What two boxes share; None: nothing."""
    found = one.intersect(other)
    return None if found.is_empty else found


@lru_cache(maxsize=_MOST_KEPT)
def steps_to(box: Box, hull: Box) -> Steps:
    """From a tensor that holds `hull`."""
    assert hull.contains(box), f"{box} is wanted, and only {hull} is here"
    if box.is_empty:  # wherever it lies
        return tuple((axis, 0, length) for axis, length in enumerate(box.shape) if length < hull.shape[axis])
    found = []
    for axis, ((a, b), (c, d)) in enumerate(zip(box.intervals, hull.intervals)):
        if (a, b) != (c, d):
            found.append((axis, a - c, b - a))
    return tuple(found)


def narrowed(tensor: torch.Tensor, steps: Steps) -> torch.Tensor:
    """A view."""
    for axis, start, length in steps:
        tensor = tensor.narrow(axis, start, length)
    return tensor


def cut_out(tensor: torch.Tensor, hull: Box, box: Box) -> torch.Tensor:
    """A box of a tensor that holds `hull`: contiguous, on the CPU, no copy where it is already so."""
    found = narrowed(tensor.detach() if tensor.requires_grad else tensor, steps_to(box, hull)).contiguous()
    return found if found.is_cpu else found.cpu()


def packed_alone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor on the CPU, copied if need be, by this thread alone: torch would have others help it, which
    then spin for a while on cores where devices compute."""
    if tensor.is_contiguous() or not tensor.is_cpu or tensor.requires_grad or tensor.dtype not in KNOWN_TO_NUMPY:
        return tensor.contiguous().cpu()
    return torch.from_numpy(numpy.ascontiguousarray(tensor.numpy()))


@cache
def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def empty(box: Box, dtype: str) -> torch.Tensor:
    """Memory for a box as it arrives: on the CPU."""
    return torch.empty(box.shape, dtype=dtype_of(dtype))

"""Boxes of tensors as memory: cut out of what a device holds, put into it, added to it."""

from __future__ import annotations

import torch

from manyhands.facts.boxes import Box


def place_of(box: Box, hull: Box) -> tuple[slice, ...]:
    """Where `box` lies in a tensor that holds `hull`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box.intervals, hull.intervals))


def narrowed(tensor: torch.Tensor, hull: Box, box: Box) -> torch.Tensor:
    """A view of a box of a tensor that holds `hull`."""
    for axis, (wanted, here) in enumerate(zip(box.intervals, hull.intervals)):
        if wanted != here:
            tensor = tensor.narrow(axis, wanted[0] - here[0], wanted[1] - wanted[0])
    return tensor


def cut_out(tensor: torch.Tensor, hull: Box, box: Box) -> torch.Tensor:
    """A box of a tensor that holds `hull`: contiguous, on the CPU, no copy where it is already so."""
    assert hull.contains(box), f"{box} is wanted, and only {hull} is here"
    found = narrowed(tensor.detach() if tensor.requires_grad else tensor, hull, box).contiguous()
    return found if found.is_cpu else found.cpu()


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def empty(box: Box, dtype: str) -> torch.Tensor:
    """Memory for a box as it arrives: on the CPU."""
    return torch.empty(box.shape, dtype=dtype_of(dtype))

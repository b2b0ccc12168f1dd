"""Weights, buffers and optimiser state as one message: a list of what is in it, then the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from manyhands.executor.boxes import dtype_of
from manyhands.facts.errors import BadValue
from manyhands.facts.network import DTYPE_BYTES
from manyhands.runtime.control import TensorEntry

WEIGHT, OPTIMIZER, LOSS = "weight:", "optimizer:", "loss:"
LARGEST_BYTES = 2**36


def entries(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


def byte_count(listed: Iterable[TensorEntry]) -> int:
    """Bytes of everything listed; checked before memory is taken for it."""
    total = 0
    for entry in listed:
        if entry.dtype not in DTYPE_BYTES or any(extent < 0 for extent in entry.shape):
            raise BadValue(f"State '{entry.name:.80}' is {entry.dtype:.20} {entry.shape}: no tensor is like that.")
        total += torch.Size(entry.shape).numel() * DTYPE_BYTES[entry.dtype]
    if total > LARGEST_BYTES:
        raise BadValue(f"State of {total} bytes; at most {LARGEST_BYTES} are taken.")
    return total


def empty(listed: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Memory to receive into."""
    return {entry.name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) for entry in listed}


def plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Own copies, contiguous, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under names that say what they are of."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def of(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those under a prefix, without it."""
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}

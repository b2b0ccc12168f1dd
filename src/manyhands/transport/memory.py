"""The bytes of tensors, without copies: those that are sent, and those that received bytes are written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

KNOWN_TO_NUMPY = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)
_WITHOUT_LOCK_BYTES = 32 * 1024
"""The size from which a copy lets other threads of the interpreter run; below, that takes longer than the copy."""
Memory = torch.Tensor | memoryview
"""Memory to send or to fill: a contiguous tensor on the CPU, or the bytes of one."""


def as_bytes(tensor: Memory) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, byte by byte, without a copy. Kept short: every message
    passes here."""
    if isinstance(tensor, memoryview):
        return tensor
    assert tensor.is_cpu, "only memory of the CPU travels"
    assert tensor.is_contiguous(), "tensor must be contiguous"
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: Any = (tensor if tensor.dtype in KNOWN_TO_NUMPY else tensor.reshape(-1).view(torch.uint8)).numpy()
    if array.size and array.dtype.char in "fBlq?d":
        return memoryview(array).cast("B")
    return memoryview(array.reshape(-1).view(numpy.uint8))


def byte_count(parts: Sequence[Memory]) -> int:
    return sum(part.nbytes for part in parts)


def window(views: list[memoryview], offset: int, length: int) -> list[memoryview]:
    """Return bytes [offset, offset + length) of some views laid end to end."""
    parts = []
    for view in views:
        size = len(view)
        if offset >= size:
            offset -= size
            continue
        if not length:
            break
        part = view if not offset and size <= length else view[offset : offset + length]
        parts.append(part)
        length -= len(part)
        offset = 0
    return parts


def copy_into(source: memoryview, views: list[memoryview]) -> None:
    place = 0
    for view in views:
        view[:] = source[place : place + len(view)]
        place += len(view)


def copy_pieces(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy pieces laid end to end into others of the same total length; other threads run while large ones are."""
    remaining = iter(targets)
    target = next(remaining, memoryview(b""))
    for source in sources:
        while len(source):
            if not len(target):
                target = next(remaining)
            count = min(len(source), len(target))
            if count < _WITHOUT_LOCK_BYTES:
                target[:count] = source[:count]
            else:
                numpy.copyto(
                    numpy.frombuffer(target[:count], numpy.uint8), numpy.frombuffer(source[:count], numpy.uint8)
                )
            source, target = source[count:], target[count:]

"""Checksums of tensors that are kept or sent: a copy that has changed is noticed before a device trains from it.

They are computed at the speed of memory, a dozen times as fast as a CRC: rows of 8 KiB are added up column by column as
integers, and the CRC is that of the columns and of the bytes that fill no row. Any change of one word is noticed; rows
that have changed places are not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy
import torch

from manyhands.transport.memory import as_bytes

_ROW_WORDS = 1024


def checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of a tensor's numbers as sent: in the order of its axes, whatever its memory layout."""
    data = as_bytes(tensor.detach().cpu().contiguous())
    words = len(data) // (8 * _ROW_WORDS) * _ROW_WORDS
    columns = numpy.frombuffer(data[: 8 * words], "<u8").reshape(-1, _ROW_WORDS).sum(axis=0, dtype=numpy.uint64)
    return zlib.crc32(data[8 * words :], zlib.crc32(columns.astype("<u8").tobytes()))


def checksums(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(checksum, tensors))


def combined(sums: Iterable[int]) -> int:
    """Return one checksum of several, which depends on their order."""
    return zlib.crc32(b"".join(number.to_bytes(4, "little") for number in sums))

"""Counter-based random numbers: hash(seed, step, operator, sample, place), the same on one device and on any share.

Every element of a random tensor is a pure function of its identity, not of when it was drawn. So a device that holds
samples 5..8, or rows 100..200, computes its own part of the very mask one device would have drawn, and a replay draws
it again. The hash is two rounds of a 32-bit mixer (Wellons' `lowbias32`) over the place inside the sample, keyed by
(seed, step, operator, sample) in between.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from numpy.typing import NDArray

from manyhands.facts.boxes import Box
from manyhands.graph.gpu_draws import Keys, drawn_bits

_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - (1 << 32)
_MASK = 0xFFFFFFFF
_FACTOR_1, _FACTOR_2 = numpy.uint32(0x7FEB352D), numpy.uint32(0x846CA68B)
_SHIFT_15, _SHIFT_16 = numpy.uint32(15), numpy.uint32(16)
_MOST_DRAWS = 4096
"""The most draws of one CUDA graph."""
_SMALL = 2**16
"""The most numbers in one draw that are drawn by numpy."""
_KEPT = 2**13
"""The most elements of a box whose places are cached: the next round draws for the same samples."""


@dataclass(frozen=True)
class Draw:
    """The identity of a draw: the run's seed, the training step, the operator, and which of its streams."""

    seed: int
    step: int
    operator: str
    stream: int = 0


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply lowbias32 in place, on int32 (multiplication wraps; shifts are made logical by masks)."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLY_1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLY_2
    x ^= (x >> 16) & 0xFFFF
    return x


def _mix_number(x: int) -> int:
    x &= _MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


@lru_cache(maxsize=256)
def _keys(draw: Draw) -> tuple[int, int]:
    key = 0x9E3779B9
    for part in (draw.seed, draw.seed >> 32, draw.step, zlib.crc32(draw.operator.encode()), draw.stream):
        key = _mix_number(key ^ _mix_number(part + 0x632BE59B))
    return key, _mix_number(key + 0x5851F42D)


class KeyTable:
    """The keys of draws in memory of a GPU: a CUDA graph, whose kernels are always the same, draws anew in every step.

    While `recording`, draws of this thread read their keys here; `renew` puts those of a step in place.
    """

    def __init__(self, device: torch.device) -> None:
        self._keys = torch.zeros(_MOST_DRAWS, 2, dtype=torch.int32, device=device)
        self._rows: dict[tuple[int, str, int], int] = {}
        """Seed, operator and stream -> the row of its keys."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        _recording.table = self
        try:
            yield
        finally:
            _recording.table = None

    def of(self, draw: Draw) -> torch.Tensor:
        """Return the row where the two keys of a draw will be."""
        row = self._rows.setdefault((draw.seed, draw.operator, draw.stream), len(self._rows))
        if row >= _MOST_DRAWS:
            raise RuntimeError(f"more than {_MOST_DRAWS} random operators")
        return self._keys[row]

    def renew(self, step: int) -> None:
        """Put the keys of a step in place."""
        if self._rows:
            drawn = [_keys(Draw(seed, step, operator, stream)) for seed, operator, stream in self._rows]
            keys = torch.tensor([[_signed(first), _signed(second)] for first, second in drawn], dtype=torch.int32)
            self._keys[: len(drawn)].copy_(keys, non_blocking=True)


class _Recording(threading.local):
    table: KeyTable | None = None


_recording = _Recording()


def keys_of(draw: Draw) -> Keys:
    """Return the keys of a draw, or where a GPU finds them while a round is captured as a graph."""
    if _recording.table is not None:
        return _recording.table.of(draw)
    first, second = _keys(draw)
    return _signed(first), _signed(second)


def bits(
    draw: Draw, box: Box, sample_shape: tuple[int, ...], batch_axis: int | None, device: torch.device
) -> torch.Tensor:
    """Return uniform int32 numbers for the elements in `box` of a tensor.

    `sample_shape` is the whole tensor's shape for one sample; along `batch_axis` it says how many rows a sample has,
    and `box` counts rows of the whole batch.
    """
    if device.type == "cpu" and box.volume <= _SMALL:
        return torch.from_numpy(_small_bits(draw, box, sample_shape, batch_axis))
    keys = keys_of(draw)
    drawn = drawn_bits(keys, box, sample_shape, batch_axis, device) if device.type == "cuda" else None
    if drawn is not None:
        return drawn
    key, second_key = keys
    place = torch.zeros((), dtype=torch.int64, device=device)
    sample = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for axis in range(len(sample_shape) - 1, -1, -1):
        low, high = box.intervals[axis]
        index = torch.arange(low, high, device=device)
        index = index.view([-1 if a == axis else 1 for a in range(len(sample_shape))])
        if axis == batch_axis:
            rows = sample_shape[axis]
            sample = index // rows if rows > 1 else index
            index = index % rows if rows > 1 else torch.zeros_like(index)
        place = place + index * stride
        stride *= sample_shape[axis]
    sample32 = _wrap(sample)
    first = _mix(sample32 ^ key)
    second = _mix(sample32 ^ second_key)
    mixed = _mix(_wrap(place) ^ first)
    mixed += second
    return _mix(mixed)


def _small_bits(draw: Draw, box: Box, sample_shape: tuple[int, ...], batch_axis: int | None) -> NDArray[numpy.int32]:
    """Return the same bits, drawn by numpy: its calls take less time than torch's, which dominates for a few
    numbers."""
    place, sample = (_places if box.volume <= _KEPT else _places.__wrapped__)(box, sample_shape, batch_axis)
    first, second = (_mix_array(sample ^ numpy.uint32(key)) for key in _keys(draw))
    mixed = _mix_array(place ^ first)
    mixed += second
    return _mix_array(mixed).view(numpy.int32)


@lru_cache(maxsize=64)
def _places(
    box: Box, sample_shape: tuple[int, ...], batch_axis: int | None
) -> tuple[NDArray[numpy.uint32], NDArray[numpy.uint32]]:
    """Return, for every element in a box, its place inside its sample and its sample. The result must not be
    modified."""
    rank = len(sample_shape)
    place = sample = numpy.zeros([1] * rank, numpy.uint32)
    stride = 1
    for axis in range(rank - 1, -1, -1):
        index = numpy.arange(*box.intervals[axis]).reshape([-1 if a == axis else 1 for a in range(rank)])
        if axis == batch_axis:
            samples, index = numpy.divmod(index, sample_shape[axis])
            sample = samples.astype(numpy.uint32)
        place = place + index.astype(numpy.uint32) * numpy.uint32(stride & _MASK)
        stride *= sample_shape[axis]
    return place, sample


def _mix_array(x: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """Apply lowbias32 in place."""
    x ^= x >> _SHIFT_16
    x *= _FACTOR_1
    x ^= x >> _SHIFT_15
    x *= _FACTOR_2
    x ^= x >> _SHIFT_16
    return x


def _wrap(x: torch.Tensor) -> torch.Tensor:
    """Return the low 32 bits of an int64, as int32."""
    return (x & _MASK).sub_((x & 0x80000000) << 1).to(torch.int32)


def keep_mask(random_bits: torch.Tensor, probability: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is 1 with the given probability, else 0."""
    limit = limit_of(probability)
    if limit >= 2**31:
        return torch.ones_like(random_bits, dtype=dtype)
    return (random_bits < limit).to(dtype)


def limit_of(probability: float) -> int:
    """Return the number below which bits are with the given probability."""
    return round(probability * 2**32) - 2**31


def uniform(random_bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in [0, 1) with 24 random bits."""
    return ((random_bits >> 8) & 0xFFFFFF).to(dtype) * 2.0**-24


def normal(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return standard normal numbers (Box–Muller) from two streams of bits."""
    radius = (-2.0 * torch.log(1.0 - uniform(first, torch.float64))).sqrt()
    return (radius * torch.cos(2.0 * math.pi * uniform(second, torch.float64))).to(dtype)

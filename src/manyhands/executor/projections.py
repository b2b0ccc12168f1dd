"""One number in place of many: the projection of a row of numbers onto a fixed pseudo-random vector.

Devices that hold the same numbers have the same projection, and the projection of a sum is the sum of the projections.
So gradients and weights of many megabytes are compared by a few numbers, and a wrong sum is found without adding up
again. A single changed number changes the projection by as much, at least by half of it.

    the row, cut into rows of COLUMNS  ──·v──▶  one number per row  ──·u──▶  the projection
                                       in its own precision          in float64

`v` and `u` hold numbers of either sign between 0.5 and 1.5, from a generator written out here: they are the same on
every device, whatever its versions of numpy and torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy
import torch
from numpy.typing import NDArray

from manyhands.transport.memory import KNOWN_TO_NUMPY

COLUMNS = 512
_FEW = 16
"""Rows of one product: numpy's library forms products of more than about 9,000 numbers on several threads, which would
fight for the cores that compute."""
_BLOCK = 32 * _FEW
"""Rows that are read at once: with their norm they stay in a processor's cache."""
_LEAST_SQUARE, _MOST_SQUARE = 1e-20, 1e36
"""Sums of squares beyond these are formed again in float64: single precision may have lost or overflown some."""
LONGEST = 1e300
"""A longer norm is reported as this one: JSON knows no infinity."""

Numbers = NDArray[Any]


class SumRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device's record of one gradient sum: projections, of which None says that some numbers were not finite."""

    stage: int
    first: int
    last: int
    micro_batch: int
    own: tuple[float | None, ...]
    """For each chunk of its own gradients, before the sum."""
    norms: tuple[float, ...]
    """The Euclidean norms of the same; 0 where not finite."""
    received: tuple[float | None, ...]
    """For the chunks of others that it added to its own, in the order of the hops."""
    sums: tuple[float | None, ...]
    """For the sums that it formed, in the order in which it formed them."""
    after: tuple[float | None, ...]
    """For each chunk after the sum."""
    weights: float | None = 0.0
    """For the weights that these gradients belong to, after the optimiser's step."""
    weights_norm: float = 0.0
    tied: str = ""
    """The first weight of a sum over several stages that hold it; empty: the sum is of one stage."""

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        return (self.stage, self.first, self.last, self.micro_batch, self.tied)


def numbers_in(memory: memoryview, dtype: torch.dtype) -> Numbers:
    """Return memory as numbers that numpy computes well with; a copy where it does not, or does not know their type."""
    if dtype in KNOWN_TO_NUMPY and dtype != torch.float16:
        return numpy.frombuffer(memory, str(dtype).removeprefix("torch."))
    return torch.frombuffer(memory, dtype=dtype).float().numpy() if len(memory) else numpy.zeros(0, "float32")


def projection(parts: Sequence[Numbers]) -> float | None:
    """Return the projection of some rows laid end to end; None where not all of their numbers are finite."""
    with numpy.errstate(all="ignore"):
        total = sum(salt(place) * _of_row(part) for place, part in enumerate(parts))
        return total if math.isfinite(total) else _again(parts)


def projection_and_norm(parts: Sequence[Numbers]) -> tuple[float | None, float]:
    """Return the projection of some rows, and their Euclidean norm; (None, 0) where not all numbers are finite."""
    with numpy.errstate(all="ignore"):
        total = squares = 0.0
        for place, part in enumerate(parts):
            of_row, of_squares = _of_both(part)
            total += salt(place) * of_row
            squares += of_squares
        if math.isfinite(total) and math.isfinite(squares):
            return total, math.sqrt(squares)
        exact = _again(parts)
        squares = 0.0 if exact is None else sum(_squares_exactly(part) for part in parts)
        return exact, min(math.sqrt(squares), LONGEST)


def _again(parts: Sequence[Numbers]) -> float | None:
    """Return the projection, formed in float64: the numbers may be finite, and only their products too large for single
    precision."""
    if not all(bool(numpy.isfinite(part).all()) for part in parts):
        return None
    total = sum(salt(place) * _of_row(part.astype(numpy.float64)) for place, part in enumerate(parts))
    return total if math.isfinite(total) else None


def _of_row(part: Numbers) -> float:
    count = part.size // COLUMNS
    total = float(numpy.einsum("i,i->", _row_products(part, count), row_factors(count))) if count else 0.0
    return total + _rest(part, count)


def _row_products(flat: Numbers, count: int) -> Numbers:
    """Return the product of each of `count` rows with `v`, as float64."""
    columns, even = column_factors(flat.dtype.char), count - count % _FEW
    each = numpy.empty(count)
    if even:
        few = flat[: even * COLUMNS].reshape(-1, _FEW, COLUMNS)
        each[:even] = numpy.matmul(few, columns).reshape(-1)
    if even < count:
        each[even:] = numpy.matmul(flat[even * COLUMNS : count * COLUMNS].reshape(-1, COLUMNS), columns)
    return each


def _of_both(part: Numbers) -> tuple[float, float]:
    """Return the projection and the sum of squares of a row, formed block by block."""
    count = part.size // COLUMNS
    weights = row_factors(count)
    total = squares = 0.0
    for first in range(0, count, _BLOCK):
        last = min(first + _BLOCK, count)
        flat = part[first * COLUMNS : last * COLUMNS]
        total += float(numpy.einsum("i,i->", _row_products(flat, last - first), weights[first:last]))
        squares += _squares(flat)
    tail = part[count * COLUMNS :]
    return total + _rest(part, count), squares + (_squares(tail) if tail.size else 0.0)


def _rest(part: Numbers, count: int) -> float:
    """Return the projection of what does not fill a row."""
    tail = part[count * COLUMNS :]
    if not tail.size:
        return 0.0
    columns = column_factors(part.dtype.char)[: tail.size]
    return float(numpy.einsum("i,i->", tail, columns)) * float(row_factors(count + 1)[count])


def _squares(flat: Numbers) -> float:
    at_once = _FEW * COLUMNS
    even = flat.size - flat.size % at_once
    few, tail = flat[:even], flat[even:]
    total = float(numpy.dot(tail, tail))
    if even:
        total += float(numpy.matmul(few.reshape(-1, 1, at_once), few.reshape(-1, at_once, 1)).sum(dtype=numpy.float64))
    return total if _LEAST_SQUARE < total < _MOST_SQUARE else _squares_exactly(flat)


def _squares_exactly(flat: Numbers) -> float:
    exact = flat.astype(numpy.float64)
    return float(numpy.einsum("i,i->", exact, exact))


@lru_cache(maxsize=8)
def column_factors(kind: str) -> Numbers:
    """Return `v`, as numbers of a type (numpy's letter for it)."""
    return _drawn(COLUMNS, 1).astype(kind)


def row_factors(count: int) -> Numbers:
    """Return the first numbers of `u`."""
    return _rows_up_to(max(10, (count - 1).bit_length()))[:count]


@lru_cache(maxsize=4)
def _rows_up_to(bits: int) -> Numbers:
    return _drawn(2**bits, 2)


@lru_cache(maxsize=4096)
def salt(place: int) -> float:
    """Return the factor of the part at `place`, so that two tensors that changed places are noticed."""
    return float(_drawn(1, 3 + place)[0])


def _drawn(count: int, stream: int) -> Numbers:
    """Return numbers of either sign between 0.5 and 1.5 that are exact in half precision too (SplitMix64)."""
    mixed = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    mixed += numpy.uint64(stream * 0xD1342543DE82EF95 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
    mixed ^= mixed >> numpy.uint64(31)
    size = 0.5 + (mixed & numpy.uint64(255)).astype(numpy.float64) / 256
    return numpy.where(mixed >> numpy.uint64(63), size, -size)

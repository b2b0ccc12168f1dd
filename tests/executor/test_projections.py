"""Projections: linear, the same on every machine but for rounding, and changed by any change."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.executor.projections import (
    COLUMNS,
    LONGEST,
    Numbers,
    _drawn,
    column_factors,
    numbers_in,
    projection,
    projection_and_norm,
    row_factors,
    salt,
)
from manyhands.runtime.agreement import SLACK

SIZES = st.lists(st.integers(0, 5 * COLUMNS), min_size=1, max_size=4)
EPSILON = {"float32": 1.2e-7, "float64": 2.3e-16}


def drawn(sizes: list[int], seed: int, kind: str) -> list[Numbers]:
    generator = numpy.random.default_rng(seed)
    return [generator.standard_normal(size).astype(kind) for size in sizes]


def exact(parts: list[Numbers]) -> float:
    """The same in another order of addition and without rounding to speak of, as another machine might have it."""
    total = numpy.longdouble(0)
    for place, part in enumerate(parts):
        for first in range(0, part.size, COLUMNS):
            row = part[first : first + COLUMNS].astype(numpy.longdouble)
            columns = column_factors("d")[: row.size].astype(numpy.longdouble)
            total += salt(place) * row_factors(first // COLUMNS + 1)[-1] * numpy.sum((row * columns)[::-1])
    return float(total)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 999), st.sampled_from(["float32", "float64"]), st.sampled_from([1e-3, 1.0, 1e8]))
def test_the_same_whatever_the_order_of_addition(sizes: list[int], seed: int, kind: str, scale: float) -> None:
    """Far within the tolerance by which devices are judged."""
    parts = [part * numpy.asarray(scale, kind) for part in drawn(sizes, seed, kind)]
    found, norm = projection_and_norm(parts)
    assert found is not None
    other = projection(parts)
    assert other is not None
    room = SLACK * EPSILON[kind] * norm / 4
    assert abs(found - exact(parts)) <= room
    assert abs(other - exact(parts)) <= room
    assert norm == pytest.approx(float(numpy.sqrt(sum(float((p.astype("float64") ** 2).sum()) for p in parts))))


def test_any_number_that_changes_is_noticed() -> None:
    parts = drawn([3 * COLUMNS + 7, 5], 3, "float64")
    before = projection(parts)
    assert before is not None
    for part in parts:
        for place in range(part.size):
            part[place] += 1e-3
            after = projection(parts)
            assert after is not None
            assert 0.49e-3 * 0.25 <= abs(after - before) <= 1.5**3 * 1e-3
            part[place] -= 1e-3


def test_numbers_that_change_places_are_noticed() -> None:
    one, other = drawn([2 * COLUMNS, 2 * COLUMNS], 4, "float64")
    wanted = projection([one, other])
    assert projection([other, one]) != wanted
    assert projection([numpy.roll(one, COLUMNS), other]) != wanted


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, COLUMNS + 3])
def test_not_finite(number: float, place: int) -> None:
    part = drawn([COLUMNS + 9], 5, "float32")[0]
    part[place] = number
    assert projection([part]) is None
    assert projection_and_norm([part]) == (None, 0.0)


def test_large_and_small_numbers_are_finite() -> None:
    """Products and squares that single precision cannot hold."""
    for scale in (3e38, 1e-40):
        part = numpy.full(3 * COLUMNS, scale, "float32")
        found, norm = projection_and_norm([part])
        assert found is not None
        assert projection([part]) == pytest.approx(found)
        assert norm == pytest.approx(float(part[0]) * (3 * COLUMNS) ** 0.5, rel=1e-5)
    assert projection_and_norm([numpy.full(9, 1e300)])[1] == LONGEST


def test_types_that_numpy_does_not_compute_with() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        tensor = torch.arange(10, dtype=dtype)
        found = numbers_in(memoryview(tensor.view(torch.uint8).numpy()), dtype)
        assert found.dtype == numpy.float32
        assert found.tolist() == list(range(10))


def test_the_vectors_never_change() -> None:
    """Workers of one version on other machines, with other versions of numpy, must draw the same."""
    assert _drawn(4, 1).tolist() == [0.6015625, 0.70703125, 1.375, 1.390625]
    assert abs(float(_drawn(4096, 2).mean())) < 0.1
    assert 0.5 <= float(numpy.abs(_drawn(4096, 2)).min()) < float(numpy.abs(_drawn(4096, 2)).max()) < 1.5

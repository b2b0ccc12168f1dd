"""Projections formed as on a GPU are those formed on a processor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.executor.gpu_projections import projected
from manyhands.executor.projections import COLUMNS, numbers_in, projection_and_norm
from manyhands.transport.memory import as_bytes

SIZES = st.lists(st.integers(0, 5 * COLUMNS), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(0, 100), st.sampled_from([torch.float32, torch.float64]))
def test_a_projection_is_the_same_on_either(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    ((total, norm),) = projected([parts])
    expected, expected_norm = projection_and_norm([numbers_in(as_bytes(part), dtype) for part in parts])
    assert total is not None
    assert expected is not None
    scale = 1e-5 if dtype == torch.float32 else 1e-13
    assert abs(total - expected) <= scale * (1 + expected_norm) * math.sqrt(max(1, sum(sizes)))
    assert norm == pytest.approx(expected_norm, rel=1e-5)


def test_numbers_that_are_not_finite_have_no_projection() -> None:
    fine, bad = torch.ones(1000), torch.ones(1000)
    bad[700] = math.nan
    assert projected([[fine], [fine, bad]])[1] == (None, 0.0)
    assert projected([[fine], [fine, bad]])[0][1] == pytest.approx(math.sqrt(1000))
    assert projected([]) == []
    bad[700] = math.inf
    assert projected([[bad]]) == [(None, 0.0)]

"""SPLIT Eq. 6 by hand."""

from __future__ import annotations

import pytest

from manyhands_bench.split.weight_changes import weight_change_rates


def test_equation_6() -> None:
    norms = [100.0, 101.0, 103.0, 100.0]
    assert weight_change_rates(norms, 1) == pytest.approx([1.0, 200 / 101, 300 / 103])
    assert weight_change_rates(norms, 2) == pytest.approx([3.0, 100 / 101])
    assert weight_change_rates(norms, 4) == []

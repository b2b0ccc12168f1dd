"""Plans in one line."""

from __future__ import annotations

import pytest

from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands_bench.pipeline.ours import plan_text

pytestmark = pytest.mark.xdist_group("bench_pipeline")


def test_plans_in_one_line() -> None:
    stages = Stage((0, 3), ("a", "b"), BySamples((2, 1))), Stage((3, 5), ("c",))
    text = plan_text(Plan("any", 6, stages, micro_batches=2))
    assert text == "[0, 3) on a+b (2+1) | [3, 5) on c; 2 micro-batches, 1f1b"

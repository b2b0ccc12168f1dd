"""What is reported of the first step."""

from __future__ import annotations

import pytest

from manyhands_bench.trainer.first_step import PHASES, FirstStepSetting, first_step


@pytest.mark.slow
def test_the_first_step_of_a_small_network() -> None:
    figures = first_step(FirstStepSetting("tiny", (1, 16, 16), batch_size=8, steps=4), repeats=2)
    ends = [figures[f"first_step_{phase.replace(' ', '_')}_at"] for phase in PHASES]
    assert ends[0] > 0
    assert ends == sorted(ends)
    assert figures["first_step_seconds"] == ends[-1]
    assert figures["first_step_spread"] >= 0
    assert figures["steady_step_ratio"] > 0
    assert figures["steady_step_seconds"] > 0
    assert 0.5 < figures["steady_plan_ratio"] < 2

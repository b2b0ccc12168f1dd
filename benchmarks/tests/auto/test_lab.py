"""Mixed plans in the lab: which corners are measured, and what happens to a trial that fails."""

from __future__ import annotations

import pytest

from manyhands.facts.errors import OutOfMemory
from manyhands_bench.auto import lab
from manyhands_bench.auto.lab import MIXED, TRIALS, LabTask, PlanComparison, worth_measuring
from manyhands_bench.parts import failed


def test_corners_far_from_the_best_are_not_measured() -> None:
    predicted = {MIXED: 1.0, "single": 3.0, "samples": 3.1, "pipeline": 1.5, "tiles": 2.0}
    assert worth_measuring(predicted) == [MIXED, "pipeline", "tiles"]
    assert worth_measuring({MIXED: 1.0, "single": 3.8, "tiles": 1.5}) == [MIXED, "tiles"]


def test_the_corner_to_beat_is_the_fastest_as_measured() -> None:
    predicted = {MIXED: 1.0, "tiles": 2.0, "single": 2.2}
    blocks = {MIXED: [1.0, 2.0, 1.25], "tiles": [3.0], "single": [2.0, 3.0, 2.5]}
    one = PlanComparison(TRIALS[0], 1.0, False, {}, predicted, blocks)
    assert one.best_corner == "single"
    assert one.gain == 2.0, "the median of ratios, block by block"
    assert one.predicted_gain == 2.2
    assert one.error(MIXED) == pytest.approx(0.2)


def test_the_lab_has_three_trials_of_unequal_or_equal_devices_the_catalogue_knows() -> None:
    assert len(TRIALS) >= 3
    assert len(set(map(str, TRIALS))) == len(TRIALS)
    for trial in TRIALS:
        assert trial.cluster("x").names == tuple(f"d{place}" for place in range(1, len(trial.kinds) + 1))


def test_a_trial_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(trial: LabTask, name: str, extent: object, say: object) -> PlanComparison:
        if trial is TRIALS[0]:
            raise OutOfMemory("d1 is full.")
        return PlanComparison(trial, 2.0, False, {}, {MIXED: 1.0, "tiles": 1.5}, {MIXED: [1.0], "tiles": [1.4]})

    monkeypatch.setattr(lab, "_compared", compared)
    monkeypatch.setattr(lab, "_text", lambda comparison: "text")
    figures, found = lab.bench_lab(lab.AutoLabExtent(), lambda text: None)
    assert len(found) == len(TRIALS) - 1
    assert figures["lab_gain_min"] == pytest.approx(1.4)
    assert "d1 is full." in str(figures["lab_1_failed"])
    assert failed(figures) == ["lab_1_failed"]

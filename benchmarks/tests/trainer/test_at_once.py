"""Trainings that begin at once: how long each takes, and what it measures."""

from __future__ import annotations

import pytest

from manyhands_bench.trainer import at_once
from manyhands_bench.trainer.at_once import AtOnceSetting, trainings_at_once
from manyhands_bench.trainer.processes import ProcessTask

SMALL = AtOnceSetting(("tiny", "tiny"), (1, 16, 16), batch_size=8, workers=1)


def test_the_last_counts_and_so_does_the_profile_that_is_furthest_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"alone0": 2.0, "alone1": 3.0, "once0": 5.0, "once1": 4.0}
    profiles = {"alone0": 1.0, "alone1": 1.0, "once0": 1.5, "once1": 0.5}
    homes: dict[str, str] = {}

    def printed(tasks: list[ProcessTask]) -> list[dict[str, list[float]]]:
        homes.update({task.folder.name: task.home.name for task in tasks})
        return [{"step_ends": [0.5, ends[task.folder.name]]} for task in tasks]

    monkeypatch.setattr(at_once, "printed_by_all", printed)
    monkeypatch.setattr(at_once, "printed_by", lambda task: printed([task])[0])
    monkeypatch.setattr(at_once, "_profile_seconds", lambda setting, folder: profiles[folder.name])
    assert trainings_at_once(SMALL) == {
        "trainings_at_once": 2, "trainings_at_once_seconds": 5.0, "trainings_at_once_first_seconds": 4.0,
        "trainings_alone_seconds": 3.0, "trainings_at_once_profile_ratio": 0.5,
    }  # fmt: skip
    assert homes == {"alone0": "alone0-home", "alone1": "alone1-home", "once0": "home", "once1": "home"}


@pytest.mark.slow
def test_small_ones_at_once() -> None:
    figures = trainings_at_once(SMALL)
    assert 0 < figures["trainings_at_once_first_seconds"] <= figures["trainings_at_once_seconds"]
    assert figures["trainings_at_once_profile_ratio"] > 0

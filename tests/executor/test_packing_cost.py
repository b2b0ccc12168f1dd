"""What packing costs: a line through two sizes, stored and read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manyhands.executor import packing_cost as costs
from manyhands.executor.packing_cost import LARGE_BYTES, SMALL_BYTES, PackingCost, measure_packing, packing_cost
from manyhands.facts.errors import BadFile
from manyhands.profiler.clock import TimedTrial

PER_BYTE = {"pack": 3e-9, "unpack": 1e-9, "feed back": 2e-9}


def rigged(trial: TimedTrial) -> float:
    trial.run()
    what, size = trial.name.rsplit(" ", 1)
    constant = 0.002 if what == "pack" else 0.001
    return constant + PER_BYTE[what] * (SMALL_BYTES if size == "small" else LARGE_BYTES)


def test_a_line_through_two_sizes() -> None:
    before = torch.get_num_threads()
    found = measure_packing(1, timer=rigged)
    assert torch.get_num_threads() == before
    assert found.packing_seconds == pytest.approx(0.002)
    assert found.packing_seconds_per_byte == pytest.approx(3e-9)
    assert found.unpacking_seconds_per_byte == pytest.approx(1e-9)
    assert found.feedback_seconds_per_byte == pytest.approx(2e-9)
    assert "1 threads" in found.machine
    sides = found.between(upstream_slowdown=4, downstream_slowdown=2)
    assert sides["packing_seconds"] == pytest.approx(0.008)
    assert sides["packing_seconds_per_byte"] == pytest.approx(12e-9)
    assert sides["unpacking_seconds_per_byte"] == pytest.approx(2e-9)
    assert sides["feedback_seconds_per_byte"] == pytest.approx(8e-9)


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def measured(threads: int | None = None) -> PackingCost:
        asked.append(threads)
        return PackingCost(0.001 * len(asked), 1e-9, 1e-9, 1e-9, "here")

    monkeypatch.setattr(costs, "measure_packing", measured)
    first = packing_cost(1, folder=tmp_path)
    assert packing_cost(1, folder=tmp_path) == first
    assert packing_cost(2, folder=tmp_path) != first
    assert packing_cost(1, folder=tmp_path, refresh=True) != first
    assert asked == [1, 2, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "is not what packing costs"),
        ('{"version": 7}', "has version 7"),
        ("[", "line 1"),
        (json.dumps(dict.fromkeys(PackingCost.__struct_fields__[:4], -1.0)), "must be from 0"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, told: str) -> None:
    path = costs.packing_path(costs.identify(1), tmp_path)
    path.write_text(text)
    with pytest.raises(BadFile, match=told):
        packing_cost(1, folder=tmp_path)

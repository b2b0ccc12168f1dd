"""A hybrid plan in the lab: which runs are still to be made, what counts, and what a folder of another task does."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from manyhands.explaining.comparison import OURS
from manyhands.facts.errors import BadFile
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.files.documents import write_document
from manyhands_bench.pipeline.hybrid_lab import (
    BASELINES,
    STORED,
    TASK,
    HybridExtent,
    SideRun,
    StoredHybrid,
    _stored,
    figures_of,
)

SIDES = (OURS, *BASELINES)
HYBRID = Plan("tiny", 8, (Stage((0, 2), ("a", "b"), BySamples((3, 1))), Stage((2, 5), ("c",))), micro_batches=2)
CHAIN = Plan("tiny", 8, (Stage((0, 2), ("a",)), Stage((2, 5), ("c",))), micro_batches=2)


def stored(ours: Plan = HYBRID, **seconds: list[float]) -> StoredHybrid:
    """Runs of two blocks: ours 1 and 2 s, the others by keyword, else 4 and 6 s."""
    plans = {side: (ours if side == OURS else CHAIN).to_dict() for side in SIDES}
    rows = {OURS: [1.0, 2.0], **{side: seconds.get(side.replace(" ", "_"), [4.0, 6.0]) for side in BASELINES}}
    runs = [SideRun(block, side, [each]) for side, row in rows.items() for block, each in enumerate(row)]
    return StoredHybrid(str(TASK), TASK.scale, plans, dict.fromkeys(SIDES, 2.0) | {OURS: 1.0}, runs)


def test_sides_take_turns_in_being_first_and_runs_that_are_there_are_not_repeated() -> None:
    none_yet = stored()
    none_yet.runs = []
    turns = none_yet.missing(2)
    assert [side for block, side in turns if block == 0] == list(SIDES)
    assert [side for block, side in turns if block == 1] == [*SIDES[1:], OURS]
    none_yet.runs = [SideRun(0, OURS, [1.0])]
    assert (0, OURS) not in none_yet.missing(2)
    assert len(none_yet.missing(2)) == 2 * len(SIDES) - 1
    assert stored().missing(2) == []


def test_a_side_that_is_far_behind_is_run_once() -> None:
    slow = stored()
    slow.runs, slow.predicted["pipeline parallel"] = [], 4.0
    assert slow.missing(3).count((0, "pipeline parallel")) == 1
    assert all(side != "pipeline parallel" for block, side in slow.missing(3) if block)


def test_the_gain_is_over_the_closest_baseline_block_by_block() -> None:
    figures = figures_of(stored(DAPPLE=[1.5, 4.0]), HybridExtent())
    assert figures["hybrid_lab_gain"] == pytest.approx(1.75), "the median of 1.5 and 2"
    assert (figures["hybrid_lab_gain_least"], figures["hybrid_lab_gain_most"]) == (1.5, 2.0)
    assert figures["hybrid_lab_over_data_parallel"] == pytest.approx(3.5)
    assert figures["hybrid_lab_predicted_gain"] == 2.0
    assert figures["hybrid_lab_shared_stages"] == 1


def test_a_plan_without_a_shared_stage_is_no_hybrid_win() -> None:
    assert math.isnan(float(figures_of(stored(CHAIN), HybridExtent())["hybrid_lab_gain"]))


def test_a_folder_goes_on_with_its_own_task_only(tmp_path: Path) -> None:
    assert _stored(None, TASK) is None
    assert _stored(tmp_path, TASK) is None
    write_document(tmp_path / STORED, msgspec.to_builtins(stored()))
    again = _stored(tmp_path, TASK)
    assert again is not None
    assert again.plan(OURS) == HYBRID
    other = msgspec.structs.replace(stored(), scale=TASK.scale + 1)
    write_document(tmp_path / STORED, msgspec.to_builtins(other))
    with pytest.raises(BadFile, match="holds runs of"):
        _stored(tmp_path, TASK)

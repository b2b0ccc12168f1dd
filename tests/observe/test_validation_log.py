"""validation.csv: what was written is read, later rows are forgotten where steps are run again, columns are added."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from manyhands.facts.errors import BadFile
from manyhands.observe.validation_log import FILE, ValidationLog


def row(step: int, **metrics: float) -> dict[str, float]:
    return {"step": step, "epoch": 0, "samples": 7, "seconds": 0.125, **metrics}


def test_a_run_that_goes_on_has_the_rows_before_it(tmp_path: Path) -> None:
    log = ValidationLog(tmp_path)
    assert log.rows == []
    for step in (2, 4, 6):
        log.add(row(step, loss=1 / step, accuracy=float("nan")))
    again = ValidationLog(tmp_path, steps_done=4)
    assert [one["step"] for one in again.rows] == [2, 4]
    assert [one["loss"] for one in again.rows] == [0.5, 0.25]
    again.add(row(6, loss=0.1, top2=1.0))
    with open(tmp_path / FILE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "epoch", "samples", "seconds", "loss", "accuracy", "top2"]
    assert [one["loss"] for one in rows] == ["0.5", "0.25", "0.1"]
    assert [one["top2"] for one in rows] == ["", "", "1.0"]
    assert rows[0]["accuracy"] == "nan"


def test_a_new_run_begins_without_rows(tmp_path: Path) -> None:
    ValidationLog(tmp_path).add(row(2, loss=1.0))
    assert ValidationLog(tmp_path).rows == []


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("step,loss,b\n2,much,\n4,0.5,1,9\n")
    assert ValidationLog(tmp_path, steps_done=9).rows == [{"step": 2}, {"step": 4, "loss": 0.5, "b": 1}]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "else").write_text("step\n1\n")
    (tmp_path / FILE).symlink_to("/dev/null")
    with pytest.raises(BadFile):
        ValidationLog(tmp_path, steps_done=1)

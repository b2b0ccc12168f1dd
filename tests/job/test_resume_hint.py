"""What an error says of going on: as it is typed, and never to run into the same numbers again."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.executor.optimizers import with_lower_rate
from manyhands.facts.errors import DataNotFinite, ManyhandsError, NotFinite, WorkerLost
from manyhands.facts.optimizer import Optimizer
from manyhands.job import resume_hint as going_on
from manyhands.job.resume_hint import Words, point_to_checkpoint

SGD = Optimizer("SGD", lr=0.1, momentum=0.9)
NEWEST = Path("runs/one/checkpoints/step-000004")
SAME = f"Checkpoint: {NEWEST} (from before it; unchanged, the run comes to the same numbers again)"


def hint(error: ManyhandsError, *, command: str = "train", by_name: bool = True) -> str:
    point_to_checkpoint(error, Words(command, Path("runs/one"), {} if by_name else None), SGD)
    return error.hint


@pytest.fixture(autouse=True)
def _newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on.checkpoint, "latest", lambda folder: NEWEST)


def test_a_run_that_was_interrupted_goes_on() -> None:
    again = "manyhands train --resume runs/one"
    assert hint(WorkerLost("gone", hint="Look.")) == f"Look.\nCheckpoint: {NEWEST}\nGo on with: {again}"
    assert hint(WorkerLost("gone"), by_name=False).endswith("\nGo on with: mh.train(..., resume='runs/one')")
    assert hint(WorkerLost("gone"), command="split").endswith("\nGo on with: manyhands split train --resume runs/one")


@pytest.mark.parametrize(
    ("command", "by_name", "new"),
    [
        ("train", True, "manyhands train ... --optimizer SGD:lr=0.01,momentum=0.9 --out runs/one-2"),
        (
            "train",
            False,
            "mh.train(..., optimizer=mh.Optimizer('SGD', lr=0.01, momentum=0.9), folder='runs/one-2')",
        ),
        (
            "split",
            True,
            "manyhands split train ... --optimizer SGD:lr=0.01,momentum=0.9 --out runs/one-2 "
            "--weights runs/one/checkpoints/step-000004",
        ),
        (
            "split",
            False,
            "mh.split_train(..., optimizer=mh.Optimizer('SGD', lr=0.01, momentum=0.9), folder='runs/one-2', "
            "weights='runs/one/checkpoints/step-000004')",
        ),
    ],
)
def test_numbers_that_are_not_finite_come_again(command: str, by_name: bool, new: str) -> None:
    lines = hint(NotFinite("nan", hint="Lower it."), command=command, by_name=by_name).splitlines()
    assert lines[:3] == ["Lower it.", SAME, f"With a lower learning rate it is a new run: {new}"]
    assert lines[3].startswith("Once the data is fixed, go on with: ")
    assert len(lines) == 4


def test_data_that_is_not_finite_is_mended_first() -> None:
    mended = "Once the data is fixed, go on with: manyhands train --resume runs/one"
    assert hint(DataNotFinite("nan")) == f"{SAME}\n{mended}"


def test_without_a_checkpoint_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going_on.checkpoint, "latest", lambda folder: None)
    assert hint(NotFinite("nan", hint="Lower it.")) == "Lower it."


def test_a_lower_rate() -> None:
    assert with_lower_rate(SGD) == Optimizer("SGD", lr=0.01, momentum=0.9)
    assert with_lower_rate(Optimizer("Adam")) == Optimizer("Adam", lr=1e-4)
    scheduled = Optimizer("Adam", lr=0.3, schedule=("StepLR", {"step_size": 3}))
    assert with_lower_rate(scheduled) == Optimizer("Adam", lr=0.03, schedule=("StepLR", {"step_size": 3}))

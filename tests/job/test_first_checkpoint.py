"""The first checkpoint is written while devices get ready; no step begins before it is there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.executor import checkpoint
from manyhands.facts.errors import DiskFull
from manyhands.job.callback import Callback, CallbackContext
from manyhands.job.first_checkpoint import FirstCheckpoint
from manyhands.runtime.batch_feed import BatchFeed
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import RunRecord
from manyhands.runtime.run import Run
from real_runs import BATCH, names, shared, train, workers

LIMIT_SECONDS = 60.0
"""Of every wait: it is reached where the order is wrong only."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(1) as coordinator:
        yield coordinator


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run has done so far, in order."""
    happened: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def note(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            happened.append(event)
            return result

        monkeypatch.setattr(owner, name, note)

    noted(RunRecord, "checkpoint", "written")
    noted(Run, "prepare", "ready")
    noted(BatchFeed, "send", "fed")
    return happened


def test_is_written_while_devices_get_ready(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    are_ready, save, prepare = threading.Event(), checkpoint.save, Run.prepare
    was_ready: list[bool] = []

    def waiting(*arguments: Any) -> Path:
        was_ready.append(are_ready.wait(LIMIT_SECONDS))
        return save(*arguments)

    def prepared(run: Run) -> None:
        prepare(run)
        are_ready.set()

    monkeypatch.setattr(checkpoint, "save", waiting)
    monkeypatch.setattr(Run, "prepare", prepared)
    ran = train(cluster, shared(names(cluster), BATCH), tmp_path / "run", steps=1)
    assert was_ready == [True, True]  # of step 0 and of step 1
    assert events[:3] == ["ready", "written", "fed"]
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "step-000000").step == 0
    assert len(ran.result.losses) == 1


def test_an_error_ends_the_run_before_its_first_step(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(DiskFull, match="step-000000: the checkpoint cannot be written: No space"):
            train(cluster, shared(names(cluster), BATCH), tmp_path / "run", steps=1)
    assert "fed" not in events
    assert not (tmp_path / "run").exists()  # it never began
    train(cluster, shared(names(cluster), BATCH), tmp_path / "run", steps=1)  # the same workers are as good as new


def test_callbacks_find_it_when_they_start(cluster: Coordinator, tmp_path: Path, events: list[str]) -> None:
    class Looking(Callback):
        def on_start(self, context: CallbackContext) -> None:
            events.append("started")

    train(cluster, shared(names(cluster), BATCH), tmp_path / "run", steps=1, callbacks=[Looking()])
    assert events[:4] == ["written", "started", "ready", "fed"]


def test_leaving_waits_for_it() -> None:
    may_end, written = threading.Event(), []

    def write() -> None:
        assert may_end.wait(LIMIT_SECONDS)
        written.append(threading.current_thread() is threading.main_thread())

    with FirstCheckpoint(write, is_awaited=False):
        may_end.set()
    assert written == [False]


def test_one_that_is_not_due_is_not_waited_for() -> None:
    with FirstCheckpoint(None, is_awaited=True) as first:
        first.wait()


def test_its_error_is_raised_to_who_waits() -> None:
    def write() -> None:
        raise DiskFull("No room.")

    with FirstCheckpoint(write, is_awaited=False) as first, pytest.raises(DiskFull):
        first.wait()

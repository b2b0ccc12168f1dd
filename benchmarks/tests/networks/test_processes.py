"""A process for each task: whatever becomes of it is a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from manyhands_bench.networks import processes
from manyhands_bench.networks.processes import ProcessLimits, run_tasks
from network_tasks import behave


@pytest.fixture(autouse=True)
def torch_alone_is_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PRELOADED", ["torch"])


@pytest.mark.slow
def test_every_end_is_a_result(tmp_path: Path) -> None:
    tasks = ["good", "raises", "killed", "hangs", "large", "good too"]
    limits = ProcessLimits(processes=3, seconds=15, memory_bytes=2**29)
    ends = {end.task: end for end in run_tasks(tasks, behave, limits, tmp_path)}
    assert {task: end.ending for task, end in ends.items()} == {
        "good": "", "raises": "crash", "killed": "crash", "hangs": "timeout", "large": "memory", "good too": "",
    }  # fmt: skip
    assert ends["good"].reported == "good done"
    assert ends["hangs"].reported == "hangs began", "what it reported last is kept"
    assert "this went wrong" in ends["raises"].text
    assert "SIGKILL" in ends["killed"].text
    assert "15 s" in ends["hangs"].text
    assert "0.5" in ends["large"].text
    assert len(list(tmp_path.iterdir())) == 4, "the output of tasks that returned is removed"


@pytest.mark.slow
def test_processes_are_ended_with_the_walk(tmp_path: Path) -> None:
    file = tmp_path / "process"
    ends = run_tasks([str(file), "good"], behave, ProcessLimits(2, 60, 2**40), tmp_path / "logs")
    assert next(ends).task == "good"
    until(file.exists)
    until(lambda: bool(file.read_text()))
    process = int(file.read_text())
    assert psutil.pid_exists(process)
    ends.close()  # type: ignore[attr-defined]
    until(lambda: not psutil.pid_exists(process))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)

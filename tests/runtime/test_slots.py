"""Several workers on one device: processes that share torch's memory, work together exactly, and end together."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from manyhands.facts.errors import WorkerLost
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import WorkerProcess
from real_runs import assert_close, shared, train

NAMES = ("board.1", "board.2", "board.3")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(logs=tmp_path / "logs") as coordinator:
        coordinator.start_workers([WorkerProcess(NAMES, device="board")], 1, 60)
        yield coordinator


def parent_of(coordinator: Coordinator) -> psutil.Process:
    (process,) = set(coordinator.local.processes.values())
    return psutil.Process(process.pid)


@pytest.mark.slow
def test_slots_train_exactly_and_leave_together(board: Coordinator, tmp_path: Path) -> None:
    pids = {board.members[name].facts.pid for name in NAMES}
    assert {child.pid for child in parent_of(board).children()} == pids
    ran = train(board, shared(NAMES, 3, 4, 5), tmp_path / "slots", steps=6)
    ran.assert_as_planned()
    one = train(board, "single", tmp_path / "single", steps=6)
    assert_close(ran.state, one.state)
    board.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel how memory is shared")
def test_torch_is_in_memory_once(board: Coordinator) -> None:
    """Each slot has little of its own; torch's pages are everybody's."""
    for name in NAMES:
        text = Path(f"/proc/{board.members[name].facts.pid}/smaps_rollup").read_text()
        kilobytes = {key: int(value) for key, value in re.findall(r"(?m)^(\w+):\s+(\d+) kB$", text)}
        own = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
        assert own < kilobytes["Rss"] / 3, kilobytes


@pytest.mark.slow
def test_one_slot_dies_alone_and_all_die_with_their_parent(board: Coordinator) -> None:
    os.kill(board.members["board.2"].facts.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while not board.members["board.2"].is_lost and time.monotonic() < end:
        time.sleep(0.01)
    assert [name for name in NAMES if board.members[name].is_lost] == ["board.2"]
    with pytest.raises(WorkerLost, match=r"board\.2"):
        board.members_for(NAMES)
    left = [board.members[name].facts.pid for name in ("board.1", "board.3")]
    parent_of(board).kill()
    end = time.monotonic() + 30
    while any(_runs(pid) for pid in left) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in left)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

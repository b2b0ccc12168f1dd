"""Control groups for real: shares that are kept, memory that ends, processes that stop, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from manyhands.lab import groups
from manyhands.lab.control_groups import ControlGroups

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root"),
    pytest.mark.skipif(bool(groups.missing()), reason=groups.missing()),
]

LAB = f"t{os.getpid()}"
BUSY = "while True: pass"
GREEDY = "held = []\nwhile True: held.append(bytearray(b'x') * 1_000_000)"


@pytest.fixture
def found() -> Iterator[ControlGroups]:
    made = groups.find()
    try:
        yield made
    finally:
        made.remove(LAB)
        assert LAB not in made.labs()


def start(device: str, program: str) -> subprocess.Popen[bytes]:
    """A Python that enters first."""
    enter = f"from manyhands.lab import groups\ngroups.find().enter({LAB!r}, {device!r})\nprint(flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", enter + program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def used(found: ControlGroups, device: str, seconds: float) -> float:
    """Cores used on average."""
    begin, before = time.perf_counter(), found.statistics(LAB, device).cpu_seconds
    time.sleep(seconds)
    return (found.statistics(LAB, device).cpu_seconds - before) / (time.perf_counter() - begin)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_busy_loop_gets_its_share(found: ControlGroups, share: float) -> None:
    found.make(LAB, "x", share, None)
    process = start("x", BUSY)
    time.sleep(0.2)
    assert used(found, "x", 1.5) == pytest.approx(share, rel=0.1)
    assert found.statistics(LAB, "x").throttled_seconds > 0
    found.set_cpu(LAB, "x", share / 2)
    time.sleep(0.1)
    assert used(found, "x", 1.5) == pytest.approx(share / 2, rel=0.1)
    found.kill(LAB, "x")
    assert process.wait(5) == -signal.SIGKILL


def test_a_busy_process_gets_no_more_than_its_own_share(found: ControlGroups) -> None:
    found.make(LAB, "x", 0.4, None)
    busy, idle = start("x", BUSY), start("x", "import time; time.sleep(60)")
    found.divide(LAB, "x", {busy.pid: 0.1, idle.pid: 0.1})
    time.sleep(0.2)
    assert used(found, "x", 1.5) == pytest.approx(0.1, rel=0.1)
    found.kill(LAB, "x")
    assert [process.wait(5) for process in (busy, idle)] == [-signal.SIGKILL] * 2


def test_running_out_of_memory_kills(found: ControlGroups) -> None:
    found.make(LAB, "x", None, 64 * 10**6)
    process = start("x", GREEDY)
    assert process.wait(30) == -signal.SIGKILL
    statistics = found.statistics(LAB, "x")
    assert statistics.oom_kills == 1
    assert statistics.memory_limit_bytes == pytest.approx(64e6, rel=0.001)  # whole pages
    assert 60e6 < statistics.peak_bytes <= 64e6


def test_the_frozen_stand_still_and_can_be_killed(found: ControlGroups) -> None:
    found.make(LAB, "x", 0.2, None)
    process = start("x", BUSY)
    assert found.processes(LAB, "x") == [process.pid]
    found.freeze(LAB, "x")
    assert found.statistics(LAB, "x").is_frozen
    assert used(found, "x", 0.3) == 0
    found.thaw(LAB, "x")
    assert used(found, "x", 0.5) > 0.1
    found.freeze(LAB, "x")
    found.kill(LAB, "x")
    assert process.wait(5) == -signal.SIGKILL
    assert found.processes(LAB, "x") == []
    assert not found.statistics(LAB, "x").is_frozen
    again = start("x", BUSY)  # the group and its limits are still there
    assert used(found, "x", 0.5) == pytest.approx(0.2, rel=0.2)
    found.remove(LAB)
    assert again.wait(5) == -signal.SIGKILL
    assert found.devices(LAB) == set()


def test_children_stay_inside_and_die_too(found: ControlGroups) -> None:
    found.make(LAB, "x", None, None)
    found.make(LAB, "y", None, None)
    other = start("y", BUSY)
    process = start("x", "import os, time\nos.fork()\nos.fork()\ntime.sleep(60)")
    end = time.monotonic() + 5
    while len(found.processes(LAB, "x")) < 4 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(found.processes(LAB, "x")) == 4
    found.kill(LAB, "x")
    assert found.processes(LAB, "x") == []
    process.wait(5)
    assert found.processes(LAB, "y") == [other.pid]
    found.remove(LAB)
    assert other.wait(5) == -signal.SIGKILL


def test_the_share_as_the_kernel_has_it(found: ControlGroups) -> None:
    found.make(LAB, "x", 0.3, None)
    assert found.share(LAB, "x") == pytest.approx(0.3)
    found.set_cpu(LAB, "x", 0.02)
    assert found.share(LAB, "x") == pytest.approx(0.02)
    found.set_cpu(LAB, "x", None)
    assert found.share(LAB, "x") is None

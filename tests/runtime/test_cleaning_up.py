"""Local workers are processes of their own, and none is left: not after success, errors, Ctrl-C, nor a sudden death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import manyhands as mh
from manyhands.facts.errors import BadData
from manyhands.job import base as job
from manyhands.runtime.coordinator import Coordinator
from manyhands.session import measuring
from manyhands.transport import transport
from real_runs import Pictures, kill, marked, shared, train

GONE_SECONDS = 30.0


def wait_until(is_so: Callable[[], bool], limit_seconds: float = GONE_SECONDS) -> bool:
    end = time.monotonic() + limit_seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def workers_of(mark: str) -> list[psutil.Process]:
    """Not whoever they were forked by."""
    return [one for one in marked(mark) if "--name" in one.cmdline()]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, own_fork_servers: None) -> str:
    """In the environment of every process started here."""
    text = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("MANYHANDS_MARK", text)
    monkeypatch.setattr(measuring, "MEASURE_SECONDS", 0.1)
    monkeypatch.setattr(job.Job, "write_pictures", lambda *_: None)
    return text


def counted() -> tuple[int, int, int]:
    """Children, threads, descriptors."""
    own = psutil.Process()
    return len(own.children(recursive=True)), threading.active_count(), own.num_fds()


@pytest.mark.slow
def test_nothing_is_left(mark: str, tmp_path: Path) -> None:
    """After success and after Ctrl-C, each with workers of its own."""
    plan, seen = shared(("local-1",), 12), []

    def interrupt(step: int, loss: float, seconds: float) -> None:
        seen.append(len(workers_of(mark)))
        if step == 2:
            raise KeyboardInterrupt

    train(mh.Cluster.local(1), plan, tmp_path / "first", steps=2).assert_as_planned()  # loads what is loaded once
    before = counted()
    with pytest.raises(KeyboardInterrupt):
        train(mh.Cluster.local(1), plan, tmp_path / "interrupted", steps=100, on_step=interrupt)
    assert wait_until(lambda: counted() == before), (counted(), before)
    assert seen[0] == 1, "workers are marked"
    assert not marked(mark)


@pytest.mark.slow
def test_nothing_is_left_after_an_error(mark: str, tmp_path: Path) -> None:
    plan = shared(("local-1",), 12)
    train(mh.Cluster.local(1), plan, tmp_path / "first", steps=2)
    before = counted()
    spoilt = Pictures(change=lambda index, x, y: (x, y) if index < 40 else (x[:, :1], y))
    with pytest.raises(BadData):
        train(mh.Cluster.local(1), plan, tmp_path / "failed", data=spoilt, shuffle=False)
    assert wait_until(lambda: counted() == before), (counted(), before)
    assert not marked(mark)


@pytest.mark.slow
def test_a_frozen_worker_is_ended_too(mark: str) -> None:
    with Coordinator.local_cluster(mh.Cluster.local(1)) as coordinator:
        assert len(workers_of(mark)) == 1
        kill(coordinator, "local-1", signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < 30
    assert not marked(mark)


@pytest.mark.slow
def test_closing_may_be_interrupted(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C while workers are waited for: they are killed at once."""
    coordinator = Coordinator.local_cluster(mh.Cluster.local(1))
    kill(coordinator, "local-1", signal.SIGSTOP)
    wait = coordinator.local._wait
    waits: list[float] = []

    def interrupted(limit_seconds: float) -> None:
        waits.append(limit_seconds)
        if len(waits) == 1:
            raise KeyboardInterrupt
        wait(limit_seconds)

    monkeypatch.setattr(coordinator.local, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinator.close()
    assert not marked(mark)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("coordinator")]


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import manyhands as mh
from manyhands.job import base as job
from manyhands.session import measuring
measuring.MEASURE_SECONDS = 0.1
from real_runs import shared, train
def at_step(step, loss, seconds):
    print("step", step, flush=True)
    time.sleep(0.02)
train(mh.Cluster.local(2), shared(("local-1", "local-2"), 5, 7), Path({folder!r}), steps=2000, on_step=at_step)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_workers_end_with_the_process_that_started_them(mark: str, tmp_path: Path, number: signal.Signals) -> None:
    code = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "run"))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("step"), process.stderr and process.stderr.read()
        frozen, _ = workers_of(mark)
        if number is signal.SIGKILL:
            frozen.suspend()  # one that could not end by itself
        process.send_signal(number)
        process.communicate(timeout=20)
        assert wait_until(lambda: not marked(mark)), marked(mark)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_workers_started_by_a_thread_outlive_it(mark: str) -> None:
    """The kernel takes the thread for the parent; they belong to the process."""
    found: list[Coordinator] = []
    thread = threading.Thread(target=lambda: found.append(Coordinator.local_cluster(mh.Cluster.local(1))))
    thread.start()
    thread.join()
    try:
        time.sleep(0.3)
        assert len(workers_of(mark)) == 1
        assert not found[0].members["local-1"].is_lost
    finally:
        found[0].close()
    assert not marked(mark)


def test_a_coordinator_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = counted()

    def failing(*_: Any, **__: Any) -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(transport, "TcpEndpoint", failing)
    with pytest.raises(OSError, match="no more"):
        Coordinator()
    assert wait_until(lambda: counted() == before), (counted(), before)

"""Workers that die or freeze, at any moment, in a job that needs all of them: it ends soon, says who, when and how, and
leaves a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.executor import checkpoint
from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.job import workload
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import Measure, Prepare, SendState
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import LocalWorkers
from manyhands.session import session as sessions
from real_runs import assert_same, kill, names, network, piped, restart, shared, train, workers

pytestmark = pytest.mark.xdist_group("losing_workers")  # its workers are started once

HEARTBEAT_TIMEOUT_SECONDS = 6.0
ALL = 3
"""How many workers these jobs need."""
PROMPT_SECONDS = 20.0
"""Soon, on a machine that does other things too; who died, and not of silence, is said in the message."""


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with workers(3, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS) as coordinator:
        yield coordinator


@pytest.fixture
def cluster(session: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)  # one after every step
    monkeypatch.setattr(sessions, "REJOIN_SECONDS", 0.0)  # nobody is waited for
    restart(session)
    return session


def failing_after(error: list[float], what: Callable[[], Any]) -> tuple[WorkerLost, float]:
    """The error, and how long it took from the fault on."""
    with pytest.raises(WorkerLost) as found:
        what()
    assert error, "the fault did not fire"
    return found.value, time.monotonic() - error[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_run_and_it_can_go_on(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    devices = names(cluster)
    plan = shared(devices, 3, 1, 8) if kind == "samples" else piped(devices)
    fired: list[float] = []

    def at_step(step: int, loss: float, seconds: float) -> None:
        if step == 4:
            kill(cluster, devices[1])
            fired.append(time.monotonic())

    error, seconds = failing_after(
        fired, lambda: train(cluster, plan, tmp_path / "run", steps=300, on_step=at_step, epochs=1, min_devices=ALL)
    )
    assert seconds < PROMPT_SECONDS
    assert error.message.startswith(f"Worker {devices[1]} was lost at step ")
    assert 4 < int(error.message.split("at step ")[1].split(":")[0]) < 12
    assert "killed by SIGKILL" in error.message
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert str(newest) in error.hint
    loaded = checkpoint.load(newest)
    assert loaded.step >= 2
    network().load_state_dict(loaded.model)
    # Everybody else is still there: the lost one comes back, and the run goes on as if nothing had happened.
    restart(cluster)
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 30.0)
    resumed = train(cluster, plan, tmp_path / "run", steps=16, resume=True)
    assert len(resumed.result.losses) == 16
    whole = train(cluster, plan, tmp_path / "whole", steps=16)
    assert_same(resumed.state, whole.state)
    assert resumed.result.losses == whole.result.losses


@pytest.mark.slow
def test_a_frozen_worker_ends_the_run(cluster: Coordinator, tmp_path: Path) -> None:
    devices = names(cluster)
    fired: list[float] = []

    def at_step(step: int, loss: float, seconds: float) -> None:
        if step == 2:
            kill(cluster, devices[2], signal.SIGSTOP)
            fired.append(time.monotonic())

    error, seconds = failing_after(
        fired, lambda: train(cluster, shared(devices, 3, 1, 8), tmp_path, steps=300, on_step=at_step, min_devices=ALL)
    )
    assert seconds < HEARTBEAT_TIMEOUT_SECONDS + PROMPT_SECONDS
    assert f"Worker {devices[2]} was lost at step " in error.message
    assert "has sent nothing for" in error.message
    assert checkpoint.latest(tmp_path) is not None


def dying_when(
    cluster: Coordinator, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Message], *, before: bool = False
) -> list[float]:
    """The worker is killed when the coordinator says something of this kind to it."""
    fired: list[float] = []
    send = cluster.send

    def sending(to: str, message: Message, *rest: Any) -> None:
        is_it = to == name and isinstance(message, kind) and not fired
        if is_it and before:
            kill(cluster, name)
            fired.append(time.monotonic())
        send(to, message, *rest)
        if is_it and not before:
            kill(cluster, name)
            fired.append(time.monotonic())

    monkeypatch.setattr(cluster, "send", sending)
    return fired


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "when"),
    [(Measure, "when it was to measure"), (Prepare, "while it got ready"), (SendState, "")],
    ids=["measuring", "preparing", "gathering"],
)
def test_death_at_other_moments(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Message], when: str
) -> None:
    devices = names(cluster)
    fired = dying_when(cluster, monkeypatch, devices[0], kind, before=kind is SendState)
    if kind is Measure:
        monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))  # nothing is known yet
    plan = shared(devices, 3, 1, 8)
    error, seconds = failing_after(fired, lambda: train(cluster, plan, tmp_path / "run", steps=3, min_devices=ALL))
    assert seconds < PROMPT_SECONDS
    assert f"Worker {devices[0]} was lost {when}" in error.message
    assert "killed by SIGKILL" in error.message


@pytest.mark.slow
def test_who_is_lost_while_all_are_measured_is_done_without(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job that does not need all of them, and whose plan is made for who is there."""
    devices, said = names(cluster), list[str]()
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))  # nothing is known yet
    fired = dying_when(cluster, monkeypatch, devices[0], Measure)
    ran = train(cluster, "samples", tmp_path / "run", steps=3, say=said.append)
    assert fired, "the fault did not fire"
    assert set(ran.result.plan.devices) == set(devices[1:])
    assert len(ran.result.losses) == 3
    assert f"Beginning without {devices[0]}: 2 device(s) left." in said


@pytest.mark.slow
def test_no_more_are_used_than_it_may(cluster: Coordinator, tmp_path: Path) -> None:
    ran = train(cluster, "samples", tmp_path / "run", steps=2, max_devices=2)
    assert ran.result.plan.devices == names(cluster)[:2]
    with pytest.raises(mh.ManyhandsError, match="min_devices is 4; the job would begin with 3 device"):
        train(cluster, "samples", tmp_path / "more", steps=2, min_devices=4)
    with pytest.raises(mh.ManyhandsError, match="max_devices is 1; it must be at least min_devices, which is 2"):
        train(cluster, "samples", tmp_path / "none", steps=2, min_devices=2, max_devices=1)


@pytest.mark.slow
def test_a_worker_that_was_lost_before_is_named(cluster: Coordinator, tmp_path: Path) -> None:
    devices = names(cluster)
    plan = shared(devices, 3, 1, 8)

    def planned(_: Any) -> None:
        kill(cluster, devices[1])
        while not cluster.members[devices[1]].is_lost:
            time.sleep(0.01)

    with pytest.raises(WorkerLost, match=f"Worker {devices[1]} was lost before this began: killed by SIGKILL"):
        train(cluster, plan, tmp_path, steps=3, on_planned=planned, min_devices=ALL)


def test_death_while_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalWorkers.start

    def killing(self: LocalWorkers, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        next(iter(self.processes.values())).kill()

    monkeypatch.setattr(LocalWorkers, "start", killing)
    with pytest.raises(WorkerLost, match=r"Worker local-1 killed by SIGKILL before it joined"):
        Coordinator.local_cluster(mh.Cluster.local(1), logs=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"Worker local-1 ended with exit code 12 before it joined") as found:
        Coordinator.local_cluster(mh.Cluster.local(1, gpus=1), logs=tmp_path)
    assert "torch sees 0 GPU(s) of this kind here" in found.value.hint


def test_those_who_do_not_come_are_named() -> None:
    with Coordinator() as coordinator:
        with pytest.raises(TimedOut, match="waiting for pi-1") as found:
            coordinator.wait_for(["pi-1"], 0.2)
        assert coordinator.join_command() in found.value.hint
        with pytest.raises(TimedOut, match="0 of 2 have joined"):
            coordinator.wait_for(2, 0.2)


@pytest.mark.slow
def test_on_step_may_raise(cluster: Coordinator, tmp_path: Path) -> None:
    """Whatever a callback raises ends the run, and the workers are ready for the next one."""

    def at_step(step: int, loss: float, seconds: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    plan = shared(names(cluster), 3, 1, 8)
    with pytest.raises(KeyboardInterrupt):
        train(cluster, plan, tmp_path / "one", steps=100, on_step=at_step)
    assert not [thread for thread in threading.enumerate() if thread.name in ("gathering", "prefetcher")]
    train(cluster, plan, tmp_path / "two", steps=2).assert_as_planned()

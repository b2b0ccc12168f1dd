"""Real workers that are killed, stopped, sent away or started again while a job runs, and a coordinator that is too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml

from manyhands.executor import checkpoint
from manyhands.facts.errors import WorkerLost
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.job import base as job
from manyhands.runtime import collective_store
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.processes import WorkerProcess
from manyhands.runtime.shared_token import shared_token
from manyhands.session import session as sessions
from real_runs import BATCH, LAYERS, Pictures, Ran, assert_close, in_line, kill, names, restart, shared, train, workers

pytestmark = pytest.mark.xdist_group("surviving")  # its workers are started once

STEPS = 14
FAULT_STEP = 5
HEARTBEAT_TIMEOUT_SECONDS = 2.0
PROGRAM = str(Path(sys.executable).with_name("manyhands"))
At = dict[int, Callable[[], Any]]


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with workers(3, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS) as coordinator:
        yield coordinator


@pytest.fixture
def cluster(session: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    monkeypatch.setattr(sessions, "REJOIN_SECONDS", 0.5)
    restart(session)
    for name in names(session):
        session.members[name].is_leaving = False
    return session


@pytest.fixture(scope="module")
def undisturbed(session: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ran]:
    """On one device, by micro-batches."""
    folder, device = tmp_path_factory.mktemp("undisturbed"), names(session)[:1]
    found = {}
    for count in (1, 2):
        plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), device, Single()),), micro_batches=count)
        found[count] = train(session, plan, folder / str(count), steps=STEPS)
    return found


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    return shared(devices, 5, 4, 3) if kind == "samples" else in_line(devices)


def disturbed(cluster: Coordinator, plan: Plan, folder: Path, at: At, **options: Any) -> Ran:
    """Light plans keep micro-batches, over which batch norm has its statistics."""
    left = dict(at)

    def stepped(step: int, loss: float, seconds: float) -> None:
        if step in left:
            left.pop(step)()

    ran = train(cluster, plan, folder, steps=STEPS, on_step=stepped, replan="light", backup_every=2, **options)
    assert not left, "the fault did not fire"
    return ran


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == kind]


def check(ran: Ran, one: Ran) -> None:
    assert_close(ran.state, one.state)
    assert len(ran.result.losses) == STEPS
    for own, other in zip(ran.result.losses, one.result.losses):
        assert abs(own - other) <= 1e-10 * max(1.0, abs(other))


@pytest.mark.slow
@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("kind", ["samples", "pipeline"])
def test_a_killed_worker_is_done_without(
    cluster: Coordinator, undisturbed: dict[int, Ran], tmp_path: Path, kind: str
) -> None:
    devices = names(cluster)
    plan = plan_called(kind, devices)
    ran = disturbed(cluster, plan, tmp_path / "run", {FAULT_STEP: lambda: kill(cluster, devices[1])})
    check(ran, undisturbed[plan.micro_batches])
    (recovery,) = ran.result.recoveries
    assert set(recovery["devices"]) == {devices[0], devices[2]}
    assert recovery["step"] > 0  # from a copy, not from the beginning: on a busy machine copies lag behind the rounds
    (lost,) = events(tmp_path / "run", "lost")
    assert lost["devices"] == [devices[1]]
    assert "killed by SIGKILL" in lost["reason"]
    assert len(events(tmp_path / "run", "recovered")) == 1
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_is_lost_of_a_process_group(
    cluster: Coordinator, undisturbed: dict[int, Ran], tmp_path: Path, kind: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A process that is killed closes its connections; one that is stopped keeps them, and the others wait in gloo."""
    devices, stores = names(cluster), []
    store_at = collective_store.store_at
    monkeypatch.setattr(collective_store, "store_at", lambda host: stores.append(host) or store_at(host))
    plan = shared(devices, 5, 4, 3)
    at = {FAULT_STEP: lambda: kill(cluster, devices[1], kind)}
    ran = disturbed(cluster, plan, tmp_path / "run", at, collectives="torch")
    check(ran, undisturbed[1])
    (lost,) = events(tmp_path / "run", "lost")
    assert lost["devices"] == [devices[1]]
    assert stores, "no groups were formed"


@pytest.mark.slow
def test_one_lost_while_it_evaluates(cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is over: another one evaluates alone."""
    devices, fired = names(cluster), []
    evaluate_in = job.evaluate_in

    def killing(*words: Any, **keywords: Any) -> Any:
        if not fired:
            kill(cluster, devices[1])
            fired.append(time.monotonic())
        return evaluate_in(*words, **keywords)

    monkeypatch.setattr(job, "evaluate_in", killing)
    ran = train(cluster, shared(devices, 5, 4, 3), tmp_path / "run", steps=4, test=Pictures(20))
    assert fired, "the fault did not fire"
    assert ran.result.test is not None
    assert ran.result.test.samples == 20
    (lost,) = events(tmp_path / "run", "lost")
    assert lost["reason"].endswith(f"{devices[0]} evaluates alone.")


@pytest.mark.slow
def test_a_stopped_worker_is_given_up(cluster: Coordinator, undisturbed: dict[int, Ran], tmp_path: Path) -> None:
    devices, times = names(cluster), list[float]()

    def stop() -> None:
        kill(cluster, devices[2], signal.SIGSTOP)
        times.append(time.monotonic())

    with ExitStack() as stack:
        stack.callback(kill, cluster, devices[2], signal.SIGKILL)
        at: At = {FAULT_STEP: stop, FAULT_STEP + 4: lambda: times.append(time.monotonic())}
        ran = disturbed(cluster, plan_called("pipeline", devices), tmp_path / "run", at)
    check(ran, undisturbed[2])
    assert times[1] - times[0] < HEARTBEAT_TIMEOUT_SECONDS + 3.0
    assert "has sent nothing for" in events(tmp_path / "run", "lost")[0]["reason"]


@pytest.mark.slow
@pytest.mark.quick("pipeline-15")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param("samples", signal.SIGTERM, marks=pytest.mark.slow),
        ("samples", signal.SIGINT),
        ("pipeline", signal.SIGTERM),
        pytest.param("pipeline", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_asked_to_go_hands_over(
    cluster: Coordinator, undisturbed: dict[int, Ran], tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    devices = names(cluster)
    plan, process = plan_called(kind, devices), cluster.local.processes[devices[0]]

    def ask() -> None:
        kill(cluster, devices[0], number)
        until(lambda: cluster.members[devices[0]].is_leaving)

    ran = disturbed(cluster, plan, tmp_path / "run", {FAULT_STEP: ask})
    check(ran, undisturbed[plan.micro_batches])
    (recovery,) = ran.result.recoveries
    assert recovery["replayed"] == 0
    assert set(recovery["devices"]) == set(devices[1:])
    assert process.wait(10) == 0
    assert [line["device"] for line in events(tmp_path / "run", "left")] == [devices[0]]
    assert not events(tmp_path / "run", "lost")
    assert cluster.members[devices[0]].has_left


def test_the_last_goes_by_a_second_signal(cluster: Coordinator, tmp_path: Path) -> None:
    """It is needed, and says so; whoever insists has it gone at once."""
    name, *others = names(cluster)
    plan = shared((name,), BATCH)
    for other in others:
        kill(cluster, other)
    until(lambda: [one.name for one in cluster.alive()] == [name])
    process, said, fired = cluster.local.processes[name], list[str](), list[float]()

    def ask(step: int, loss: float, seconds: float) -> None:
        if step == FAULT_STEP:
            kill(cluster, name, signal.SIGINT)
            until(lambda: cluster.members[name].is_leaving)
        if not fired and any("wants to leave" in text for text in said):
            time.sleep(0.3)  # else it would be the same signal
            kill(cluster, name, signal.SIGINT)
            fired.append(time.monotonic())

    with pytest.raises(WorkerLost, match=f"Worker {name} was lost at step .*: .*exit code 130") as raised:
        train(cluster, plan, tmp_path / "run", steps=100_000, on_step=ask, say=said.append)
    assert fired, "the fault did not fire"
    assert process.wait(10) == 128 + signal.SIGINT
    assert "0 device(s) left, at least 1 needed, and no more have joined within 0.5 s" in raised.value.message
    note = f"{name} wants to leave; 0 device(s) would be left, at least 1 needed: it goes when another joins, or by a"
    assert [text for text in said if "wants to leave" in text] == [f"{note} second Ctrl-C."]
    assert [line["text"] for line in events(tmp_path / "run", "note")] == [f"{note} second Ctrl-C."]
    assert cluster.members[name].has_left


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_takes_part(
    cluster: Coordinator, undisturbed: dict[int, Ran], tmp_path: Path
) -> None:
    devices = names(cluster)
    name = devices[1]

    def again() -> None:
        cluster.local.processes.pop(name).wait(10)
        cluster.start_workers([WorkerProcess((name,))], 1, 60.0)

    at: At = {FAULT_STEP: lambda: kill(cluster, name), FAULT_STEP + 4: again}
    ran = disturbed(cluster, plan_called("samples", devices), tmp_path / "run", at)
    check(ran, undisturbed[1])
    lost, joined = ran.result.recoveries
    assert name not in lost["devices"]
    assert joined["replayed"] == 0
    assert set(joined["devices"]) == set(devices)
    assert [line["device"] for line in events(tmp_path / "run", "joined")] == [name]


# As people type it


class Typed:
    """A command in a process of its own; its words are in a file."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.log = folder / f"{name}.log"
        self.process = subprocess.Popen(
            [PROGRAM, *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, is_so: Callable[[], bool], limit_seconds: float = 90.0) -> None:
        end = time.monotonic() + limit_seconds
        while not is_so():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., Typed]]]:
    """A folder with data, a network and a plan; commands that are started in it are always ended."""
    drawn = numpy.random.default_rng(0)
    x = drawn.normal(size=(320, 8)).astype(numpy.float32)
    numpy.savez(tmp_path / "rows.npz", x=x, y=(x.sum(1) > 0).astype(numpy.int64))
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def mlp(num_classes):\n"
        "    torch.manual_seed(1)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, num_classes))\n"
    )
    stage = {"layers": [0, 2], "devices": ["left", "right"], "share": {"by": "samples", "samples": [20, 12]}}
    plan = {"network": "mine:mlp", "batch_size": 32, "stages": [stage]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with ExitStack() as stack:

        def typed(name: str, *words: str) -> Typed:
            found = Typed(tmp_path, name, *words)
            stack.callback(found.end)
            return found

        yield tmp_path, typed


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_a_coordinator_is_killed_and_started_again(
    place: tuple[Path, Callable[..., Typed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody types a token, and one worker is not told where: the household's is kept, and the coordinator found."""
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "127.0.0.1")
    folder, typed = place
    monkeypatch.setenv("MANYHANDS_HOME", str(folder / "home"))
    token = shared_token()
    where = f"127.0.0.1:{free_port()}"
    job = (
        "--listen", where, "--devices", "2", "--model", "mine:mlp", "--data", "rows.npz",
        "--plan", "plan.yaml", "--steps", "1200", "--optimizer", "SGD:lr=0.01,momentum=0.9",
    )  # fmt: skip
    told = {"left": ("--join", where), "right": ()}
    own = [
        typed(name, "worker", *words, "--name", name, "--threads", "1", "--wait", "90") for name, words in told.items()
    ]
    first = typed("first", "train", *job, "--out", "run")
    first.until(lambda: checkpoint.latest(folder / "run") is not None)
    first.end()
    kept = checkpoint.latest(folder / "run")
    assert kept is not None
    assert checkpoint.load(kept).step < 1200, "the fault did not fire"
    second = typed("second", "train", "--listen", where, "--resume", "run", "--model", "mine:mlp")
    assert second.process.wait(120) == 0, second.text
    for worker in own:
        assert worker.process.wait(30) == 0, worker.text
        assert "Waiting 90 s for it to come back" in worker.text
        assert f"Joined {where} again as" in worker.text
    for name in ("left", "right"):
        typed(f"{name}-2", "worker", "--name", name, "--threads", "1", "--wait", "90")
    whole = typed("whole", "train", *job, "--out", "whole")
    assert whole.process.wait(120) == 0, whole.text
    found = []
    for run in ("run", "whole"):
        newest = checkpoint.latest(folder / run)
        assert newest is not None
        found.append(checkpoint.load(newest))
    assert found[0].step == found[1].step == 1200
    assert_close(found[0].model, found[1].model, 1e-5)
    for path in (folder / "run").rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes(), f"{path} has the token in it"


@pytest.mark.slow
def test_one_that_waits_for_a_lost_coordinator_can_be_sent_away(place: tuple[Path, Callable[..., Typed]]) -> None:
    _, typed = place
    where = f"127.0.0.1:{free_port()}"
    worker = typed("left", "worker", "--join", where, "--token", "the secret", "--name", "left", "--wait", "90")
    train = typed("first", "train", "--listen", where, "--token", "the secret", "--devices", "2")
    train.until(lambda: "left" in train.text)
    train.end()
    worker.until(lambda: "Waiting 90 s for it" in worker.text)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(10) == 128 + signal.SIGTERM

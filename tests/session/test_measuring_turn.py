"""Trainings that begin at once on one machine: one measures at a time; what is measured beside another is coarse."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.profile import Profile
from manyhands.files.machine_lock import machine_lock
from manyhands.graph.graph import Graph
from manyhands.session import measuring_turn, quick_measuring
from manyhands.session.measuring import measure
from manyhands.session.measuring_turn import LOCK, turn_to_measure
from manyhands.session.opening import open_session
from manyhands.session.quick_measuring import measure_within
from manyhands.session.session import Session

pytestmark = pytest.mark.xdist_group("training")

BATCH = 8
LONG_ENOUGH = 60.0
"""Seconds of measuring that a run allows, so that no wait for another ends early: these networks take far less."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))


class Watch:
    """How often this process measured, and when each began. `on_wait` is called once a run finds that another
    measures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[], None]) -> None:
        self.begun: list[float] = []
        self.on_wait, self.waits = on_wait, 0
        self._real = quick_measuring.measure_quickly_on
        monkeypatch.setattr(quick_measuring, "measure_quickly_on", self._measure)
        monkeypatch.setattr(measuring_turn, "machine_lock", self._lock)

    def _lock(self, name: str, seconds: float, on_wait: Callable[[], None]) -> AbstractContextManager[bool]:
        def met_another() -> None:
            self.waits += 1
            on_wait()
            self.on_wait()

        return machine_lock(name, seconds, met_another)

    def _measure(self, *arguments: Any, **options: Any) -> Any:
        self.begun.append(time.monotonic())
        return self._real(*arguments, **options)


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def drawn() -> TensorDataset:
    return TensorDataset(torch.randn(2 * BATCH, 6), torch.randint(0, 3, (2 * BATCH,)))


def train(width: int, folder: Path) -> None:
    """Train a network of this width for two steps."""
    mh.train(
        network(width), drawn(), loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.1), batch_size=BATCH,
        steps=2, cluster=mh.Cluster.local(1), folder=folder, verify=False, profile_seconds=LONG_ENOUGH,
    )  # fmt: skip


def train_until_told(folder: Path) -> None:
    """Train as `train` does, in a process of its own that measures only when a line comes in, and print when."""
    real = quick_measuring.measure_quickly_on

    def measure(*arguments: Any, **options: Any) -> Any:
        print("measuring", flush=True)
        sys.stdin.readline()
        measured = real(*arguments, **options)
        print(time.monotonic(), flush=True)
        return measured

    quick_measuring.measure_quickly_on = measure
    train(5, folder)


@pytest.mark.slow  # a process loads PyTorch
def test_of_two_trainings_at_once_one_measures_when_the_other_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pathlib, sys, test_measuring_turn as t; t.train_until_told(pathlib.Path(sys.argv[1]))"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("MANYHANDS_LOAD_EVERYTHING", None)  # it trains once
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "other")], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        try:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == "measuring\n"

            def let_go() -> None:
                assert other.stdin is not None
                other.stdin.write("\n")
                other.stdin.flush()

            watch = Watch(monkeypatch, let_go)
            train(7, tmp_path / "this")
            ended = float(other.stdout.readline())
            assert other.wait(LONG_ENOUGH) == 0
        finally:
            other.kill()
    assert watch.waits == 1
    assert len(watch.begun) == 1
    assert watch.begun[0] >= ended, "the clocks of both are the machine's"


@pytest.fixture
def session() -> Iterator[Session]:
    with open_session(mh.Cluster.local(1), threads=1) as session:
        yield session


def small() -> Graph:
    torch.manual_seed(0)
    model, data = network(5), drawn()
    return mh.capture(model, data.tensors[0][:4], loss=functional.cross_entropy, target=data.tensors[1][:4])


@pytest.mark.slow
def test_who_waited_finds_what_the_other_measured(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, aside, graph = tmp_path / "home", tmp_path / "aside", small()
    first = measure_within(session, graph, BATCH, LONG_ENOUGH)[1]
    shutil.copytree(home, aside)
    for path in home.rglob("*.json"):
        path.unlink()
    with contextlib.ExitStack() as other:
        assert other.enter_context(machine_lock(LOCK, 0.0))

        def stored_by_the_other() -> None:
            shutil.copytree(aside, home, dirs_exist_ok=True)
            other.close()

        watch = Watch(monkeypatch, stored_by_the_other)
        assert measure_within(session, graph, BATCH, LONG_ENOUGH)[1] == first
    assert (watch.waits, watch.begun) == (1, [])


def test_what_is_measured_beside_another_is_coarse_and_measured_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring_turn, "TURNS", 0.0)
    graph = small()

    def is_coarse(profile: Profile) -> bool:
        return any(device.is_coarse for device in profile.devices.values())

    with machine_lock(LOCK, 0.0) as is_held:
        assert is_held
        assert is_coarse(measure_within(session, graph, BATCH, LONG_ENOUGH)[1])
        assert is_coarse(measure(session, graph, BATCH, seconds=0.1)[1])
    assert not is_coarse(measure(session, graph, BATCH, seconds=0.1)[1]), "the stored one does not do"
    assert not is_coarse(measure_within(session, graph, BATCH, LONG_ENOUGH)[1])


class _Session:
    def __init__(self, is_local: bool) -> None:
        self.is_local = is_local


def test_who_waits_says_so_and_only_local_workers_are_waited_for() -> None:
    said: list[str] = []
    local: Any
    local, joined = _Session(True), _Session(False)
    with turn_to_measure(local, 0.0, said.append) as is_alone:
        assert is_alone
        with turn_to_measure(local, 0.0, said.append) as is_alone:
            assert not is_alone
        assert len(said) == 1
        with turn_to_measure(joined, 60.0, said.append) as is_alone:  # type: ignore[arg-type]
            assert is_alone
    assert len(said) == 1
    with turn_to_measure(joined, 60.0, said.append), turn_to_measure(local, 0.0) as is_alone:  # type: ignore[arg-type]
        assert not is_alone, "others wait for a run with joined workers all the same"

"""The run folder: complete, valid at any moment, and enough to go on from."""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

import manyhands as mh
from manyhands.executor import checkpoint_files
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.errors import BadFile, BadPlan, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import read_document
from manyhands.job import base as job
from manyhands.job import workload
from manyhands.observe.recent import recent_runs
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.record import RunRecord
from manyhands.training import train as training
from manyhands.training.config import TrainConfig
from real_runs import ADAM, BATCH, SGD, Pictures, assert_same, names, network, piped, shared, train, workers

pytestmark = pytest.mark.xdist_group("run_folder")  # its workers are started once

FILES = {"config.yaml", "cluster.yaml", "profile.json", "plan.yaml", "events.jsonl", "metrics.csv", "devices.json"}
PICTURES = {"loss.png", "memory.png", "timeline.png", "utilisation.png"}


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with workers(3, pictures=True) as coordinator:
        yield coordinator


@pytest.fixture
def cluster(session: Coordinator, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    if "moment" not in request.node.name:
        monkeypatch.setattr(job.Job, "write_pictures", lambda *_: None)
    return session


def read_all(folder: Path) -> set[str]:
    """Read every file to its end, as somebody may at any moment; which there are."""
    found = set()
    paths = [Path(where) / name for where, _, names in os.walk(folder) for name in names]
    for path in paths:
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            content = path.read_bytes()
            _check(path, content)
        except FileNotFoundError:
            assert "step-" in str(path), path  # an old checkpoint went meanwhile
            continue
        found.add(path.name)
    return found


def _check(path: Path, content: bytes) -> None:
    if path.suffix == ".yaml":
        assert isinstance(yaml.safe_load(content), dict), path
    elif path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".jsonl":
        assert content == b"" or content.endswith(b"\n")
        assert all("event" in json.loads(line) for line in content.splitlines())
    elif path.suffix == ".csv":
        if content:  # the first line is written a moment after the file is made
            assert content.endswith(b"\n")
            rows = list(csv.DictReader(content.decode().splitlines()))
            assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    elif path.suffix == ".png":
        with Image.open(path) as picture:
            picture.verify()
    elif path.suffix == ".safetensors":
        load_file(path)


@pytest.mark.slow
def test_every_file_is_valid_at_any_moment(
    cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)
    folder, problems, is_over = tmp_path / "run", [], threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not is_over.is_set():
            try:
                if folder.exists():
                    read_all(folder)
                    looks += 1
            except Exception as error:
                problems.append(repr(error))
            time.sleep(0.002)

    def at_step(step: int, loss: float, seconds: float) -> None:
        """Goes on once somebody has looked: however busy the machine is, there is a look at every step."""
        before, end = looks, time.monotonic() + 10
        while looks == before and not problems and time.monotonic() < end:
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        ran = train(cluster, piped(names(cluster)), folder, steps=30, test=Pictures(20), on_step=at_step)
    finally:
        is_over.set()
        thread.join()
    assert not problems, problems[:3]
    assert looks > 10
    assert read_all(folder) >= FILES | PICTURES | {"trace.json", checkpoint_files.MODEL_FILE}
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    said = [event for event in events if event != "note"]  # on a busy machine, that a prediction was off
    assert [said[0], *said[-2:]] == ["started", "evaluated", "finished"]
    assert len(list((folder / "checkpoints").iterdir())) == 3
    fresh = network()
    fresh.load_state_dict(load_file(ran.result.checkpoint / checkpoint_files.MODEL_FILE))
    assert_same(fresh.state_dict(), ran.state)
    assert ran.result.accuracy is not None
    assert ran.result.throughput > 0
    assert mh.read_plan(folder / "plan.yaml", ran.planned.network) == ran.result.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [SGD, pytest.param(Optimizer("Adam", lr=1e-3, betas=(0.8, 0.9)), marks=pytest.mark.slow)],
    ids=lambda one: one.name,
)
def test_resuming_gives_the_same_bits(cluster: Coordinator, tmp_path: Path, optimizer: Optimizer) -> None:
    """With shuffling, dropout, momenta and a learning-rate schedule."""
    plan = piped(names(cluster))
    whole = train(cluster, plan, tmp_path / "whole", steps=14, optimizer=optimizer)
    first = train(cluster, plan, tmp_path / "parts", steps=5, optimizer=optimizer)
    assert recent_runs()[:2] == [tmp_path / "parts", tmp_path / "whole"], "status finds them wherever they are"
    assert len(first.result.losses) == 5
    second = train(cluster, plan, tmp_path / "parts", steps=14, optimizer=optimizer, resume=True)
    assert_same(second.state, whole.state)
    assert second.result.losses == whole.result.losses
    second.assert_as_planned()
    assert second.result.steps == 9


@pytest.mark.slow
def test_a_run_keeps_its_plan(cluster: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured again it might get another one, and round otherwise."""
    before: list[PlannedRun] = []
    train(cluster, "samples", tmp_path, steps=2, on_planned=before.append)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(training, "measure_within", never)
    ran = train(cluster, "samples", tmp_path, steps=4, resume=tmp_path)
    assert ran.result.plan == before[0].plan
    with pytest.raises(AssertionError, match="measured again"):
        train(cluster, "pipeline", tmp_path, steps=6, resume=True)


@pytest.mark.slow
def test_what_a_run_cannot_go_on_with(cluster: Coordinator, tmp_path: Path) -> None:
    plan, folder = shared(names(cluster), 3, 1, 8), tmp_path / "run"
    train(cluster, plan, folder, steps=2)
    with pytest.raises(BadFile, match="holds another run already"):
        train(cluster, plan, folder, steps=2)
    for changed in ({"seed": 6}, {"optimizer": ADAM}, {"shuffle": False}, {"data": Pictures(5 * BATCH)}):
        with pytest.raises(BadValue, match="would not go on as it was"):
            train(cluster, plan, folder, steps=4, resume=True, **changed)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="2 of 2 steps: there is nothing to go on with") as error:
        train(cluster, plan, folder, steps=2, resume=True)
    assert "steps= (" in error.value.hint
    with pytest.raises(BadFile, match="no such run folder"):
        train(cluster, plan, folder, steps=2, resume=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="no complete checkpoint"):
        train(cluster, plan, tmp_path / "empty", resume=True)
    with pytest.raises(BadValue, match="needs the folder"):
        mh.train(network(), Pictures(), loss=functional.cross_entropy, optimizer=SGD, batch_size=BATCH, resume=True)
    with pytest.raises(BadPlan, match="batch_norm is 'local'; the plan's is 'synchronised'"):
        train(cluster, plan, tmp_path / "norm", steps=2, batch_norm="local")


def test_steps_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    for step in range(5):
        record.step(step, 0, 0.5 + step, 0.1, 12)
    record.close()
    for done in (3, 0):  # 0: it ended before its first checkpoint of a step
        again = RunRecord(tmp_path, steps_done=done)
        assert again.losses() == [0.5 + step for step in range(done)]
        again.close()


def test_epochs_and_seconds_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(batch_size=BATCH)
    options = workload.Workload(network(), Pictures(), functional.cross_entropy, SGD, config)
    assert options.order.steps_per_epoch == 6
    assert options.checkpoint_steps(100.0, 0) == 1
    assert options.checkpoint_steps(10.0, 0) == 3
    assert options.checkpoint_steps(0.5, 0) == 6
    assert options.checkpoint_steps(0.1, 0) == 12  # short epochs: at least a second apart
    assert options.checkpoint_steps(0.0, 0) > 1000
    assert options.checkpoint_steps(0.1, 50_000_000) == 102  # 10 s for 50 MB of weights
    assert options.checkpoint_steps(0.1, 10**12) == 300  # at most 30 s are lost


@pytest.mark.slow
def test_what_was_decided_can_be_read_by_people(cluster: Coordinator, tmp_path: Path) -> None:
    train(cluster, shared(names(cluster), 3, 1, 8), tmp_path, steps=2)
    config = read_document(tmp_path / "config.yaml")
    assert isinstance(config, dict)
    assert config["batch_size"] == BATCH
    assert config["plan"] == "given"
    assert config["optimizer"]["name"] == "SGD"

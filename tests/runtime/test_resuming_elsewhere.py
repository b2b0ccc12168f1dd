"""A run goes on with another number of workers and another plan, to the weights of a run that never stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.executor import checkpoint
from manyhands.facts.errors import BadFile
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.job import workload
from manyhands.runtime.coordinator import Coordinator
from manyhands.session.session import Session
from manyhands.training import train as training
from real_runs import BATCH, LAYERS, Ran, assert_close, assert_same, names, shared, train, workers

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resuming_elsewhere")]  # its workers are started once

STEPS = 8


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, Coordinator]]:
    """Clusters of three workers, of two and of one, each measured once."""
    real, known = training.measure_who_stays, dict[tuple[str, ...], Any]()

    def measure(session: Session, *words: Any, **named: Any) -> Any:
        if session.cluster.names not in known:
            known[session.cluster.names] = real(session, *words, **named)
        return known[session.cluster.names]

    with (
        pytest.MonkeyPatch.context() as patch,
        workers(3) as three,
        workers(2) as two,
        workers(1) as one,
    ):
        patch.setattr(training, "measure_who_stays", measure)
        yield {3: three, 2: two, 1: one}


def plan_called(kind: str, devices: tuple[str, ...]) -> Plan:
    """Whole batches in all of them: batch norm takes its statistics over the same samples."""
    first, rest = (0, 2), Stage((2, LAYERS), devices[-1:], Single())
    if len(devices) == 1:
        return shared(devices, BATCH)
    if kind == "samples":
        return shared(devices, *((5, 4, 3) if len(devices) == 3 else (5, 7)))
    if kind == "pipeline":
        stage = Stage(first, devices[:-1], BySamples((5, 7)) if len(devices) == 3 else Single())
        return Plan("Sequential", BATCH, (stage, rest))
    stage = Stage(first, devices, ByTiles((2, 1, 1) if len(devices) == 3 else (3, 1)))
    return Plan("Sequential", BATCH, (stage, rest), order="sequential")


@pytest.fixture(scope="module")
def whole(clusters: dict[int, Coordinator], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that never stopped."""
    return train(clusters[1], shared(names(clusters[1]), BATCH), tmp_path_factory.mktemp("whole"), steps=STEPS)


def test_the_same_weights_wherever_it_goes_on(clusters: dict[int, Coordinator], whole: Ran, tmp_path: Path) -> None:
    """Three workers by samples, two as a pipeline, one, three by tiles: with momentum and a schedule."""
    way = [(3, "samples"), (2, "pipeline"), (1, "single"), (3, "tiles")]
    for place, (count, kind) in enumerate(way):
        plan, steps = plan_called(kind, names(clusters[count])), (place + 1) * STEPS // len(way)
        ran = train(clusters[count], plan, tmp_path / "way", steps=steps, resume=place > 0)
        ran.assert_as_planned()
        assert set(ran.result.logs) == set(names(clusters[count]))
        assert ran.result.steps == STEPS // len(way)
    assert_close(ran.state, whole.state)
    assert ran.result.losses == pytest.approx(whole.result.losses, rel=1e-10)


def test_from_three_workers_to_fewer(clusters: dict[int, Coordinator], whole: Ran, tmp_path: Path) -> None:
    train(clusters[3], plan_called("pipeline", names(clusters[3])), tmp_path / "three", steps=3)
    for count, kind in ((2, "tiles"), (2, "samples"), (1, "single")):
        folder, plan = tmp_path / f"{kind} of {count}", plan_called(kind, names(clusters[count]))
        shutil.copytree(tmp_path / "three", folder)
        ran = train(clusters[count], plan, folder, steps=STEPS, resume=True)
        ran.assert_as_planned()
        assert_close(ran.state, whole.state)
        assert ran.result.losses == pytest.approx(whole.result.losses, rel=1e-10)


def damage(path: Path, kind: str) -> str:
    """Spoil a checkpoint; what is to be said about it."""
    model = path / checkpoint.MODEL_FILE
    if kind == "cut short":
        os.truncate(model, model.stat().st_size - 7)
        return f"{model}: "
    if kind == "changed":
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
        return f"{model}: its SHA-256 is "
    state = path / checkpoint.STATE_FILE
    state.write_text(state.read_text().replace('"seed": 5', '"seed": 6'))
    return f"{state}: the SHA-256 of its values is "


def test_a_broken_newest_checkpoint_is_passed_over(
    clusters: dict[int, Coordinator], whole: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, in the events too, and the one before gives the same bits."""
    monkeypatch.setattr(workload, "CHECKPOINT_SECONDS", 0.0)  # one at every step
    plan = shared(names(clusters[1]), BATCH)
    train(clusters[1], plan, tmp_path / "run", steps=4)
    for kind in ("cut short", "changed", "state changed"):
        folder, said = tmp_path / kind, list[str]()
        shutil.copytree(tmp_path / "run", folder)
        wrong = damage(folder / "checkpoints/step-000004", kind)
        workload.resumed_from(folder, True, said.append)
        assert len(said) == 1
        assert said[0].startswith(wrong)
        assert said[0].endswith(f"the checkpoint before is used: {folder / 'checkpoints/step-000003'}, of step 3.")
    ran = train(clusters[1], plan, folder, steps=STEPS, resume=True)
    assert_same(ran.state, whole.state)
    assert ran.result.losses == whole.result.losses
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "broken checkpoint"]
    assert told["message"].startswith(wrong)
    assert told["used_step"] == 3
    newest = checkpoint.load_newest(folder)
    assert newest is not None
    assert newest.note == ""  # the broken one was replaced when its step came again


def test_when_every_checkpoint_is_broken(clusters: dict[int, Coordinator], tmp_path: Path) -> None:
    plan = shared(names(clusters[1]), BATCH)
    train(clusters[1], plan, tmp_path, steps=2)
    wrong = [damage(path, "changed") for path in sorted((tmp_path / "checkpoints").iterdir())]
    with pytest.raises(BadFile, match=rf"checkpoints: none of {len(wrong)} checkpoint\(s\) can be read") as caught:
        train(clusters[1], plan, tmp_path, steps=4, resume=True)
    assert len(wrong) > 1
    assert all(one in caught.value.message for one in wrong)
    assert "start anew" in caught.value.hint
    with pytest.raises(BadFile, match="holds another run already"):
        train(clusters[1], plan, tmp_path, steps=4)

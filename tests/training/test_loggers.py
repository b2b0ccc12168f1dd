"""Runs as Weights & Biases and MLflow have them, without a network; and what is said where they are not installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.facts.errors import NotInstalled
from manyhands.job.callback_list import CallbackList, RunFacts
from manyhands.runtime.validating import CheckpointRequests

STEPS = 4


def play(callback: mh.Callback, folder: Path, *, first: int = 0, state: Any = None, steps: int = STEPS) -> Any:
    """Call it as a run of some steps does, with a validation after every second; return its state at the end."""
    facts = RunFacts(folder, first, steps, 2, ("loss",), lambda step: 0.1 / (step + 1))
    callbacks = CallbackList([callback], (), facts, CheckpointRequests())
    if state is not None:
        callbacks.load(state["callbacks"], None)
    callbacks.start()
    for step in range(first, steps):
        callbacks.stepped(step, 1.0 / (step + 1), 0.25)
        if step % 2:
            callbacks.validated_at(step + 1, {"loss": 2.0 / (step + 1), "auc": float("nan")})
    document = callbacks.document_after(steps)
    callbacks.end()
    assert callbacks.failure is None
    return document


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "run").mkdir()
    logged: list[tuple[dict[str, float], int]] = []
    callback = mh.WandB("tests", mode="offline")
    started = callback.on_start

    def start(context: mh.CallbackContext) -> None:
        started(context)
        real: Callable[..., None] = callback._run.log

        def log(values: dict[str, float], step: int) -> None:
            logged.append((values, step))
            real(values, step=step)

        monkeypatch.setattr(callback._run, "log", log)

    monkeypatch.setattr(callback, "on_start", start)
    state = play(callback, tmp_path / "run")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert logged[1] == ({"loss": 0.5, "seconds": 0.25, "learning_rate": 0.05, "epoch": 0}, 1)
    assert logged[2] == ({"validation/loss": 1.0}, 1)
    again = mh.WandB("tests", mode="offline")
    assert play(again, tmp_path / "run", first=STEPS, steps=STEPS + 2, state=state) == {
        "callbacks": {**state["callbacks"], "validated": STEPS + 2}
    }


def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "mlruns").as_uri()
    (tmp_path / "run").mkdir()
    state = play(mh.MLflow("tests", tracking_uri=where), tmp_path / "run")
    play(mh.MLflow("tests", tracking_uri=where), tmp_path / "run", first=STEPS, steps=STEPS + 2, state=state)
    client = mlflow.MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in losses] == [(step, 1.0 / (step + 1)) for step in range(STEPS + 2)]
    validations = client.get_metric_history(run.info.run_id, "validation/loss")
    assert [(point.step, point.value) for point in validations] == [(1, 1.0), (3, 0.5), (5, 2.0 / 6)]


@pytest.mark.parametrize(("make", "module"), [(lambda: mh.WandB(), "wandb"), (lambda: mh.MLflow(), "mlflow")])
def test_what_is_missing_says_how_to_install_it(
    make: Callable[[], mh.Callback], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalled, match=f"needs {module}, which is not installed") as raised:
        make()
    assert raised.value.hint == f"Type: pip install 'manyhands[{module}]'"


def test_state_is_plain_data(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    state = play(mh.CSV(tmp_path / "all.csv"), tmp_path / "run")
    assert json.loads(json.dumps(state)) == state

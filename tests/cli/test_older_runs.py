"""A run that version 0.2.0 was stopped in the middle of, with its plan and its checkpoint: it goes on today."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from forking import run_command
from safetensors.torch import load_file

from manyhands.cli.main import whole_app
from manyhands.plans.networks import load_network
from manyhands.plans.planning import read_plan

STORED = Path(__file__).parents[1] / "job" / "stored_0_2_0" / "run"
STEPS, DONE = 60, 14


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run after it went on to its end."""
    run = tmp_path_factory.mktemp("older") / "run"
    shutil.copytree(STORED, run)
    result = run_command("train", "--resume", str(run), "--dashboard", "off")
    assert result.returncode == 0, result.stderr
    return run


def test_a_run_of_0_2_0_goes_on_to_its_end(resumed: Path) -> None:
    rows = [*csv.reader((resumed / "metrics.csv").read_text().splitlines())][1:]
    assert [int(row[0]) for row in rows] == [*range(STEPS)]
    losses = [float(row[2]) for row in rows]
    assert max(losses[DONE : DONE + 5]) < losses[0], "it goes on from what was learnt"
    assert distance(weights(resumed, STEPS), weights(STORED, DONE)) > 0


@pytest.mark.slow
def test_a_run_of_0_2_0_ends_with_the_weights_of_an_uninterrupted_one(resumed: Path, tmp_path: Path) -> None:
    words = f"--steps {STEPS} --share pipeline --cluster local:2 -b 128 --optimizer SGD:lr=0.05 --micro-batches 4"
    again = run_command("train", *words.split(), "--dashboard", "off", "--out", str(tmp_path / "whole"))
    assert again.returncode == 0, again.stderr
    ours, theirs, before = weights(resumed, STEPS), weights(tmp_path / "whole", STEPS), weights(STORED, DONE)
    assert ours.keys() == theirs.keys()
    moved, apart = distance(theirs, before), distance(theirs, ours)
    assert apart < moved / 20, "other kernels, perhaps of another machine, round in another way; the path is the same"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{step:06}/model.safetensors")


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    floats = [name for name, tensor in some.items() if tensor.is_floating_point()]
    return sum(float((some[name] - others[name]).square().sum()) for name in floats) ** 0.5


def test_a_plan_of_0_2_0_is_read() -> None:
    plan = read_plan(STORED / "plan.yaml", load_network("tiny"))
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, 5)]


def test_a_run_of_0_2_0_is_shown(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    shutil.copytree(STORED, tmp_path / "run")
    shown = CliRunner().invoke(whole_app(), ["status", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert f"{DONE}" in shown.output

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


@pytest.mark.xdist_group("older runs")
def test_a_run_of_0_2_0_goes_on_to_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(STORED, run)
    resumed = run_command("train", "--resume", str(run), "--dashboard", "off")
    assert resumed.returncode == 0, resumed.stderr
    words = f"--steps {STEPS} --share pipeline --cluster local:2 -b 128 --optimizer SGD:lr=0.05 --micro-batches 4"
    again = run_command("train", *words.split(), "--dashboard", "off", "--out", str(whole))
    assert again.returncode == 0, again.stderr
    assert len([*csv.reader((run / "metrics.csv").read_text().splitlines())]) == STEPS + 1
    last = f"checkpoints/step-{STEPS:06}/model.safetensors"
    ours, theirs = load_file(run / last), load_file(whole / last)
    assert ours.keys() == theirs.keys()
    before = load_file(STORED / f"checkpoints/step-{DONE:06}/model.safetensors")
    moved, apart = distance(theirs, before), distance(theirs, ours)
    assert apart < moved / 20, "other kernels, perhaps of another machine, round in another way; the path is the same"


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

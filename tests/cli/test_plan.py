"""`manyhands plan --share tiles --grid --costs`: the paper's groups, as a user types it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from forking import run_command

pytestmark = pytest.mark.xdist_group("commands")  # one process divides for all of them
YOLO = ("--model", "yolov2-16", "--input", "3x608x608")
NINE = ("--share", "tiles", "--grid", "3x3")


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("plan", *words)


def plan_json(*words: str) -> Any:
    result = plan(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_communication_alone_gives_the_papers_five_groups() -> None:
    shown = plan_json(*YOLO, *NINE, "--costs", "0,1,0")
    assert len(shown["forward_groups"]) == 5
    assert len(shown["layers"]) == 16
    assert sum(layer["kind"] == "pooling" for layer in shown["layers"]) == 4
    assert shown["forward_cost"] < shown["forward_cost_every_layer"] < shown["forward_cost_one_group"]
    assert shown["backward_cost"] < shown["backward_cost_one_group"] < shown["backward_cost_every_layer"]
    assert shown["forward_group_names"] == [shown["layers"][start]["name"] for start in shown["forward_groups"]]
    assert shown["granularity"] == "blocks"
    assert shown["costs"] == {"computation": 0, "communication": 1, "fixed": 0}


def test_computation_alone_costs_what_every_layer_costs() -> None:
    shown = plan_json(*YOLO, *NINE, "--costs", "1,0,0")
    for way in ("forward", "backward"):
        assert shown[f"{way}_cost"] == shown[f"{way}_cost_every_layer"] < shown[f"{way}_cost_one_group"]
    inside = [name for name in shown["forward_plan_groups"] if isinstance(name, str)]
    assert inside  # poolings inside a block
    assert {name for layer in shown["layers"] for name in layer["operators"]} >= set(inside)


def test_table() -> None:
    shown = plan(*YOLO, *NINE, "--costs", "0,1,0")
    assert shown.returncode == 0, shown.stderr
    for words in ("85,228", "189,036", "99,404", "0, 8, 10, 12, 14", "16, 14, 12", "15.0", "208x208"):
        assert words in shown.stdout


@pytest.mark.quick(every=17)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*NINE, "--costs", "0,1"], "'0,1' is not three numbers"),
        ([*NINE, "--costs", "0,1,0,0"], "'0,1,0,0' is not three numbers"),
        ([*NINE, "--costs", "0,-1,0"], "'0,-1,0' is not three numbers"),
        ([*NINE, "--costs", "0,nan,0"], "'0,nan,0' is not three numbers"),
        ([*NINE, "--costs", "inf,1,0"], "computation cost is inf"),
        ([*NINE, "--costs", "a,b,c"], "'a,b,c' is not three numbers"),
        ([*NINE, "--costs", ""], "'' is not three numbers"),
        (["--share", "tiles", "--grid", "3", "--costs", "0,1,0"], "'3' is not a grid"),
        (["--share", "tiles", "--grid", "0x3", "--costs", "0,1,0"], "'0x3' is not a grid"),
        (["--share", "tiles", "--grid", "3x3x3x3", "--costs", "0,1,0"], "'3x3x3x3' is not a grid"),
        (["--share", "tiles", "--grid", "3x3x3", "--costs", "0,1,0"], "--grid 3x3x3 cuts a depth too"),
        (["--share", "tiles", "--costs", "0,1,0"], "no --grid"),
        (["--share", "samples", "--grid", "3x3", "--costs", "0,1,0"], "--share samples"),
        (["--grid", "3x3", "--costs", "0,1,0"], "--share auto"),
        (["--share", "tiles", "--grid", "3x40", "--costs", "0,1,0"], "3x40: 40 columns of tiles"),
        (["--share", "tiles", "--grid", "700x700", "--costs", "0,1,0"], "38 rows, the image 608"),
        ([*NINE, "--costs", "0,1,0", "--out", "plan.yaml", "--schedule"], "--out and --schedule cannot be given"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    result = plan(*YOLO, *words)
    assert result.returncode == 10, result.stderr
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_network_that_is_no_chain() -> None:
    result = plan("-m", "resnet18", *NINE, "--costs", "0,1,0")
    assert result.returncode == 10
    assert "chains" in result.stderr
    assert "resnet18" in result.stderr

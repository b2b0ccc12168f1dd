"""A graph whose operators are called wrongly is refused, by whoever loads it and by a worker, and ends no process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.facts.errors import BadGraph
from manyhands.facts.network import WeightSpec
from manyhands.graph.argument_rules import guarded
from manyhands.graph.check import check_weights
from security.hostile_calls import CASES

pytestmark = pytest.mark.slow  # processes of their own for each test


@pytest.fixture(scope="module")
def endings() -> dict[tuple[str, str], str]:
    """(what is wrong, how it came) -> how its process ended."""
    program = [sys.executable, str(Path(__file__).with_name("hostile_calls.py"))]
    found = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return {(what, way): ending for what, way, ending in map(json.loads, found.stdout.splitlines())}


@pytest.mark.parametrize("way", ["by_file", "by_wire"])
def test_wrong_calls_are_refused(way: str, endings: dict[tuple[str, str], str]) -> None:
    assert endings["valid", way] == "taken"
    for what in CASES:
        assert endings[what, way].startswith("refused: "), (what, endings[what, way])
        assert "'one'" in endings[what, way], "it says which node"


def test_what_is_wrong_is_said(endings: dict[tuple[str, str], str]) -> None:
    assert "must be torch.float32 [12, 3]" in endings["a weight of another shape", "by_file"]
    assert (
        "argument 'dtype' of aten.to.dtype is 999; it must be ScalarType"
        in endings["a dtype that does not exist", "by_file"]
    )
    assert "key and value as many" in endings["fewer keys than values", "by_wire"]


def test_kernels_that_do_not_look_are_guarded_at_every_call(endings: dict[tuple[str, str], str]) -> None:
    """Where a plan or a description that lies brings other tensors than the graph says."""
    for what in ("a weight of another shape", "fewer keys than values"):
        assert endings[what, "unchecked"].startswith("refused: "), endings[what, "unchecked"]


def test_the_smallest_integer_is_not_divided_by_minus_one() -> None:
    divide = guarded("aten.floor_divide.default", torch.ops.aten.floor_divide.default)
    smallest = torch.tensor([-(2**63), 4])
    assert divide(smallest, torch.tensor(2)).tolist() == [-(2**62), 2]
    assert divide(torch.tensor([-5, 4]), torch.tensor(-1)).tolist() == [5, -4]
    with pytest.raises(BadGraph, match="divided by -1"):
        divide(smallest, torch.tensor([1, -1]))


def test_a_worker_takes_weights_of_the_graph_only() -> None:
    expected = {"a": WeightSpec("a", (2, 3), "float32", True)}
    check_weights(expected, {})
    check_weights(expected, {"a": torch.ones(2, 3)})
    for wrong in ({"b": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, {"a": torch.ones(2, 3, dtype=torch.float64)}):
        with pytest.raises(BadGraph, match="Weight"):
            check_weights(expected, wrong)

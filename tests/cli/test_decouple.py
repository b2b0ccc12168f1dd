"""`manyhands decouple`, and decoupled models by name in other commands."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import whole_app
from manyhands.facts.errors import BadValue, CaptureFailed


def run(*words: str) -> str:
    result = CliRunner().invoke(whole_app(), list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.slow
def test_before_and_after() -> None:
    told = json.loads(run("decouple", "-m", "resnet18", "--json"))
    assert told["before"]["parameters"] == 11_689_512
    assert told["after"]["weight_bytes"] < 0.7 * told["before"]["weight_bytes"]
    assert told["moved_bytes"] == sum(one["bytes"] for one in told["shuffles"]) * 3 // 4
    shown = run("decouple", "-m", "resnet18", "--widen", "1.75", "--groups", "2", "--shuffles", "all")
    assert "2 groups, 8 shuffle(s), widened 1.75 times" in shown
    assert "stem.0: reads the network's input (3 channels)" in shown
    assert "stages.3.0.residual.3" in shown


def test_room_for_fewer() -> None:
    shown = run("decouple", "-m", "tiny")
    assert "There is room for 1 shuffle(s), not 3." in shown
    assert "Not widened: features.8 (64 outputs: flattened before a linear layer)." in shown


@pytest.mark.slow
def test_layers_of_a_decoupled_model() -> None:
    told = json.loads(run("models", "decoupled,groups=2:tiny", "--json"))
    assert told["parameters"] == 36_594
    assert told["name"] == "decoupled,groups=2:tiny"


def test_refusals() -> None:
    with pytest.raises(CaptureFailed, match="no convolution"):
        run("decouple", "-m", "bert-small")
    with pytest.raises(BadValue, match="some"):
        run("decouple", "-m", "tiny", "--shuffles", "some")

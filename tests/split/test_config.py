"""A split as typed: presets, learning rates, what a run may go on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.data.data_sets import DataSets
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.facts.hyper import hyper
from manyhands.facts.optimizer import parse
from manyhands.split.arguments import split_config
from manyhands.split.config import OPTIMIZER, SplitConfig
from manyhands.split.presets import optimizer_of, preset_of


def data(kind: str) -> DataSets:
    return DataSets("drawn", [], None, 10, (3, 32, 32), (), kind=kind)  # type: ignore[arg-type]


def test_presets_are_known_by_model_and_data() -> None:
    config = SplitConfig(model="resnet50", data="folder", preset=True)
    found = preset_of(config, data("cifar10"))
    assert found == hyper("resnet50", "cifar10")
    assert preset_of(dataclasses.replace(config, preset=False), data("cifar10")) is None
    with pytest.raises(UnknownName, match="resnet50 on digits"):
        preset_of(config, data("digits"))


def test_what_is_typed_goes_before_the_preset() -> None:
    paper = hyper("resnet50", "cifar10")
    assert optimizer_of(SplitConfig(), None, 10) == parse(OPTIMIZER)
    assert optimizer_of(SplitConfig(), paper, 10) == parse(paper.optimizer_text(10))
    assert optimizer_of(SplitConfig(optimizer="Adam:lr=1e-3"), paper, 10) == parse("Adam:lr=1e-3")
    slower = optimizer_of(SplitConfig(lr=0.01), paper, 10)
    assert slower.options == {**parse(paper.optimizer_text(10)).options, "lr": 0.01}
    assert slower.schedule == parse(paper.optimizer_text(10)).schedule


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0}, {"steps": 0}, {"batch_size": 0}, {"seed": -1}, {"epochs": 1, "steps": 1}, {"lr": 0.0},
        {"lr": float("inf")}, {"edge_slowdown": 0.9}, {"server_slowdown": float("nan")}, {"k": "x"}, {"bits": "1"},
        {"mode": "x"}, {"labels": "x"}, {"edge_side": "x"}, {"rival": "x"}, {"optimizer": "1"}, {"trace": "/nowhere"},
        {"memory_bytes": "x"}, {"delay_seconds": "x"}, {"calibrate_seconds": -1.0},
        {"allowed_drop": 0.0}, {"allowed_drop": 1.0},
        {"model": "nothing"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ManyhandsError):
        SplitConfig(**wrong, is_command=True)


def test_a_run_goes_on_as_it_was(tmp_path: Path) -> None:
    first = split_config({"model": "tiny", "k": "2", "batch_size": 8, "epochs": 3})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"split_wish": first.document()}))
    resume = str(tmp_path)
    first = dataclasses.replace(first, resume=resume, freeze="0")
    assert split_config({"model": None, "k": None, "resume": resume}) == first
    longer = split_config({"steps": 50, "k": "0", "resume": resume})
    assert longer == dataclasses.replace(first, steps=50, epochs=None, k="0")
    with pytest.raises(BadValue, match="--batch-size 8"):
        split_config({"batch_size": 16, "resume": resume})
    with pytest.raises(BadValue, match="names another"):
        split_config({"resume": resume, "folder": "elsewhere"})
    (tmp_path / "config.yaml").write_text("[]")
    with pytest.raises(BadValue, match="not started by manyhands split train"):
        split_config({"resume": resume})
    with pytest.raises(BadFile, match="no such run folder"):
        split_config({"resume": str(tmp_path / "nowhere")})
    with pytest.raises(BadFile, match="holds a run already") as caught:
        split_config({"folder": resume})
    assert "manyhands split train --resume" in caught.value.hint

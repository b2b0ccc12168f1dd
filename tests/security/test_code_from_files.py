"""A plan, a run's folder or a file beside you chooses no code that you run: only a name that you type does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.facts.errors import BadFile
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.files.documents import write_document
from manyhands.inference.model import RunNames, _same_model
from manyhands.job.resuming import resume_command
from manyhands.models.registry import build, from_file
from manyhands.split.arguments import split_config
from manyhands.training.arguments import train_config

HOSTILE = """from pathlib import Path

Path({marker!r}).write_text("it ran")


def make(**options):
    from torch import nn

    return nn.Flatten()
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code of the hostile module would leave its mark; the module lies in the current folder."""
    found = tmp_path / "it-ran"
    (tmp_path / "hostile_beside.py").write_text(HOSTILE.format(marker=str(found)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "hostile_beside", raising=False)
    return found


def by_plan(folder: Path, model: str, /, **typed: Any) -> Any:
    write_document(folder / "plan.yaml", Plan(model, 4, (Stage((0, 1), ("local-1",), Single()),)).to_dict())
    return train_config({**typed, "plan": "plan.yaml"})


def by_run(folder: Path, model: str, /, **typed: Any) -> Any:
    (folder / "run").mkdir(exist_ok=True)
    write_document(folder / "run" / "config.yaml", {"wish": {"model": model}})
    return train_config({**typed, "resume": "run"})


def by_split_run(folder: Path, model: str, /, **typed: Any) -> Any:
    (folder / "run").mkdir(exist_ok=True)
    write_document(folder / "run" / "config.yaml", {"split_wish": {"model": model}})
    return split_config({**typed, "resume": "run"})


WAYS: dict[str, Callable[..., Any]] = {"plan": by_plan, "run": by_run, "split": by_split_run}


MODELS = (
    "hostile_beside:make", "decoupled:hostile_beside:make", "os:system", "hostile_beside.py:make",
    "./hostile_beside.py:make", "decoupled:hostile_beside.py:make",
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_names_in_files_are_not_imported(tmp_path: Path, marker: Path, way: str, model: str) -> None:
    with pytest.raises(BadFile, match="names the model") as refused:
        WAYS[way](tmp_path, model)
    assert f"--model {model}" in refused.value.hint
    assert not marker.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_was_typed_is_taken(tmp_path: Path, marker: Path, way: str) -> None:
    config = WAYS[way](tmp_path, "hostile_beside:make", model="hostile_beside:make")
    assert config.model == "hostile_beside:make"
    build(config.model)
    assert marker.exists()


@pytest.mark.parametrize("name", ["tiny", "decoupled:resnet50", "timm:resnet10t", "torchvision:resnet18", "hf:bert"])
def test_names_without_code_are_taken(name: str) -> None:
    assert from_file(name, "plan.yaml") == name


def test_weights_do_not_choose_their_model(marker: Path) -> None:
    """`infer --weights RUN` and `export RUN` build what the run's folder says, unless that would run code."""
    run = RunNames(model="hostile_beside:make")
    with pytest.raises(BadFile, match="run: names the model hostile_beside:make"):
        _same_model("", run, "run")
    assert not marker.exists()
    assert _same_model("hostile_beside:make", run, "run") == "hostile_beside:make"
    assert _same_model("", RunNames(model="resnet18"), "run") == "resnet18"


@pytest.mark.slow
def test_the_current_folder_hides_no_package(tmp_path: Path, marker: Path) -> None:
    """A file called like one is not imported in its place: not by a name that was typed, nor at the start."""
    for name in ("msgspec.py", "torch.py", "typer.py", "numpy.py"):
        (tmp_path / name).write_text(HOSTILE.format(marker=str(marker)))
    build("hostile_beside:make")
    marker.unlink()
    assert sys.path[0] != str(tmp_path)
    assert sys.path[-1] == str(tmp_path)
    for words in (("-m", "manyhands", "models"), ("-P", "-m", "manyhands", "--help")):
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert not marker.exists()


def test_the_hint_to_go_on_types_the_name() -> None:
    typed = {"model": "mine:network"}
    assert resume_command("train", Path("runs/a"), typed) == "manyhands train --resume runs/a --model mine:network"
    assert resume_command("train", Path("runs/a"), {"model": "tiny"}) == "manyhands train --resume runs/a"

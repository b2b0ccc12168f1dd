"""Models in a file of Python: `./file.py:Class`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.models import registry

NET = """import torch
from widths_beside import WIDTH


class Net(torch.nn.Module):
    def __init__(self, out=3):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, out)

    def forward(self, x):
        return self.linear(x)


class Needs(torch.nn.Module):
    def __init__(self, width):
        super().__init__()


def example_batch(batch_size):
    return torch.zeros(batch_size, WIDTH)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "widths_beside.py").write_text("WIDTH = 5\n")
    (tmp_path / "torch.py").write_text("raise RuntimeError('this is not torch')\n")
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def test_a_class_in_a_file(file: Path) -> None:
    module = registry.build(f"{file}:Net", out=2)
    assert [tuple(weight.shape) for weight in module.parameters()] == [(2, 5), (2,)]
    batch = registry.example_batch(f"{file}:Net", 4)
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (4, 5)
    assert sys.path[-1] == str(file.parent)


def test_relative_to_the_current_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert type(registry.build("net.py:Net")).__name__ == "Net"
    assert registry.runs_code("net.py:Net")
    assert registry.runs_code("decoupled:net.py:Net")


def test_what_is_wrong_is_said(file: Path) -> None:
    with pytest.raises(BadFile, match="there is no such file"):
        registry.build(f"{file.parent}/other.py:Net")
    with pytest.raises(UnknownName) as unknown:
        registry.build(f"{file}:Nett")
    assert "Net" in unknown.value.hint
    with pytest.raises(BadValue, match="width"):
        registry.build(f"{file}:Needs")
    for _ in range(2):  # what has failed is not taken for loaded
        with pytest.raises(ManyhandsError, match="RuntimeError: this is not torch"):
            registry.build(f"{file.parent}/torch.py:Net")

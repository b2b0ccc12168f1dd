"""`manyhands check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import whole_app
from manyhands.facts.errors import CaptureFailed, UnknownName

NET = """import torch


class Good(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)


class Deciding(Good):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.linear(x)


def example_batch(batch_size):
    return torch.ones(batch_size, 4)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))  # what is added to the path is taken away again
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(whole_app(), ["check", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_network_that_is_captured() -> None:
    code, shown = run("tiny")
    assert code == 0
    assert "tiny is captured: input 1x16x16" in shown
    assert "40.5 k parameters" in shown or "40,506" in shown or "40.51" in shown
    for way in ("single", "samples", "pipeline", "tiles", "channels"):
        assert way in shown
    assert "Times: " in shown


def test_json(net: str) -> None:
    code, shown = run(f"{net}:Good", "--json")
    document = json.loads(shown)
    assert code == 0
    assert document["is_captured"]
    assert document["parameters"] == 10
    assert {entry["by"]: entry["applies"] for entry in document["sharing"]}["samples"]
    assert [needs["batch_size"] for needs in document["training"]] == [1, 32]


def test_a_network_that_is_not_captured(net: str) -> None:
    line = NET.splitlines().index("        if x.sum() > 0:") + 1
    code, shown = run(f"{net}:Deciding")
    assert code == CaptureFailed.exit_code
    assert f"net.py:{line}" in shown
    assert "if x.sum() > 0:" in shown
    code, shown = run(f"{net}:Deciding", "--json")
    document = json.loads(shown)
    assert code == document["exit_code"] == CaptureFailed.exit_code
    assert not document["is_captured"]
    assert f"net.py:{line}" in document["refusal"]
    assert document["hint"]


def test_names_that_are_none() -> None:
    with pytest.raises(UnknownName, match="resnet5000"):
        run("resnet5000")

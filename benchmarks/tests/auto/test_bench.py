"""The parts of `manyhands bench auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.facts.errors import BadValue, OutOfMemory, UnknownName
from manyhands_bench.auto import bench as whole
from manyhands_bench.auto.bench import PARTS, bench_auto
from manyhands_bench.command import app
from manyhands_bench.figures import Figures


def test_parts_that_fail_are_told_and_figures_are_flat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(bench: object) -> Figures:
        raise OutOfMemory("full.")

    parts = {"simulated": lambda bench: {"gain_min": 1.0, "text": "words"}, "lab": broken}
    monkeypatch.setattr(whole, "PARTS", parts)
    figures = bench_auto(out=tmp_path)
    assert (figures["gain_min"], figures["lab_failed"]) == (1.0, "full.")
    assert json.loads((tmp_path / "figures.json").read_text())["gain_min"] == 1.0
    invoked = CliRunner().invoke(app, ["auto", "--json", "--out", str(tmp_path), "--only", "simulated"])
    assert invoked.exit_code == 0, invoked.output
    printed = json.loads(invoked.stdout)
    assert printed["gain_min"] == 1.0
    assert all(isinstance(value, (int, float)) for value in printed.values())
    assert CliRunner().invoke(app, ["auto", "--json", "--out", str(tmp_path)]).exit_code == 1


def test_unknown_parts_and_both_lengths_are_refused() -> None:
    with pytest.raises(UnknownName, match="nonsense"):
        bench_auto(only=["nonsense"])
    with pytest.raises(BadValue, match="--quick and --full"):
        bench_auto(quick=True, full=True)
    assert set(PARTS) == {"simulated", "scale", "lab", "segmentation"}

"""The parts of `manyhands bench infer`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.facts.errors import BadPlan, BadValue, Refused, UnknownName
from manyhands_bench.command import app
from manyhands_bench.infer import bench as whole
from manyhands_bench.infer.bench import PARTS, bench_infer, scope_of
from manyhands_bench.infer.simulated import (
    PAIRS,
)
from manyhands_bench.parts import KEPT


def test_what_cannot_be_asked_for_is_refused() -> None:
    with pytest.raises(UnknownName, match="synk"):
        bench_infer(only=["synk"])
    with pytest.raises(BadValue, match="--full"):
        bench_infer(quick=True, full=True)
    with pytest.raises(BadValue, match="'tpu'") as error:
        bench_infer(compute="tpu")
    with pytest.raises(Refused, match="cuda:99 was asked for"):
        bench_infer(compute="cuda:99")
    assert "cpu, cuda" in error.value.hint
    assert set(scope_of(False, False, "cpu").pairs) == set(PAIRS)
    assert scope_of(False, True, "cuda").accuracy.compute == "cuda"


def test_a_part_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(bench: whole.InferBench) -> Mapping[str, str]:
        raise BadPlan("It does not fit.", hint="Take fewer.")

    monkeypatch.setattr(whole, "PARTS", {**PARTS, "sync": broken, "memory": lambda bench: {"memory_reduction_4": 0.7}})
    words = ["infer", "--quick", "--json", "--only", "sync", "--only", "memory", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "sync_failed: It does not fit. Take fewer." in result.stderr
    assert json.loads(result.stdout)["memory_reduction_4"] == 0.7
    assert json.loads((tmp_path / KEPT).read_text())["memory_reduction_4"] == 0.7


@pytest.mark.slow
def test_the_command_measures_every_figure(tmp_path: Path) -> None:
    parts = ("sync", "simulated", "speedup", "memory")
    words = [word for part in parts for word in ("--only", part)]
    result = CliRunner().invoke(app, ["infer", "--quick", "--json", "--out", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    for key in (
        "worst_vs_rivals",
        "scheme3_gain",
        "speedup_2",
        "limit_2",
        "speedup_2_latency",
        "limit_2_latency",
        "memory_reduction_4",
        "scheme3_memory",
    ):
        assert 0 < figures[key] < 100, key
    assert figures["sync_points_channels"] == 3
    assert figures["memory_reduction_4"] > figures["memory_reduction_4_coates"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["fig_10.png", "fig_12.png", "fig_8_resnet18.png"]

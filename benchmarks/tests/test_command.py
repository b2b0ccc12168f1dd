"""`manyhands bench`: what is printed, and that simulated figures say whose profile they rest on."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from manyhands_bench.auto import bench as bench_auto
from manyhands_bench.command import app
from manyhands_bench.parts import PROFILE_MACHINE


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"machine": "a long text", "gain_min": 1.25, PROFILE_MACHINE: "neoverse-n1-2-cores"}
    monkeypatch.setattr(bench_auto, "bench_auto", lambda **options: figures)


@pytest.mark.usefixtures("simulated")
def test_the_document_says_whose_profile_was_simulated() -> None:
    ran = CliRunner().invoke(app, ["auto", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == {"gain_min": 1.25, "profile_machine": "neoverse-n1-2-cores"}
    assert "machine: a long text" in ran.stderr


@pytest.mark.usefixtures("simulated")
def test_so_does_the_table() -> None:
    ran = CliRunner().invoke(app, ["auto"])
    assert ran.exit_code == 0, ran.output
    assert any("profile_machine" in line and "neoverse-n1-2-cores" in line for line in ran.stdout.splitlines())

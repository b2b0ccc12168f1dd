"""The walk: it goes on after crashes, and where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.facts.errors import BadValue
from manyhands_bench.command import app
from manyhands_bench.networks import bench, processes
from manyhands_bench.networks.bench import NetworksOptions, sources_and_versions, walk
from manyhands_bench.networks.outcome import LINES, NetworkOutcome
from network_tasks import pretend

NAMES = ["torchvision:detector", "torchvision:a", "timm:crash", "hf:b"]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a walk over a catalogue of four networks."""
    monkeypatch.setattr(processes, "PRELOADED", ["torch"])
    monkeypatch.setattr(bench, "all_networks", lambda: NAMES)
    monkeypatch.setattr(bench, "detectors", lambda: {NAMES[0]})
    monkeypatch.setattr(bench, "examine_task", pretend)
    return tmp_path / "study"


def examined(study: Path) -> list[str]:
    """Return the networks that were examined, each as often as it was."""
    return [json.loads(line)["outcome"]["name"] for line in (study / LINES).read_text().splitlines()]


@pytest.mark.slow
def test_a_walk_goes_on_after_a_crash_and_where_it_was_stopped(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[str] = []
    options = NetworksOptions(processes=2, out=study)
    outcomes = walk(options, progress.append)
    assert [outcome.name for outcome in outcomes] == NAMES
    assert [outcome.is_detector for outcome in outcomes] == [True, False, False, False]
    (problem,) = outcomes[2].problems
    assert (problem.step, problem.kind) == ("tiles", "crash")
    assert outcomes[2].captured, "what it reported before is kept"
    assert any(text.startswith("4 of 4") for text in progress)
    assert sum(outcome.is_drawn for outcome in outcomes) == 1
    assert walk(options) == outcomes
    assert sorted(examined(study)) == sorted(NAMES), "nothing is examined again"
    monkeypatch.setattr(bench, "sources_and_versions", lambda: "others")
    walk(NetworksOptions(("timm",), processes=1, out=options.out))
    assert examined(study)[len(NAMES) :] == ["timm:crash"]


@pytest.mark.slow
def test_the_command_prints_figures_and_failures(study: Path) -> None:
    words = ["networks", "--processes", "1", "--out", str(study)]
    ran = CliRunner().invoke(app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    assert figures["networks"] == 4
    assert figures["captured_share"] == 1
    assert figures["bare_errors"] == 1
    assert "failure_01: 1 x tiles: [bare crash]" in ran.stderr
    assert "networks_trained: " in ran.stderr
    table = CliRunner().invoke(app, words)
    assert "timm:crash" in table.stdout, table.output
    assert len(examined(study)) == len(NAMES)


def test_options_are_checked() -> None:
    with pytest.raises(BadValue, match="--limit"):
        NetworksOptions(limit=0)
    with pytest.raises(BadValue, match="--processes"):
        NetworksOptions(processes=0)


def test_outcomes_are_told_apart_by_sources_and_versions() -> None:
    text = sources_and_versions()
    assert "torch=" in text
    assert text == sources_and_versions()


def test_the_list_of_trained_networks_is_a_figure() -> None:
    drawn = NetworkOutcome("hf:b", is_drawn=True, trained_by="tiles", trained_difference=2e-16)
    assert bench.figures_of([drawn])["networks_trained"] == "hf:b by tiles (2.0e-16)"

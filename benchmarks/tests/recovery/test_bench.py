"""`manyhands bench recovery` in small: every figure is measured, and no round is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands_bench.command import app
from manyhands_bench.recovery.bench import shape_of

pytestmark = pytest.mark.xdist_group("bench_recovery")


MEASURED = (
    "recovery_seconds", "recovery_seconds_worst", "recovery_seconds_heavy", "light_vs_heavy",
    "recovery_seconds_silent", "detect_seconds", "replan_seconds", "replan_seconds_heavy", "first_round_seconds",
    "caught_up_seconds", "throughput_after", "throughput_after_least", "round_seconds", "backup_overhead",
    "soak_seconds", "soak_seconds_undisturbed", "soak_recovery_seconds",
)  # fmt: skip


COUNTED = ("rounds_lost", "rounds_replayed", "bytes_moved", "bytes_moved_heavy", "backup_every", "failures")


def test_the_shape_is_the_papers() -> None:
    assert shape_of("abcd") == (("a",), ("b", "c"), ("d",))
    assert shape_of("abc") == (("a",), ("b", "c"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Path, str]:
    """The command, once: three workers, one of them killed twice, stopped once, and two kills in the soak."""
    out = tmp_path_factory.mktemp("recovery")
    result = CliRunner().invoke(app, ["recovery", "--quick", "--json", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), out, result.stderr


@pytest.mark.slow
def test_every_figure_is_there_and_measured(run: tuple[dict[str, float], Path, str]) -> None:
    figures, out, logged = run
    assert set(figures) >= {*MEASURED, *COUNTED}
    seconds = [figures[key] for key in MEASURED]
    assert min(seconds) > 0
    assert len({round(one, 9) for one in seconds}) > len(seconds) - 4  # one device: its median is its worst
    assert figures["recovery_seconds"] < figures["first_round_seconds"] < figures["caught_up_seconds"] + 0.01
    assert figures["detect_seconds"] < figures["recovery_seconds"]
    assert figures["failures"] == 3
    assert (out / "fig_17.png").read_bytes().startswith(b"\x89PNG")
    for key in ("machine", "recovery_setting", "recovery_each", "backup_blocks", "soak_setting"):
        assert f"{key}: " in logged


@pytest.mark.slow
def test_a_silent_worker_is_given_up_after_the_limit(run: tuple[dict[str, float], Path, str]) -> None:
    figures = run[0]
    assert figures["recovery_seconds_silent"] > 0.7 * figures["silence_seconds"]
    assert figures["recovery_seconds_silent"] > figures["recovery_seconds"]


@pytest.mark.slow
def test_no_round_is_lost(run: tuple[dict[str, float], Path, str]) -> None:
    figures = run[0]
    assert figures["rounds_lost"] == 0
    assert figures["losses_differ_float32"] < 1e-4


@pytest.mark.slow
def test_a_soak_of_two_kills_changes_nothing(run: tuple[dict[str, float], Path, str]) -> None:
    figures = run[0]
    assert figures["soak_kills"] == 2
    assert figures["soak_losses_noticed"] >= 1
    assert figures["soak_generations"] >= 3
    assert figures["soak_rounds_lost"] == 0
    assert figures["soak_losses_differ"] <= 1e-6
    assert figures["soak_weights_differ"] <= 1e-10

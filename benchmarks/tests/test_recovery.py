"""`manyhands bench recovery --quick`: workers are really killed, and every figure is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.runtime.journey import Travelled
from manyhands_bench.command import app
from manyhands_bench.recovery.bench import shape_of
from manyhands_bench.recovery.plots import Passage, draw_passages, throughput
from manyhands_bench.recovery.site import Trip

pytestmark = pytest.mark.xdist_group("bench_recovery")

MEASURED = (
    "recovery_seconds", "recovery_seconds_worst", "recovery_seconds_heavy", "light_vs_heavy",
    "recovery_seconds_silent", "detect_seconds", "replan_seconds", "replan_seconds_heavy", "first_round_seconds",
    "caught_up_seconds", "throughput_after", "throughput_after_least", "round_seconds", "backup_overhead",
    "soak_seconds", "soak_seconds_undisturbed", "soak_recovery_seconds",
)  # fmt: skip
COUNTED = ("rounds_lost", "rounds_replayed", "bytes_moved", "bytes_moved_heavy", "backup_every", "failures")


# Pure


def test_the_shape_is_the_papers() -> None:
    assert shape_of("abcd") == (("a",), ("b", "c"), ("d",))
    assert shape_of("abc") == (("a",), ("b", "c"))


def test_a_trip_tells_moments_from_the_signal() -> None:
    trip = Trip(
        Travelled(began_at=[11.0], recoveries=[{"seconds": 0.5}]),
        struck_at=10.0,
        steps=[(9.0, 0, 1.0), (10.2, 1, 0.9), (12.5, 2, 0.8)],
        events=[(10.4, "lost", {}), (10.6, "replanned", {}), (12.0, "recovered", {"seconds": 0.5})],
    )
    found = [
        trip.recovery_seconds, trip.detect_seconds, trip.replan_seconds, trip.first_round_seconds,
        trip.caught_up_seconds,
    ]  # fmt: skip
    assert found == pytest.approx([1.0, 0.4, 0.2, 2.0, 2.5])
    assert trip.recoveries_after("lost") == [0.5]
    assert trip.recoveries_after("joined") == []


@pytest.mark.parametrize(
    ("steps", "lost"), [((0, 1, 2), 0), ((0, 2), 1), ((0, 1, 1, 2), 1), ((), 3), ((0, 1, 2, 3), 1)]
)
def test_a_round_that_is_missing_or_comes_twice_is_lost(steps: tuple[int, ...], lost: int) -> None:
    trip = Trip(steps=[(float(place), step, 0.0) for place, step in enumerate(steps)])
    assert trip.rounds_lost(3) == lost


def test_throughput_is_nothing_until_rounds_begin_again(tmp_path: Path) -> None:
    rounds = (-1.5, -1.0, -0.5, 1.0, 1.5)
    edges, rates = throughput(Passage("light", rounds, 0.5, samples=8))
    assert edges == [-1.5, -1.0, -0.5, 0.5, 1.0, 1.5]
    assert rates == [16.0, 16.0, 0.0, 16.0, 16.0]
    passages = [Passage(name, rounds, 0.5, 8) for name in ("light", "heavy")]
    assert draw_passages(passages, tmp_path / "17.png", "Fig. 17").read_bytes().startswith(b"\x89PNG")


# With workers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Path, str]:
    """The command, once: three workers, one of them killed twice, stopped once, and two kills in the soak."""
    out = tmp_path_factory.mktemp("recovery")
    result = CliRunner().invoke(app, ["recovery", "--quick", "--json", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), out, result.stderr


@pytest.mark.slow
def test_every_figure_is_there_and_measured(run: tuple[dict[str, float], Path, str]) -> None:
    figures, out, said = run
    assert set(figures) >= {*MEASURED, *COUNTED}
    seconds = [figures[key] for key in MEASURED]
    assert min(seconds) > 0
    assert len({round(one, 9) for one in seconds}) > len(seconds) - 4  # one device: its median is its worst
    assert figures["recovery_seconds"] < figures["first_round_seconds"] < figures["caught_up_seconds"] + 0.01
    assert figures["detect_seconds"] < figures["recovery_seconds"]
    assert figures["failures"] == 3
    assert (out / "fig_17.png").read_bytes().startswith(b"\x89PNG")
    for key in ("machine", "recovery_setting", "recovery_each", "backup_blocks", "soak_setting"):
        assert f"{key}: " in said


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

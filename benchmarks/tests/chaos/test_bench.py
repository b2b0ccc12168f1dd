"""`manyhands bench chaos` in small: faults fire, and no round is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.lab.spaces import missing
from manyhands_bench.chaos import draw, place
from manyhands_bench.chaos.bench import ChaosOptions, bench_chaos
from manyhands_bench.chaos.draw import KINDS, SHARES, scenario
from manyhands_bench.chaos.summary import MOST_DIFFERENCE
from manyhands_bench.figures import Figures

SEED = 0
"""Three devices that share samples."""


PATIENT_SECONDS = 30.0
"""What the benchmark aims at is for a machine of its own; tests share theirs."""


NOTHING = {"network": "not in this test", "groups": "not in this test", "disk": "not in this test"}


def check(figures: Figures, faults: int) -> None:
    assert [key for key in figures if key.endswith("_failed")] == [], figures
    assert figures["faults"] == figures["faults_fired"] == faults
    assert float(figures["weights_differ"]) <= MOST_DIFFERENCE
    assert float(figures["recovery_seconds_worst"]) <= PATIENT_SECONDS
    assert [figures[key] for key in ("rounds_lost", "processes_left", "hangs", "false_evictions", "failures")] == [
        0
    ] * 5


def numbered(share: str, seed: int) -> int:
    """The first scenario of the seed that shares the work in this way."""
    return next(number for number in range(len(SHARES)) if scenario(seed, number, tuple(KINDS)).share == share)


@pytest.mark.slow
def test_kill_stop_and_junk_without_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One job with three faults; what it stores can be added up."""
    monkeypatch.setattr(place, "missing", lambda: NOTHING)
    monkeypatch.setattr(draw, "FAULTS_EACH", 3)
    options = ChaosOptions(seed=SEED, faults=3, only=("kill", "stop", "junk"), out=tmp_path)
    check(bench_chaos(options), 3)
    again = bench_chaos(ChaosOptions(faults=0, only=("kill",), add=(tmp_path / f"chaos-{SEED}.json",)))
    assert again["faults_fired"] == 3


@pytest.mark.root
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    "kinds", [("slow-link", "oom"), ("disk-full", "coordinator"), ("partition",), ("hang",)], ids=",".join
)
def test_faults_that_need_root(kinds: tuple[str, ...]) -> None:
    check(bench_chaos(ChaosOptions(seed=5, faults=4, only=kinds, scenario=numbered("samples", 5))), 4)

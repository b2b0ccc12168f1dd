"""Options of `manyhands bench chaos`, stored runs, and how a failure is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos_outcomes import kill, outcome
from manyhands.facts.errors import BadValue
from manyhands_bench.chaos.bench import ChaosOptions, bench_chaos, failure_text
from manyhands_bench.chaos.summary import (
    ChaosRun,
    read_runs,
    write_run,
)


def test_a_failure_says_how_to_repeat_it() -> None:
    text = failure_text(outcome(3, kill(1.0), seed=8, rounds_lost=1, folder="there"), ("kill", "junk"))
    assert text == (
        "1 round(s) lost. Logs: there. Repeat it: manyhands bench chaos --seed 8 --scenario 3 --only kill,junk"
    )


def test_stored_runs_are_added_up(tmp_path: Path) -> None:
    paths = tmp_path / "chaos-1.json", tmp_path / "chaos-2.json"
    write_run(paths[0], ChaosRun(1, [outcome(0, kill(1.0)), outcome(1, kill(2.0))]))
    write_run(paths[1], ChaosRun(2, [outcome(0, kill(4.0), kill(5.0), seed=2)]))
    figures = bench_chaos(ChaosOptions(faults=0, add=paths))
    assert (figures["faults"], figures["faults_fired"], figures["recovery_seconds_worst"]) == (4, 4, 5.0)
    with pytest.raises(BadValue, match="holds scenario 0 of seed 1, and so does"):
        read_runs([paths[0], paths[0]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hours": 0.0}, "--hours is 0"), ({"faults": -1}, "--faults is -1"), ({"faults": 0}, "runs nothing"),
        ({"scenario": -2}, "--scenario is -2"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        ChaosOptions(**given)

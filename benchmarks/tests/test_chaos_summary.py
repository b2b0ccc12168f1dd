"""The arithmetic of the chaos benchmark: recovery seconds, rounds, differences, and adding up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.facts.errors import BadValue
from manyhands_bench.chaos.bench import ChaosOptions, bench_chaos, failure_text
from manyhands_bench.chaos.reference import Reference
from manyhands_bench.chaos.reports import Watched
from manyhands_bench.chaos.scenario import rounds_lost
from manyhands_bench.chaos.summary import (
    ChaosRun,
    FaultOutcome,
    ScenarioOutcome,
    by_kind,
    read_runs,
    summarize,
    write_run,
)


def outcome(number: int = 0, *faults: FaultOutcome, seed: int = 1, **given: Any) -> ScenarioOutcome:
    return ScenarioOutcome(seed, number, "tiles", given.pop("planned_faults", len(faults)), list(faults), **given)


def kill(seconds: float | None, *, has_fired: bool = True) -> FaultOutcome:
    return FaultOutcome("kill", "tiles", has_fired, seconds)


def watched(tmp_path: Path, *lines: dict[str, Any]) -> Watched:
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(json.dumps({"incarnation": 0, **line}) + "\n" for line in lines))
    found = Watched(path)
    found.poll()
    return found


def step(at: float, number: int, incarnation: int = 0) -> dict[str, Any]:
    return {"what": "step", "at": at, "step": number, "incarnation": incarnation}


def alive(at: float, **serials: int) -> dict[str, Any]:
    return {"what": "alive", "at": at, "devices": sorted(serials.items())}


# Recovery


def test_after_a_loss_the_first_new_round_counts_that_ends_after_it_was_noticed(tmp_path: Path) -> None:
    found = watched(
        tmp_path, alive(0.0, w1=0, w2=1), step(1.0, 0), step(2.1, 1), alive(4.0, w1=0), step(4.7, 2), step(5.0, 3)
    )
    assert found.recovered_at(2.0, 0, ("w2",)) == 4.7  # not 2.1, which was under way
    assert found.recovered_at(2.0, 0, ("w1",)) is None


def test_where_nobody_is_lost_the_second_round_counts(tmp_path: Path) -> None:
    found = watched(tmp_path, step(1.0, 0), step(2.1, 1))
    assert found.recovered_at(2.0, 0, ()) is None
    one_round = step(2.1, 1), step(2.1001, 2), step(2.1002, 3)  # of a split, which may have begun before the fault
    assert watched(tmp_path, *one_round).recovered_at(2.0, 0, ()) is None
    assert watched(tmp_path, *one_round, step(2.5, 4)).recovered_at(2.0, 0, ()) == 2.5


def test_after_a_restart_the_first_round_of_the_new_coordinator_counts(tmp_path: Path) -> None:
    found = watched(tmp_path, step(1.0, 5), step(2.1, 6), step(9.0, 4, incarnation=1), step(9.5, 5, incarnation=1))
    assert found.recovered_at(2.0, 0, ()) == 9.0


def test_a_device_that_was_given_up_and_came_back_was_given_up(tmp_path: Path) -> None:
    found = watched(tmp_path, alive(0.0, w1=0, w2=1), alive(1.0, w1=0, w2=2))
    assert [(one.at, one.name) for one in found.gone] == [(1.0, "w2")]


def test_a_loss_that_is_told_and_seen_counts_once(tmp_path: Path) -> None:
    told = {"what": "event", "event": "lost", "facts": {"devices": ["w2"]}}
    both = {**told, "at": 1.0}, alive(1.1, w1=0)
    assert [one.name for one in watched(tmp_path, alive(0.0, w1=0, w2=1), *both).gone] == ["w2"]
    later = alive(5.0, w1=0, w2=3), {**told, "at": 9.0}  # another time, without leaving the members
    assert [one.at for one in watched(tmp_path, alive(0.0, w1=0, w2=1), *both, *later).gone] == [1.0, 9.0]


def test_members_of_the_next_coordinator_were_not_given_up(tmp_path: Path) -> None:
    found = watched(tmp_path, alive(0.0, w1=0, w2=1), {**alive(5.0, w1=0), "incarnation": 1})
    assert found.gone == []


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = json.dumps(step(1.0, 0)) + "\n"
    path = tmp_path / "reports.jsonl"
    path.write_text(line + line[:10])
    found = Watched(path)
    found.poll()
    assert len(found.steps) == 1
    path.write_text(line + line)
    found.poll()
    assert len(found.steps) == 2


# Rounds and weights


@pytest.mark.parametrize(
    ("recorded", "lost"),
    [([0, 1, 2], 0), ([0, 2], 1), ([0, 1, 1, 2], 1), ([0, 1, 2, 3], 1), ([], 3), ([2, 0, 1], 0), ([0, 0, 0], 4)],
)
def test_rounds_are_lost_that_are_not_recorded_exactly_once(recorded: list[int], lost: int) -> None:
    assert rounds_lost(recorded, 3) == lost


def test_the_reference_goes_on_from_what_it_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands_bench.chaos.reference.STEPS_BETWEEN_KEPT", 2)
    far, kept = Reference(2), Reference(2)
    wanted = far.weights(5)
    kept.weights(3)
    assert kept.differs(wanted, 5) == 0.0
    assert kept.differs(wanted, 4) > 1e-6  # a round more or less shows
    assert Reference(1).differs(wanted, 5) > 1e-6  # and so does another way to take statistics


def test_weights_that_are_missing_or_no_numbers_differ_without_bound() -> None:
    reference = Reference(1)
    good = {name: tensor.clone() for name, tensor in reference.weights(0).items()}
    assert reference.differs(good, 0) == 0.0
    first = next(iter(good))
    assert reference.differs({**good, first: torch.full_like(good[first], float("nan"))}, 0) == float("inf")
    del good[first]
    assert reference.differs(good, 0) == float("inf")


# Figures


def test_figures_of_all_scenarios_together() -> None:
    figures = summarize(
        [
            outcome(0, kill(0.5), kill(3.0), rounds=40, weights_differ=1e-15, seconds=10.0),
            outcome(
                1, kill(1.0), kill(9.0, has_fired=False), planned_faults=4, rounds=20, rounds_lost=2, hangs=1,
                failure="it hangs", weights_differ=1e-13, processes_left=3, false_evictions=["w1", "w1"], seconds=5.0,
            ),
        ]
    )  # fmt: skip
    wanted = {
        "faults": 6, "faults_fired": 3, "rounds_lost": 2, "weights_differ": 1e-13, "processes_left": 3, "hangs": 1,
        "recovery_seconds_median": 1.0, "recovery_seconds_worst": 3.0, "false_evictions": 2, "scenarios": 2,
        "failures": 1, "rounds": 60, "seconds": 15.0,
    }  # fmt: skip
    assert {key: figures[key] for key in wanted} == wanted
    assert by_kind(figures) == {"kill": (3, 1.0, 3.0)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"failure": "it hangs"}, {"rounds_lost": 1}, {"weights_differ": 2e-10}, {"processes_left": 1},
        {"false_evictions": ["w1"]}, {"planned_faults": 2},
    ],
)  # fmt: skip
def test_a_scenario_with_anything_wrong_is_not_good(wrong: dict[str, Any]) -> None:
    assert outcome(0, kill(1.0), weights_differ=1e-12).is_good
    assert not outcome(0, kill(1.0), **wrong).is_good
    assert not outcome(0, kill(1.0, has_fired=False)).is_good


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

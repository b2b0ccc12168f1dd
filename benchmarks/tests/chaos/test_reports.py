"""What a coordinator's reports say: steps, losses and recoveries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands_bench.chaos.reports import Watched


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
    logged = {"what": "event", "event": "lost", "facts": {"devices": ["w2"]}}
    both = {**logged, "at": 1.0}, alive(1.1, w1=0)
    assert [one.name for one in watched(tmp_path, alive(0.0, w1=0, w2=1), *both).gone] == ["w2"]
    later = alive(5.0, w1=0, w2=3), {**logged, "at": 9.0}  # another time, without leaving the members
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

"""A run followed by its folder: what grows, what is half-written, what is broken, what is over."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from manyhands.observe.live import (
    LIVE_FILE,
    ROUND_FILE,
    Live,
    LiveDevice,
    LiveLink,
    LiveRound,
    LiveSpan,
    read_live,
    write_live,
    write_round,
)
from manyhands.observe.watching import RunWatch, newest_live, runs_here


def living(**facts: object) -> Live:
    return Live(
        **{"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time(), **facts}
    )  # type: ignore[arg-type]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    live = living(
        loss=float("nan"), devices=(LiveDevice("pi", busy=0.5, stages=(0, 1)),), links=(LiveLink("a", "b", None, 1e-3),)
    )
    found = LiveRound(3, 0.1, 0.2, (LiveSpan("pi", "compute", 0.0, 0.05, "forward", "1", 0),))
    write_live(tmp_path, live)
    write_round(tmp_path, found)
    assert read_live(tmp_path) == msgspec.structs.replace(live, loss=None, round=found)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [LIVE_FILE, ROUND_FILE]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": 3}', '{"devices": [{}]}', "[" * 10_000, "\udcff"])
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / LIVE_FILE).write_bytes(content.encode(errors="surrogateescape"))
    (tmp_path / "events.jsonl").write_bytes(content.encode(errors="surrogateescape") + b"\n")
    assert read_live(tmp_path) is None
    view = RunWatch(tmp_path).look()
    assert not view.is_live
    assert view.events == []


def test_only_whole_lines_count_and_each_once(tmp_path: Path) -> None:
    write_live(tmp_path, living())
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.csv"
    watch = RunWatch(tmp_path)
    assert watch.look().events == []
    events.write_text('{"event": "started", "model": "tiny"}\n{"event": "jo')
    metrics.write_text("step,loss\n0,2.5\n1,")
    view = watch.look()
    assert [event["event"] for event in view.events] == ["started"]
    assert view.metrics == {"step": [0.0], "loss": [2.5]}
    with open(events, "a") as file:
        file.write('ined", "device": "pi"}\n')
    with open(metrics, "a") as file:
        file.write("\n2,1.5\n3,4,5\n")
    view = watch.look()
    assert [(event["number"], event["event"]) for event in view.events] == [(0, "started"), (1, "joined")]
    assert view.metrics == {"step": [0.0, 1.0, 2.0], "loss": [2.5, None, 1.5]}


def test_a_run_that_goes_on_from_an_earlier_step_begins_its_columns_anew(tmp_path: Path) -> None:
    metrics, watch = tmp_path / "metrics.csv", RunWatch(tmp_path)
    metrics.write_text("step,loss\n0,3\n1,2\n2,1\n")
    assert watch.look().metrics["step"] == [0, 1, 2]
    other = tmp_path / "other"
    other.write_text("step,loss\n0,3\n1,5\n")
    os.replace(other, metrics)  # as a resumed run does it
    assert watch.look().metrics == {"step": [0, 1], "loss": [3, 5]}


@pytest.mark.parametrize(
    ("facts", "event", "is_live", "state"),
    [
        ({}, "started", True, "running"),
        ({"updated": 5.0}, "started", False, "failed"),
        ({"pid": 2**22 + 1}, "started", False, "failed"),
        ({"pid": 2**22 + 1, "host": "another"}, "started", True, "running"),
        ({"pid": 2**22 + 1}, "finished", False, "ended"),
        ({"state": "stopped"}, "stopped", False, "stopped"),
    ],
)
def test_who_is_gone_without_a_word_is_not_live(
    tmp_path: Path, facts: dict[str, object], event: str, is_live: bool, state: str
) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"event": "{event}"}}\n')
    write_live(tmp_path, living(**facts))
    view = RunWatch(tmp_path).look()
    assert (view.is_live, view.live.state) == (is_live, state)


def test_a_run_of_an_older_version_is_read_from_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "started", "model": "tiny"}\n{"event": "finished"}\n')
    (tmp_path / "metrics.csv").write_text("step,loss,samples_per_second\n0,2.5,10\n1,2.0,20\n")
    (tmp_path / "plan.yaml").write_text("stages:\n- {layers: [0, 3], devices: [a, b]}\n- {layers: x}\n")
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    live = RunWatch(tmp_path).look().live
    assert (live.state, live.model, live.step, live.steps, live.loss) == ("ended", "tiny", 2, 2, 2.0)
    assert [device.name for device in live.devices] == ["a", "b"]
    assert [(stage.first, stage.last) for stage in live.stages] == [(0, 3)]


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).mkdir()
        write_live(tmp_path / name, living(state="running" if name == "old" else "ended"))
        os.utime(tmp_path / name / LIVE_FILE, (time.time() - age, time.time() - age))
    (tmp_path / "no run").mkdir()
    assert [folder.name for folder in runs_here(tmp_path)] == ["new", "old", "oldest"]
    assert newest_live(runs_here(tmp_path)) == tmp_path / "old"
    assert runs_here(tmp_path / "nowhere") == []

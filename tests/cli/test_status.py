"""`manyhands top` and `manyhands status` of folders as runs leave them: every state, old ones, broken ones, none."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from manyhands.cli.live_rows import Flows, clock, event_text, memory_text, rate_text, step_text
from manyhands.cli.moving import Moving
from manyhands.cli.status import FAILED, run_named, status, status_lines, worker_pid
from manyhands.cli.top import Screen, top
from manyhands.facts.errors import BadFile, BadValue, UnknownName
from manyhands.observe.live import Live, LiveDevice, LiveLink, LiveStage, write_live
from manyhands.observe.recent import remember
from manyhands.observe.watching import RunWatch

EVENTS: list[dict[str, Any]] = [
    {"event": "started", "model": "tiny", "step": 0, "steps": 100},
    {"event": "lost", "reason": "Worker pi-2 was lost at step 7: killed by SIGKILL.", "devices": ["pi-2"]},
    {"event": "replanned", "how": "light", "plan": {}},
    {"event": "recovered", "devices": ["pi-1", "pi-3"], "step": 6, "seconds": 0.51},
    {"event": "joined", "device": "pi-4"},
    {"event": "checkpoint", "step": 40},
]


def live(**facts: Any) -> Live:
    known: dict[str, Any] = {
        "state": "running", "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time(), "model": "tiny",
        "step": 42, "steps": 100, "loss": 0.1234, "seconds": 0.02, "predicted_seconds": 0.018,
        "samples_per_second": 3200.0, "remaining_seconds": 75.0, "dashboard": "http://127.0.0.1:7070/",
        "devices": (
            LiveDevice("pi-1", "pi4", "here", "", 8e9, 3e6, 4 * 10**8, 2_500_000, 0.82, stages=(0,)),
            LiveDevice("pi-2", "pi4", "lost", "killed by SIGKILL", 8e9),
            LiveDevice("pi-3", "pi4", "here", "", 8e9, 3e6, busy=0.37, stages=(1,)),
        ),
        "links": (
            LiveLink("pi-1", "pi-3", 1.25e8, 0.001, 9e7, 1_000_000), LiveLink("pi-3", "pi-1", None, 0.0, None, 5),
        ),
        "stages": (
            LiveStage(0, 0, 2, "all", ("pi-1",), 0.012, 0.011, 5333.0),
            LiveStage(1, 2, 5, "all", ("pi-3",), 0.006, 0.005, 10667.0),
        ),
    }  # fmt: skip
    return Live(**{**known, **facts})


def run(folder: Path, **facts: Any) -> Path:
    folder.mkdir(parents=True)
    write_live(folder, live(**facts))
    lines = [json.dumps({"time": "2026-01-02T03:04:05.000000Z", **one}) for one in EVENTS]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without runs, and a user who has started none elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("state", "pid", "code"),
    [("preparing", 0, 0), ("waiting", 0, 0), ("running", 0, 0), ("ended", 0, 0), ("stopped", 0, 0), ("failed", 0, 20),
     ("running", 2**22 + 1, 20)],
)  # fmt: skip
def test_exit_codes(here: Path, capsys: pytest.CaptureFixture[str], state: str, pid: int, code: int) -> None:
    """A process that is gone without a word has failed."""
    run(here / "runs" / "one", state=state, pid=pid or os.getpid())
    if code:
        with pytest.raises(typer.Exit) as found:
            status("one", json=True)
        assert found.value.exit_code == FAILED == code
    else:
        status("one", json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == ("failed" if code else state)
    assert document["is_live"] == (state in ("preparing", "waiting", "running") and not pid)
    assert (document["step"], document["steps"], document["folder"]) == (42, 100, "runs/one")
    assert [one["name"] for one in document["devices"]] == ["pi-1", "pi-2", "pi-3"]
    assert document["events"][-1]["event"] == "checkpoint"
    assert "round" not in document


def test_none_is_found(here: Path) -> None:
    with pytest.raises(BadFile, match="no run in") as found:
        run_named("")
    assert found.value.exit_code == 4
    run(here / "runs" / "one")
    with pytest.raises(BadFile, match="two") as found:
        run_named("two")
    assert "one" in found.value.hint


def test_the_newest_that_goes_on_is_taken(here: Path) -> None:
    old = run(here / "runs" / "going-on")
    run(here / "runs" / "over", state="ended")
    os.utime(old / "live.json", (1, 1))
    os.utime(old / "events.jsonl", (1, 1))
    assert run_named("").name == "going-on"
    write_live(old, live(state="stopped"))
    for name in ("live.json", "events.jsonl"):
        os.utime(old / name, (1, 1))
    assert run_named("").name == "over"
    assert run_named(str(old)) == old


def test_a_run_in_a_folder_of_its_own_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As --out writes it, from whichever folder it is asked for; the newest of all, and a live one before others."""
    elsewhere = run(here / "out" / "digits-run", state="ended")
    remember(elsewhere)
    assert run_named("") == Path("out/digits-run")
    status("", json=True)
    assert json.loads(capsys.readouterr().out)["folder"] == "out/digits-run"
    old = run(here / "runs" / "old", state="ended")
    remember(old)
    for name in ("live.json", "events.jsonl"):
        os.utime(old / name, (1, 1))
    assert run_named("") == Path("out/digits-run")
    write_live(old, live())
    os.utime(old / "live.json", (2, 2))
    assert run_named("") == Path("runs/old")
    with pytest.raises(BadFile) as found:
        run_named("digits-runn")
    assert "out/digits-run" in found.value.hint
    os.chdir(here.parent)  # monkeypatch goes back
    assert run_named("") == Path(here.name) / "runs" / "old"
    shutil.rmtree(here / "runs")
    os.chdir("/")
    assert run_named("").resolve() == elsewhere.resolve()


def test_status_in_words(here: Path) -> None:
    lines = status_lines(RunWatch(run(here / "one")).look())
    assert lines[0].endswith("one: tiny, running")
    assert lines[1] == "step 42 of 100, loss 0.1234, 3,200 samples/s, 20 ms a step (predicted 18 ms), 1:15 left"
    assert "  pi-2: lost: killed by SIGKILL" in lines
    assert "  pi-1: here, stage 0, 82% busy" in lines
    assert lines[-1] == "Dashboard: http://127.0.0.1:7070/"


def test_top_prints_once_where_there_is_no_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(here / "runs" / "one", state="ended")
    top("")
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for part in ("step 42 of 100", "pi-1", "82%", "2.5 MB of 8 GB", "~3 MB of 8 GB", "5,333 samples/s", "1 Gbit/s",
                 "720 Mbit/s", "no limit", "killed by SIGKILL", "pi-4 joined", "checkpoint after step 40"):  # fmt: skip
        assert part in said, part


def drawn(what: Any, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as found:
        console.print(what)
    return found.get().splitlines()


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("height", [12, 16, 24, 50])
@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_top_fits_the_screen(here: Path, width: int, height: int) -> None:
    """A hundred devices, and links among all."""
    names = [f"device-{place}" for place in range(100)]
    devices = tuple(LiveDevice(name, busy=0.5) for name in names)
    links = tuple(LiveLink(a, b, 1e6, 0.001, None, 7) for a in names[:20] for b in names[:20] if a != b)
    view = RunWatch(run(here / "one", devices=devices, links=links)).look()
    lines = drawn(Screen(view, Flows()), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("step 42" in line for line in lines)
    if height >= 24:
        assert any("device-0" in line for line in lines)
        assert any("more devices" in line for line in lines)


def test_rates_come_from_two_looks() -> None:
    flows = Flows()
    flows.look(live(updated=100.0))
    assert flows.outwards == {}
    more = (LiveLink("pi-1", "pi-3", 1.25e8, 0.001, 9e7, 3_000_000), LiveLink("pi-3", "pi-1", None, 0.0, None, 5))
    flows.look(live(updated=102.0, links=more))
    assert flows.outwards == {"pi-1": 1e6, "pi-3": 0.0}
    assert flows.inwards == {"pi-3": 1e6, "pi-1": 0.0}
    flows.look(live(updated=102.0, links=more))
    assert flows.outwards["pi-1"] == 1e6, "nothing new was written"


@pytest.mark.parametrize("content", ["", "{", "null", '{"state": 7}', "\x00\xff"])
def test_broken_folders(here: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(here / "runs" / "one")
    (folder / "live.json").write_text(content)
    (folder / "events.jsonl").write_text(content + "\n")
    top("one")
    status("one", json=False)  # nothing says that it has failed
    assert "runs/one" in capsys.readouterr().out


def test_what_comes_from_elsewhere_is_not_obeyed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal would: names and reasons with escape codes in them."""
    evil = "\x1b]0;mine\x07\x1b[2J"
    folder = run(
        here / "runs" / "one",
        state="failed",
        text=evil,
        model=evil,
        devices=(LiveDevice(evil, state="lost", reason=evil),),
    )
    (folder / "events.jsonl").write_text(json.dumps({"event": "lost", "reason": evil}) + "\n")
    top("one")
    with pytest.raises(typer.Exit):
        status("one", json=False)
    said = capsys.readouterr().out
    assert "mine" in said
    assert "\x1b" not in said
    assert "\x07" not in said


def test_words() -> None:
    assert [event_text(one) for one in EVENTS] == [
        "started: tiny, step 0 of 100", "Worker pi-2 was lost at step 7: killed by SIGKILL.", "planned again (light)",
        "going on with pi-1, pi-3 from step 6 after 0.51 s", "pi-4 joined", "checkpoint after step 40",
    ]  # fmt: skip
    assert event_text({"event": "tried", "plan": {}}) == ""
    assert event_text({"event": "recovered", "devices": 3, "seconds": "x"}) == "going on with  from step None"
    assert [clock(one) for one in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
    assert [rate_text(one) for one in (None, 0.123, 12345.6)] == ["", "0.12 samples/s", "12,346 samples/s"]
    assert memory_text(LiveDevice("a")) == ""
    assert step_text(Live(step=3)) == "step 3"


# The part that moves


def moving(folder: Path, **facts: Any) -> Moving:
    found = Moving("training", 100, 64)
    found.follow(run(folder, **facts))
    for _ in range(40):
        found.step(0.02, 0.5)
    return found


def test_a_bar_with_a_line_for_each_stage(tmp_path: Path) -> None:
    lines = drawn(moving(tmp_path / "one"), 100, 30)
    assert lines[0].startswith("training ")
    assert lines[0].endswith("40/100 loss 0.5000 3,200 samples/s 0:01 left")
    assert "stage 0  layers 0-1  pi-1   5,333 samples/s" in lines[1]
    assert "82% busy" in lines[1]
    assert "10,667 samples/s" in lines[2]
    assert len(lines) == 3


def test_a_line_for_each_device_where_one_stage_has_all(tmp_path: Path) -> None:
    lines = drawn(moving(tmp_path / "one", stages=(LiveStage(0, 0, 5, devices=("pi-1", "pi-3")),)), 100, 30)
    assert [line.split()[0] for line in lines[1:]] == ["pi-1", "pi-2", "pi-3"]
    assert "82% busy" in lines[1]
    assert "memory 2.5 MB of 8 GB" in lines[1]
    assert "lost" in lines[2]


@pytest.mark.parametrize("height", [6, 30])
@pytest.mark.parametrize("width", [12, 20, 33, 44, 69, 70, 300])
def test_it_fits(tmp_path: Path, width: int, height: int) -> None:
    stages = tuple(LiveStage(n, n, n + 1, devices=(f"device-{n}",), samples_per_second=10.0 * n) for n in range(30))
    own = moving(tmp_path / "one", stages=stages)
    lines = drawn(own, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    own.is_over = True
    assert len(drawn(own, width, height)) == 1


def test_events_are_news_once(tmp_path: Path) -> None:
    own = moving(tmp_path / "one")
    own.look()
    assert not own.news, "what was there before is no news"
    with open(tmp_path / "one" / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "checkpoint", "step": 80}) + "\n")
    own._looked_at = 0.0
    own.look()
    assert [one["step"] for one in own.news] == [80]


def test_the_process_of_one_worker_of_one_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For `kill $(manyhands status RUN --pid NAME)`: never another run's worker of that name."""
    devices = (LiveDevice("local-1", "local", pid=4711), LiveDevice("local-2", "local", "lost", "killed by SIGKILL"))
    first = run(here / "runs" / "first", devices=devices)
    run(here / "runs" / "second", devices=(LiveDevice("local-1", "local", pid=4712),))
    status(str(first), pid="local-1")
    assert capsys.readouterr().out == "4711\n"
    assert "local-1: here, process 4711" in "\n".join(status_lines(RunWatch(first).look()))
    with pytest.raises(BadValue, match=r"local-2 is not a running process .* Its state is lost"):
        status(str(first), pid="local-2")
    with pytest.raises(UnknownName, match="local-9"):
        status(str(first), pid="local-9")
    over = run(here / "runs" / "over", state="ended", devices=devices)
    with pytest.raises(BadValue, match="does not go on: ended"):
        worker_pid(RunWatch(over).look(), "local-1")
    away = run(here / "runs" / "away", host="elsewhere", devices=devices)
    with pytest.raises(BadValue, match="It ran on elsewhere"):
        worker_pid(RunWatch(away).look(), "local-1")

"""What is written down of a lab, and who is told from whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, LabError
from manyhands.facts.lab import play
from manyhands.lab import record
from manyhands.lab.record import LabRecord, Process, lab_name


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("preset", ["home", "edge-cloud", "pi3x6"])
def test_read_back_as_written(preset: str, folder: Path) -> None:
    asked = Cluster.lab(preset, slots=2, traces={Cluster.lab(preset).cluster.names[0]: "/x/trace.txt"})
    played = play(asked, core_gflops=60, cores=[0, 1])
    known = LabRecord("one", preset, played, True, Process(1, 2), None)
    assert record.claim(known)
    assert not record.claim(known), "the name is taken"
    assert record.names() == ["one"]
    assert record.load("one") == known
    record.save(msgspec.structs.replace(known, keeper=Process(3, 4)))
    assert record.load("one").keeper == Process(3, 4)
    record.log_path("one").write_text("words")
    record.forget("one")
    record.forget("one")
    assert not list(folder.iterdir())


def test_who_is_not_there_or_not_readable(folder: Path) -> None:
    with pytest.raises(LabError, match="no lab called 'one'") as found:
        record.load("one")
    assert "manyhands lab up" in found.value.hint
    (folder / "one.json").write_text('{"name": "one"}')
    with pytest.raises(LabError, match="does not describe a lab") as found:
        record.load("one")
    assert found.value.hint == "manyhands lab down one"


def test_names() -> None:
    assert lab_name("env-a") == "env_a"
    for bad in ("", "-x", "a/b", "..", "x" * 40):
        with pytest.raises(BadValue):
            lab_name(bad)


def test_processes_are_told_apart() -> None:
    own = Process.of(os.getpid())
    assert own.is_alive
    assert not msgspec.structs.replace(own, began=own.began + 1).is_alive
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = Process.of(child.pid)
    assert known.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not known.is_alive, "it has ended, though nobody has asked how"
    child.communicate()
    assert not Process.of(0).is_alive

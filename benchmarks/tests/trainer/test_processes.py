"""Processes that measure: what they print, and that none is left or waited for without a limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands_bench.trainer import processes
from manyhands_bench.trainer.processes import ProcessTask, printed_by, printed_by_all

CODE = """
import json, os, sys, time
setting = json.loads(sys.argv[1])
if setting["name"] == "fails":
    sys.exit("there is no such thing")
if setting["name"] == "hangs":
    time.sleep(600)
print("a line before")
print(json.dumps({"name": setting["name"], "folder": sys.argv[2], "home": os.environ["MANYHANDS_HOME"]}))
"""


@dataclass(frozen=True)
class Named:
    name: str


@pytest.fixture(autouse=True)
def in_place_of_trainings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODE)
    real = ProcessTask.command

    def command(task: ProcessTask) -> list[str]:
        words = real(task)
        return [words[0], str(script), *words[-2:]]

    monkeypatch.setattr(processes.ProcessTask, "command", command)


def task(name: str, folder: Path) -> ProcessTask:
    return ProcessTask("any_module", Named(name), folder / name, folder / "home")


@pytest.mark.slow
def test_each_prints_its_own(tmp_path: Path) -> None:
    expected = [
        {"name": name, "folder": str(tmp_path / name), "home": str(tmp_path / "home")} for name in ("first", "second")
    ]
    assert printed_by_all([task("first", tmp_path), task("second", tmp_path)]) == expected
    assert printed_by(task("first", tmp_path)) == expected[0]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("name", "error"), [("fails", ManyhandsError), ("hangs", TimedOut)])
def test_one_that_fails_or_hangs_ends_all(name: str, error: type[Exception], tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(error, match="any_module") as raised:
        printed_by_all([task(name, tmp_path), task("hangs", tmp_path)], limit_seconds=600.0 if name == "fails" else 0.2)
    assert {child.pid for child in psutil.Process().children()} <= before
    shown: Any = raised.value
    assert name != "fails" or "there is no such thing" in shown.hint

"""One process at a time, and none that waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.files.machine_lock import machine_lock

HOLDS = """
import sys, time
from manyhands.files.machine_lock import machine_lock
with machine_lock("test", 0.0) as is_held:
    print(is_held, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))


def test_a_lock_is_held_by_one_and_let_go() -> None:
    with machine_lock("test", 0.0) as first:
        assert first
        began = time.monotonic()
        with machine_lock("test", 0.2) as second:
            assert not second, "it goes on without it"
        assert 0.2 <= time.monotonic() - began < 5.0
        with machine_lock("other", 0.0) as other:
            assert other
    with machine_lock("test", 0.0) as again:
        assert again


def test_a_process_that_is_killed_leaves_no_lock() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with machine_lock("test", 0.0) as is_held:
            assert not is_held
    finally:
        holder.kill()
        holder.communicate()
    with machine_lock("test", 5.0) as is_held:
        assert is_held


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "file" / "home"))
    with machine_lock("test", 0.0) as is_held:
        assert not is_held

"""One reader for every document: plain files, linear in their length, and no link in a run's folder leads out of it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.data.plain_files import read_bytes
from manyhands.facts.errors import BadFile
from manyhands.files.documents import read_document, read_text, write_document
from manyhands.files.plain import open_plain
from manyhands.observe import live
from manyhands.observe.append import LineFile
from manyhands.observe.live import LIVE_FILE, read_live
from manyhands.observe.watching import RunWatch


@pytest.fixture(autouse=True)
def never_waits() -> object:
    """Whoever waits for a pipe is interrupted, and fails."""
    signal.alarm(30)
    yield
    signal.alarm(0)


READERS: dict[str, Callable[[Path], object]] = {
    "document": read_document,
    "text": read_text,
    "plain": open_plain,
    "data": lambda path: read_bytes(path, 100),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match="not a plain file"):
        READERS[name](pipe)


def test_a_run_of_pipes_is_shown_as_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LIVE_FILE)
    assert read_live(tmp_path) is None
    for name in ("events.jsonl", "metrics.csv", "config.yaml"):
        os.mkfifo(tmp_path / name)
    assert not list(RunWatch(tmp_path).look().events)


def test_a_pipe_that_nobody_reads_is_not_written(tmp_path: Path) -> None:
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match="not a plain file"):
        LineFile(pipe)


def test_a_link_in_a_runs_folder_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    for name in ("metrics.csv", "events.jsonl", "config.yaml"):
        (tmp_path / name).symlink_to(precious)
    for name in ("metrics.csv", "events.jsonl"):
        with pytest.raises(BadFile, match="is a symbolic link"):
            LineFile(tmp_path / name)
    write_document(tmp_path / "config.yaml", {"a": 1})
    assert precious.read_text() == "mine\n"
    assert not (tmp_path / "config.yaml").is_symlink()


def test_keys_are_compared_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    keys = [f'"k{number}": 0' for number in range(12_000)]
    path.write_text("{" + ", ".join([*keys, '"k11999": 1']) + "}")
    start = time.process_time()
    with pytest.raises(BadFile, match="'k11999' is written twice"):
        read_document(path)
    assert time.process_time() - start < 2.0
    path.write_text("{" + ", ".join(keys) + "}")
    assert read_document(path) == json.loads(path.read_text())


@pytest.mark.slow
def test_yaml_is_counted_while_it_is_read(tmp_path: Path) -> None:
    """Four megabytes of small lists took over a minute and more than a gigabyte before they were refused."""
    path = tmp_path / "lists.yaml"
    path.write_text("[" + "[],\n" * 10**6 + "]")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(BadFile, match="it holds more than 100000 values"):
        read_document(path)
    assert time.process_time() - start < 20.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 400 * 2**20


def test_a_full_disk_leaves_nothing_beside_the_live_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LIVE_FILE
    live._replace(path, b"old")
    fired: list[int] = []

    def full(descriptor: int, content: bytes) -> int:
        fired.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(live.os, "write", full)
    live._replace(path, b"new")
    monkeypatch.undo()
    assert fired
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == [LIVE_FILE]

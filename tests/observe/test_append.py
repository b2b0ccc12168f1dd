"""Files that grow: whole lines only, whatever happens, from any thread."""

from __future__ import annotations

import csv
import json
import math
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from manyhands.facts.errors import BadFile, BadValue, UnknownName
from manyhands.observe import append
from manyhands.observe.append import LineFile, Metrics


def test_lines_are_there_at_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.txt"
    with LineFile(path) as file:
        file.write("one")
        assert path.read_text() == "one\n"
        file.write("")
    with LineFile(path) as file:
        file.write("zwei ä")
    assert path.read_text() == "one\n\nzwei ä\n"


@pytest.mark.parametrize("torn", ["tor", "x" * 200_000, "\0\0\0"])
@pytest.mark.parametrize("whole", ["", "one\n", "one\n" + "y" * 70_000 + "\n"])
def test_a_torn_line_is_cut_off(whole: str, torn: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text(whole + torn)
    with LineFile(path) as file:
        assert path.read_text() == whole
        file.write("two")
    assert path.read_text() == whole + "two\n"


@pytest.mark.parametrize("line", ["a\nb", "a\n", "\n", "a\rb", "a\u2028b", "\ud800"])
def test_what_is_not_one_line_is_refused(line: str, tmp_path: Path) -> None:
    with LineFile(tmp_path / "lines.txt") as file, pytest.raises(BadValue):
        file.write(line)
    assert (tmp_path / "lines.txt").read_bytes() == b""


def test_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    with LineFile(path) as file:
        threads = [
            threading.Thread(target=lambda n=n: [file.write(f"{n} {i} " + "z" * (i % 50)) for i in range(200)])
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [line.split()[:2] for line in path.read_text().splitlines()]
    for n in range(6):
        assert [int(i) for name, i in found if int(name) == n] == list(range(200))


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write is undone, at the next line at the latest."""
    path = tmp_path / "lines.txt"
    with LineFile(path) as file:
        file.write("one")
        write, cut = os.write, os.ftruncate
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda handle, content: write(handle, content[:2]))
            with pytest.raises(BadFile, match="only 2 of 6 bytes"):
                file.write("wrong")
            assert path.read_text() == "one\n"

            def refuse(handle: int, size: int) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(BadFile, match="Input/output"):
                file.write("wrong")
        assert path.read_text() == "one\nwr"
        assert os.ftruncate is cut
        file.write("two")
    assert path.read_text() == "one\ntwo\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, which is no plain file: it is opened as one here."""
    with pytest.raises(BadFile, match="not a plain file"):
        LineFile("/dev/full")
    monkeypatch.setattr(append, "open_descriptor", lambda path, flags, mode, follows_links: os.open(path, flags))
    with LineFile("/dev/full") as file, pytest.raises(BadFile, match="No space left"):
        file.write("one")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="directory"):
        LineFile(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadFile):
        LineFile(tmp_path / "file" / "events.jsonl")
    with pytest.raises(BadFile):
        Metrics(tmp_path, ["loss"])


def test_closed_is_closed(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines.txt")
    file.close()
    file.close()
    with pytest.raises(BadFile, match="closed"):
        file.write("one")


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = datetime.now(UTC)
    with LineFile(path) as file:
        file.write_event("started", kind="train", devices=("a", "ä\u2028\n\ud800"))
        file.write_event("not-finite", loss=math.nan, more={"worst": [1, -math.inf]})
        for facts in ({"time": 1}, {"event": "x"}, {"what": object()}, {"what": {1, 2}}):
            with pytest.raises(BadValue):
                file.write_event("bad", **facts)
    first, second = map(json.loads, path.read_text().splitlines())
    assert before <= datetime.fromisoformat(first.pop("time")) <= datetime.now(UTC)
    assert first == {"event": "started", "kind": "train", "devices": ["a", "ä\u2028\n\ud800"]}
    assert second.pop("time").endswith("Z")
    assert second == {"event": "not-finite", "loss": "nan", "more": {"worst": [1, "-inf"]}}


def test_metrics_go_on_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,lo")  # a crash in the middle of the header
    with Metrics(path, ["step", "loss"]) as metrics:
        metrics.write(step=0, loss=0.1 + 0.2)
        metrics.write(loss=None, step=np.int64(1))
    with path.open("a") as file:
        file.write("2,0.")
    with Metrics(path, ["step", "loss"]) as metrics:
        metrics.write(step=2, loss=math.nan)
        metrics.write(loss=np.float32(0.5))
    assert path.read_text() == "step,loss\n0,0.30000000000000004\n1,\n2,nan\n,0.5\n"
    assert [row["step"] for row in csv.DictReader(path.read_text().splitlines())] == ["0", "1", "2", ""]


def test_metrics_refuse_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with Metrics(path, ["step", "loss"]) as metrics:
        with pytest.raises(UnknownName, match="Did you mean loss"):
            metrics.write(step=1, los=2.0)
        with pytest.raises(BadValue, match="str"):
            metrics.write(step=1, loss="2,0")  # type: ignore[arg-type]
    assert path.read_text() == "step,loss\n"
    with pytest.raises(BadFile, match="step,loss, not step,seconds"):
        Metrics(path, ["step", "seconds"])
    for columns in ([], ["a", "a"], ["a,b"], [""], ["a\n"], ['"']):
        with pytest.raises(BadValue):
            Metrics(tmp_path / "other.csv", columns)

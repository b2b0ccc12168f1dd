"""Traces from files: one for both directions, one with both, two."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.facts.errors import BadFile
from manyhands.files.traces import read_link_trace

SHARED = Path(__file__).parents[3] / "shared/data/traces"


def test_one_file_or_two(tmp_path: Path) -> None:
    up, down, both = tmp_path / "up.txt", tmp_path / "down.txt", tmp_path / "both,odd.txt"
    up.write_text("0 8\n")
    down.write_text("0 16\n")
    both.write_text("0 8 24\n")
    one = read_link_trace(up)
    assert (one.up.mean, one.down.mean, one.is_one_way) == (1e6, 1e6, True)
    two = read_link_trace(f"{up},{down}")
    assert (two.up.mean, two.down.mean, two.is_one_way) == (1e6, 2e6, False)
    odd = read_link_trace(str(both))  # a comma in a name that exists
    assert (odd.up.mean, odd.down.mean, odd.is_one_way) == (1e6, 3e6, False)


def test_files_that_are_none(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary.txt", tmp_path / "large.txt"
    binary.write_bytes(b"\xff\xfe\x00\x01" * 10)
    with large.open("wb") as file:
        file.truncate(10**9)
    for path, words in (
        (tmp_path / "nowhere.txt", "no such file"),
        (tmp_path, "is a folder"),
        (binary, "not UTF-8"),
        (large, "at most"),
    ):
        with pytest.raises(BadFile, match=words):
            read_link_trace(path)
    for text in ("a,b,c", ",", "a,", "x" * 5000 + ","):
        with pytest.raises(BadFile):
            read_link_trace(text)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the recorded traces are not here")
def test_the_recorded_traces_are_read() -> None:
    files = sorted(SHARED.glob("*/*.txt"))
    assert len(files) >= 100
    index = {
        line.split(",")[0]: float(line.split(",")[5]) for line in (SHARED / "index.csv").read_text().splitlines()[1:]
    }
    for path in files:
        mbit = read_link_trace(path).up.mean * 8 / 1e6
        assert mbit == pytest.approx(index[str(path.relative_to(SHARED))], rel=0.1, abs=0.05), path

"""Stored results, by machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from made_results import LARGE, result, stored
from manyhands.facts.errors import BadFile
from manyhands_bench.everything import WORDS
from manyhands_bench.results import StoredResults, read_results, result_path, write_result


def test_a_result_is_kept_by_machine_and_read_back(tmp_path: Path) -> None:
    first, second = result("tile", memory_ratio_24=8.2), result("tile", LARGE, memory_ratio_24=8.5)
    assert write_result(tmp_path, first) == tmp_path / "intel-xeon-2-cores" / "tile.json"
    assert write_result(tmp_path, second) == tmp_path / "neoverse-n1-16-cores" / "tile.json"
    assert read_results(tmp_path) == [first, second]


def test_a_result_in_another_machines_folder_is_refused(tmp_path: Path) -> None:
    path = write_result(tmp_path, result("tile"))
    path.rename(path.with_name("core.json"))
    with pytest.raises(BadFile, match=r"Move it to .*tile\.json"):
        read_results(tmp_path)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="manyhands bench all"):
        StoredResults.of(tmp_path)


def test_stored_results_are_in_their_envelopes() -> None:
    for one in read_results(stored()):
        path = result_path(stored(), one)
        whole = WORDS[one.name].partition(" --only")[0]  # a run of all parts has these, too
        assert f"manyhands bench {whole}" in one.command, path
        assert one.name in WORDS, path
        assert one.date, path
        assert one.versions.get("torch"), path
        assert json.loads(path.read_text())["host"]["processor"], path

"""A device's own samples: what a file may hold, which samples all have, rows that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data import silo as module
from manyhands.data.silo import DIGEST_BYTES, Silo, agreed, digests_of, write_silo
from manyhands.facts.errors import BadData, BadFile, ManyhandsError

LEFT = numpy.arange(12, dtype=numpy.float32).reshape(4, 3)


def written(folder: Path, **arrays: Any) -> Path:
    path = folder / "own.npz"
    numpy.savez(path, **arrays)
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    write_silo(path, ["d", "a", "c", "b"], {"left": LEFT, "target": numpy.array([3, 0, 2, 1])})
    found = Silo.read(path)
    assert len(found) == 4
    assert found.take("left", torch.tensor([2, 0])).tolist() == LEFT[[2, 0]].tolist()
    assert found.take("target", torch.tensor([1])).tolist() == [0]
    assert found.digests() == digests_of(["d", "a", "c", "b"])
    assert len(found.digests()) == 4 * DIGEST_BYTES


@pytest.mark.parametrize("kind", [numpy.uint16, ">f8", "float16", "uint8", "bool"])
def test_kinds_of_numbers(tmp_path: Path, kind: Any) -> None:
    values = numpy.array([[1, 0], [0, 1]]).astype(kind)
    found = Silo.read(written(tmp_path, id=[1, 2], left=values))
    assert found.take("left", torch.tensor([1, 0])).tolist() == values[[1, 0]].tolist()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"left": LEFT}, "has no id"),
        ({"id": [1, 2, 3, 4]}, "nothing else"),
        ({"id": [1, 2, 2, 4], "left": LEFT}, "id 2 is there 2 times"),
        ({"id": [1, 2, 3], "left": LEFT}, "a row for each"),
        ({"id": [1.0, 2, 3, 4], "left": LEFT}, "ids are whole numbers"),
        ({"id": [[1, 2, 3, 4]], "left": LEFT}, "one axis"),
        ({"id": numpy.array(["x" * 300, "b", "c", "d"]), "left": LEFT}, "text of at most"),
        ({"id": [1, 2, 3, 4], "left": LEFT.astype(str)}, "are numbers"),
        ({"id": [1, 2, 3, 4], "left": numpy.full_like(LEFT, numpy.nan)}, "NaN or infinite"),
        ({"id": [1, 2, 3, 4], "left": numpy.array(7.0)}, "a row for each"),
        ({"id": numpy.zeros(0, dtype=int), "left": LEFT[:0]}, "one axis of 1 to"),
    ],
)
def test_what_a_file_may_not_hold(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(BadData, match=words):
        Silo.read(written(tmp_path, **arrays))


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFile, match="no such file"):
        Silo.read(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("id,left")
    with pytest.raises(BadFile, match=r"not a \.npz"):
        Silo.read(tmp_path / "text.npz")
    whole = written(tmp_path, id=[1, 2, 3, 4], left=LEFT)
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ManyhandsError):
        Silo.read(tmp_path / "cut.npz")
    numpy.savez(tmp_path / "objects.npz", id=numpy.array([1, 2]), left=numpy.array([{}, {}], dtype=object))
    with pytest.raises(BadFile, match="cannot be read"):
        Silo.read(tmp_path / "objects.npz")
    monkeypatch.setattr(module, "LARGEST_SILO_BYTES", 100)
    with pytest.raises(BadData, match="at most"):
        Silo.read(whole)


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_is_not_there(tmp_path: Path, row: int) -> None:
    found = Silo.read(written(tmp_path, id=[1, 2, 3, 4], left=LEFT))
    with pytest.raises(BadData, match=f"asked for sample {row}; it has 4"):
        found.take("left", torch.tensor([0, row]))
    with pytest.raises(BadData, match="has no right; it has left"):
        found.take("right", torch.tensor([0]))


IDS = st.lists(st.integers(0, 30), unique=True, max_size=20)


@pytest.mark.slow
@given(first=IDS, second=IDS, third=IDS)
def test_samples_that_all_have_in_the_first_ones_order(first: list[int], second: list[int], third: list[int]) -> None:
    everybody = {"a": first, "b": [str(one) for one in second], "c": third}
    told = {name: digests_of(ids) for name, ids in everybody.items()}
    common = [one for one in first if one in second and one in third]
    if not common:
        with pytest.raises(BadData, match="no sample that all have; ids: a"):
            agreed(told)
        return
    fingerprint, rows = agreed(told)
    for name, ids in everybody.items():
        assert [str(ids[row]) for row in rows[name].tolist()] == [str(one) for one in common]
    again, _ = agreed({name: told[name] for name in ("a", "c", "b")})
    assert again == fingerprint, "only the first one's order counts"
    if len(common) > 1:
        turned, _ = agreed({**told, "a": digests_of(first[::-1])})
        assert turned != fingerprint


@pytest.mark.parametrize(
    ("digests", "words"),
    [(digests_of([1, 2, 1]), "1 of its ids twice"), (b"x" * 17, "17 bytes of ids")],
)
def test_ids_that_make_no_sense(digests: bytes, words: str) -> None:
    with pytest.raises(BadData, match=words):
        agreed({"a": digests_of([1, 2]), "b": digests})

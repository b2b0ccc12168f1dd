"""Which data set is meant: a name, a folder or a file; and what is said when it is none."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from manyhands.data.sets import NAMES, load
from manyhands.facts.errors import BadFile, UnknownName


def test_every_name_loads() -> None:
    for name in NAMES:
        sets = load(name)
        value, label = sets.train[0]
        assert sets.name == name
        assert tuple(value.shape) == sets.input_shape
        assert 0 <= int(label) < sets.num_classes == len(sets.classes)


@pytest.mark.parametrize("name", ["digit", "imagenet", ""])
def test_unknown_names_say_what_may_be_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not name:
        name = "?"
    with pytest.raises(UnknownName, match=r"There is no data set called") as caught:
        load(name)
    assert "digits" in caught.value.hint
    assert "folder" in caught.value.hint
    assert ".npz" in caught.value.hint


def test_paths_that_lead_nowhere_or_to_something_else(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="there is no such file or folder"):
        load(str(tmp_path / "cats"))
    with pytest.raises(BadFile, match=r"a\.npz: there is no such file"):
        load(str(tmp_path / "a.npz"))
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(BadFile, match=r"'\.csv' is not the suffix of a data file") as caught:
        load(str(tmp_path / "a.csv"))
    assert caught.value.hint == "Give a .npz file or a folder of data."


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("bccd.tar.gz", "mkdir -p bccd && tar xzf bccd.tar.gz -C bccd"),
        ("BCCD.TGZ", "mkdir -p BCCD && tar xzf BCCD.TGZ -C BCCD"),
        ("cells.tar", "mkdir -p cells && tar xf cells.tar -C cells"),
        ("my cells.zip", "mkdir -p 'my cells' && unzip 'my cells.zip' -d 'my cells'"),
    ],
)
def test_an_archive_must_be_unpacked_and_how(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(b"packed")
    with pytest.raises(BadFile, match="is a packed archive") as caught:
        load(name)
    assert caught.value.hint == f"Unpack it first and give the folder: {command}"


def test_a_name_goes_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    numpy.savez(tmp_path / "digits.npz", x=numpy.zeros((10, 4)), y=numpy.zeros(10, dtype=int))
    assert load("digits").num_classes == 10
    assert load("digits.npz").num_classes == 1
    assert load(tmp_path / "digits.npz").input_shape == (4,)

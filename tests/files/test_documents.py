"""Documents on disk: read with care, written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.facts.presets import PRESETS
from manyhands.files import documents
from manyhands.files.documents import cache_folder, load_cluster, read_document, write_document, write_text_atomic

plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".JSON"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=plain)
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str, data: object) -> None:
    path = tmp_path / f"a{suffix}"
    write_document(path, data)
    assert read_document(path) == data
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "devices:\n  - {kind: pi4\nlink: 3\n", r"a\.yaml, line 3, column \d+: "),
        ("a.yaml", "a: 1\n\tb: 2\n", r"a\.yaml, line 2, column \d+: "),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", r"a\.yaml, line 1, column 4: could not determine"),
        ("a.yaml", "a: 1\nb: \x01\n", r"a\.yaml: unacceptable character"),
        ("a.yaml", "when: 2024-13-45\n", r"a\.yaml: month must be in 1..12"),
        ("a.yaml", "[" * 5000, r"a\.yaml: .*nested too deeply"),
        ("a.yaml", "a: 1\n---\nb: 2\n", r"a\.yaml, line 2"),
        ("a.json", '{"a": 1,\n "b": }\n', r"a\.json, line 2, column 7: Expecting value"),
        ("a.json", '{"a": NaN}', r"a\.json: NaN is not a JSON number"),
        ("a.json", "[" * 200_000, r"a\.json: .*nested too deeply"),
        ("a.json", "", r"a\.json, line 1, column 1: Expecting value"),
        ("a.toml", "a = 1", r"a\.toml: '\.toml' is not a document's suffix"),
        ("a", "a: 1", "a: a document's name needs a suffix"),
    ],
)
def test_bad_files_are_refused_with_path_and_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(BadFile, match=message) as caught:
        read_document(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(BadFile, match=r"line 2: byte 8 is not UTF-8"):
        read_document(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")  # a byte-order mark, as some editors leave
    assert read_document(path) == {"a": 1}


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("a: 1")
    with pytest.raises(BadFile, match=r"clustr\.yaml: there is no such file") as caught:
        read_document(tmp_path / "clustr.yaml")
    assert caught.value.hint == "Did you mean cluster.yaml?"
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(BadFile, match="is a folder"):
        read_document(tmp_path / "folder.yaml")
    with pytest.raises(BadFile, match="no such file"):
        read_document(tmp_path / "nowhere" / "a.yaml")


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix, most_bytes in ((".json", documents.LARGEST_DOCUMENT_BYTES), (".yaml", documents.LARGEST_YAML_BYTES)):
        path = tmp_path / f"a{suffix}"
        with open(path, "wb") as file:
            file.truncate(most_bytes + 1)  # a hole: takes no room
        with pytest.raises(BadFile, match=f"at most {most_bytes // 10**6} MB"):
            read_document(path)
    monkeypatch.setattr(documents, "LARGEST_YAML_BYTES", 4)
    path.write_text("a: 1")
    assert read_document(path) == {"a": 1}
    path.write_text("a: 12")
    with pytest.raises(BadFile, match="at most 4 B"):
        read_document(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.json", object()), ("a.yaml", object()), ("a.json", {"a": {1, 2}}), ("a.json", {"a": "\ud800"})],
)
def test_what_cannot_be_written_leaves_the_old_document(tmp_path: Path, name: str, data: object) -> None:
    path = tmp_path / name
    write_document(path, {"old": 1})
    with pytest.raises(BadValue, match="cannot be written") as caught:
        write_document(path, data)
    assert str(path) in str(caught.value)
    assert read_document(path) == {"old": 1}
    assert os.listdir(tmp_path) == [name]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="Out of range"):
        write_document(tmp_path / "a.json", {"a": float("inf")})
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_midway_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text_atomic(path, "old")
    calls = []

    def full_disk(handle: int) -> None:
        calls.append(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(BadFile, match=r"a\.txt: cannot be written: No space left"):
        write_text_atomic(path, "new")
    assert calls, "the fault did not fire"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_new_text_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b))[1])
    write_text_atomic(tmp_path / "new" / "folder" / "a.txt", "text")
    assert order == ["sync", "rename", "sync"]
    assert (tmp_path / "new" / "folder" / "a.txt").read_text() == "text"


def test_others_may_read_what_is_written_where_they_may_look_and_no_link_is_written_through(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    target, link = tmp_path / "a.txt", tmp_path / "link.txt"
    old = os.umask(0o022)
    try:
        write_text_atomic(target, "one")
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    link.symlink_to(target)
    write_text_atomic(link, "two")
    assert not link.is_symlink()
    assert (link.read_text(), target.read_text()) == ("two", "one")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MANYHANDS_HOME")
    assert cache_folder() == tmp_path / "xdg" / "manyhands"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "me" / ".cache" / "manyhands"


def test_a_cluster_by_preset_by_count_or_by_file(tmp_path: Path) -> None:
    assert load_cluster("env-c") == preset("env-c")
    assert load_cluster("local:3") == Cluster.local(3)
    for name in ("mine.yaml", "mine.json"):
        write_document(tmp_path / name, preset("home").to_dict())
        assert load_cluster(tmp_path / name) == preset("home")
        assert load_cluster(str(tmp_path / name)) == preset("home")
    (tmp_path / "attic.yaml").write_text("devices:\n  - {kind: pi4, count: 2}\nlink: {rate: 1 Gbit/s, delay: 1 ms}\n")
    attic = load_cluster(tmp_path / "attic.yaml")
    assert (attic.name, attic.names) == ("attic", ("pi4-1", "pi4-2"))


def test_a_cluster_nobody_knows() -> None:
    with pytest.raises(UnknownName, match="'env-f'") as caught:
        load_cluster("env-f")
    assert any(name in caught.value.hint for name in PRESETS)
    assert ".yaml" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["local:", "local:x", "local:-1", "local:0", "local:99999", "local:1e3", "local:" + "9" * 5000]
)
def test_local_needs_a_number(name: str) -> None:
    with pytest.raises(BadValue, match="local"):
        load_cluster(name)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ({"devices": [{"kind": "pi9"}]}, UnknownName, r"devices\[0\]\.kind"),
        ({"devices": []}, BadValue, "devices: "),
        ([1], BadFile, "cluster: "),
    ],
)
def test_a_bad_cluster_file_is_named(tmp_path: Path, content: object, kind: type[ManyhandsError], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(kind, match=message) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")

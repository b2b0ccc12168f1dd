"""Runs are remembered wherever they are written; the list is never in anybody's way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from manyhands.observe import recent
from manyhands.observe.recent import recent_runs, remember


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_the_newest_comes_first_and_each_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = made(tmp_path / "one"), made(tmp_path / "deep" / "two")
    remember(one)
    remember(Path("deep/two"))
    assert recent_runs() == [two, one]
    remember(one)  # it goes on
    assert recent_runs() == [one, two]
    assert len(list((home / "recent").iterdir())) == 2


def test_what_is_gone_is_dropped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MOST_RECENT", 2)
    folders = [made(tmp_path / name) for name in "abcd"]
    remember(folders[0])
    remember(folders[1])
    folders[0].rmdir()
    assert recent_runs() == [folders[1]]
    remember(folders[2])
    assert len(list((home / "recent").iterdir())) == 2
    remember(folders[3])
    assert recent_runs() == [folders[3], folders[2]], "the oldest is forgotten"


def test_many_begin_at_once(home: Path, tmp_path: Path) -> None:
    folders = [made(tmp_path / str(number)) for number in range(16)]
    threads = [threading.Thread(target=remember, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(recent_runs()) == sorted(folders)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"folder": 3}', '{"folder": "relative"}', '{"folder": "/a\\u0000b"}']
)
def test_a_broken_entry_is_none(home: Path, tmp_path: Path, content: str) -> None:
    remember(made(tmp_path / "one"))
    (home / "recent" / "broken.json").write_text(content)
    assert recent_runs() == [tmp_path / "one"]
    remember(made(tmp_path / "two"))
    assert not (home / "recent" / "broken.json").exists()


def test_where_it_cannot_be_written_nothing_is_said(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file where the folder should be")
    remember(made(tmp_path / "one"))
    assert recent_runs() == []
    monkeypatch.setattr(recent, "cache_folder", lambda: Path("~nobody-of-that-name").expanduser())
    remember(tmp_path / "one")
    assert recent_runs() == []
    assert os.listdir(tmp_path / "one") == []

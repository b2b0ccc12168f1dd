"""The shared token: made once, kept for its owner alone, and never lost to an unlucky moment."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from manyhands.facts.errors import BadFile
from manyhands.runtime import shared_token as shared
from manyhands.runtime.coordinator import Coordinator


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "deep" / "home"
    monkeypatch.setenv("MANYHANDS_HOME", str(found))
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_once_and_only_its_owner_reads_it(home: Path) -> None:
    before = os.umask(0)
    try:
        token = shared.shared_token()
    finally:
        os.umask(before)
    assert shared.shared_token() == token == shared.known_token()
    assert mode(home / "token") == 0o600
    assert mode(home) == 0o700
    assert [path.name for path in home.iterdir()] == ["token"], "nothing else is left"


def test_others_lose_the_right_to_read_it(home: Path) -> None:
    shared.shared_token()
    (home / "token").chmod(0o644)
    shared.shared_token()
    assert mode(home / "token") == 0o600


def test_all_who_start_at_one_moment_have_the_same(home: Path) -> None:
    found: list[str] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait(10)
        found.append(shared.shared_token())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_new_one(home: Path) -> None:
    own = shared.shared_token()
    assert shared.renew_token() == home / "token" == shared.token_path()
    assert shared.shared_token() == shared.known_token() != own
    assert mode(home / "token") == 0o600


def test_one_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("many-hands\n")
    path.chmod(0o644)
    assert shared.read_token_file(str(path)) == "many-hands"
    assert mode(path) == 0o600, "from now on it is its owner's alone"
    with pytest.raises(BadFile, match="no such file"):
        shared.read_token_file(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="not a plain file"):
        shared.read_token_file(str(tmp_path / "pipe"))


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"\xff\x00", b"x" * 500])
def test_a_file_that_holds_no_token(home: Path, content: bytes) -> None:
    home.mkdir(parents=True)
    (home / "token").write_bytes(content)
    with pytest.raises(BadFile, match="is not a token") as found:
        shared.shared_token()
    assert f"rm {home / 'token'}" in found.value.hint


def test_one_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "file" / "home"))
    said: list[str] = []
    monkeypatch.setattr(shared, "_read", lambda path: "")
    assert len(shared.shared_token(said.append)) > 20
    assert len(said) == 1
    assert "the next run will ask for another" in said[0]


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert shared.config_folder() == Path("/home/someone/.config/manyhands")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/other")
    assert shared.config_folder() == Path("/etc/other/manyhands")


def test_coordinators_that_others_can_join_share_it(home: Path) -> None:
    with Coordinator() as here:
        assert not home.exists(), "what only this machine joins needs no token that lasts"
    tokens = []
    for _ in range(2):
        with Coordinator("0.0.0.0") as coordinator:
            tokens.append(coordinator.token)
            assert coordinator.token not in coordinator.join_command(), "hints are kept in logs"
    assert tokens == [shared.known_token()] * 2
    assert here.token not in tokens
    with Coordinator("0.0.0.0", 0, "a token of mine") as coordinator:
        assert coordinator.token == "a token of mine"

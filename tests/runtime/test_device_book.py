"""The keys that a device knows: kept for its owner alone, never half written, and what may be done with them."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from manyhands.facts.errors import BadFile, BadValue, Refused
from manyhands.runtime.device_book import DeviceBook, knows_any, own_credentials, own_key
from manyhands.transport.keys import Role, new_private_key

PI, DESK, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))


@pytest.fixture
def book(tmp_path: Path) -> DeviceBook:
    return DeviceBook(tmp_path / "home", own_key=b"\7" * 32)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_who_joined_is_known_from_then_on(book: DeviceBook) -> None:
    assert book.find(PI) is None
    assert book.devices() == []
    assert book.join(PI, "pi", Role.WORKER)
    assert not book.join(PI, "pi", Role.WORKER), "it is no news"
    book.join(PI, "pi.2", Role.WORKER)
    found = book.find(PI)
    assert found is not None
    assert (found.name, found.roles, found.is_revoked) == ("pi", {Role.WORKER}, False)
    again = DeviceBook(book.path.parent)
    assert [one.names for one in again.devices()] == [["pi", "pi.2"]]
    assert again.public_keys(Role.WORKER) == [PI]
    assert again.public_keys(Role.COORDINATOR) == []
    assert mode(book.path) == 0o600
    assert mode(book.path.parent) == 0o700


def test_a_name_is_the_keys_that_had_it_first(book: DeviceBook) -> None:
    book.join(PI, "pi", Role.WORKER)
    with pytest.raises(Refused, match="pi has joined before with the key") as caught:
        book.join(OTHER, "pi", Role.WORKER)
    assert "manyhands devices forget pi" in caught.value.hint
    assert book.is_taken("pi", OTHER)
    assert book.is_taken("pi", b""), "one without a key"
    assert not book.is_taken("pi", PI)
    assert not book.is_taken("other", OTHER)
    assert book.find(OTHER) is None


def test_revoked_and_forgotten(book: DeviceBook) -> None:
    book.join(PI, "pi", Role.WORKER)
    seen = DeviceBook(book.path.parent)
    assert seen.find(PI) is not None
    book.revoke("pi")
    found = seen.find(PI)
    assert found is not None
    assert found.is_revoked, "whoever has the book open sees it at once"
    assert book.public_keys(Role.WORKER)[1:] == []
    book.forget("pi")
    assert seen.find(PI) is None
    for what in (book.revoke, book.forget):
        with pytest.raises(BadValue, match="No device called 'pi' has joined; known devices: none yet"):
            what("pi")
    book.join(DESK, "desk", Role.COORDINATOR)
    with pytest.raises(BadValue, match="known devices: desk"):
        book.revoke("dusk")
    assert book.revoke(book.devices()[0].fingerprint).name == "desk", "by its fingerprint, too"


def test_another_role_is_allowed_by_hand_only(book: DeviceBook) -> None:
    book.join(PI, "pi", Role.WORKER)
    book.join(PI, "pi", Role.COORDINATOR)
    found = book.find(PI)
    assert found is not None
    assert found.roles == {Role.WORKER}, "joining adds no role"
    book.allow("pi", Role.COORDINATOR)
    found = book.find(PI)
    assert found is not None
    assert found.roles == set(Role)


def test_this_device_trusts_itself(book: DeviceBook) -> None:
    own = b"\7" * 32
    found = book.find(own)
    assert found is not None
    assert found.roles == set(Role)
    assert not book.join(own, "pi", Role.WORKER)
    assert not book.path.exists(), "nothing is written"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"[" * 10_000, b'{"version": 2, "devices": []}', b"\xff", b'{"version": 1, "devices": [{}]}',
        b'{"version": 1, "devices": [{"key": "zz", "names": ["a"], "roles": [], "first_joined": "", "last_seen": ""}]}',
        b'{"version": 1, "devices": [{"key": "00", "names": ["a"], "roles": [], "first_joined": "", "last_seen": ""}]}',
        b'{"version": 1, "devices": [{"key": "%s", "names": [], "roles": [], "first_joined": "", "last_seen": ""}]}'
        % (b"00" * 32), b'{"version": 1, "devices": [{"key": "%s", "names": ["\\u001b"], "roles": [], "first_joined": '
        b'"", "last_seen": ""}]}' % (b"00" * 32),
    ],
)  # fmt: skip
def test_a_file_that_is_none_lets_nobody_in(book: DeviceBook, content: bytes) -> None:
    book.path.parent.mkdir()
    book.path.write_bytes(content)
    for what in (lambda: book.find(PI), book.devices, lambda: book.join(PI, "pi", Role.WORKER)):
        with pytest.raises(BadFile, match="cannot be read"):
            what()
    assert book.path.read_bytes() == content, "it is left as it is"


def test_a_pipe_is_not_waited_for(book: DeviceBook) -> None:
    book.path.parent.mkdir()
    os.mkfifo(book.path)
    with pytest.raises(BadFile):
        book.find(PI)


def test_many_at_once(book: DeviceBook) -> None:
    """Processes have books of their own: nobody's entry is lost."""
    keys = [bytes([number]) * 32 for number in range(20, 40)]

    def join(key: bytes) -> None:
        DeviceBook(book.path.parent).join(key, f"pi-{key[0]}", Role.WORKER)

    threads = [threading.Thread(target=join, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(book.devices()) == 20


def test_the_own_key_is_made_once(tmp_path: Path) -> None:
    assert own_key(tmp_path, make=False) is None
    found: list[bytes] = []

    def make() -> None:
        key = own_key(tmp_path)
        assert key is not None
        found.append(key.public)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert mode(tmp_path / "device-key") == 0o600
    (tmp_path / "device-key").write_text("nonsense")
    with pytest.raises(BadFile, match="is not this device's key"):
        own_key(tmp_path)


def test_one_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    assert own_credentials(Role.WORKER, said.append, tmp_path / "file" / "home") is None
    assert len(said) == 1
    assert "the token is needed every time" in said[0]


def test_who_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path))
    assert not knows_any(Role.COORDINATOR)
    DeviceBook(tmp_path).join(DESK, "desk", Role.COORDINATOR)
    assert knows_any(Role.COORDINATOR)
    assert not knows_any(Role.WORKER)
    DeviceBook(tmp_path).revoke("desk")
    assert not knows_any(Role.COORDINATOR)
    assert not (tmp_path / "device-key").exists()


def test_private_keys_differ() -> None:
    assert len({new_private_key() for _ in range(20)}) == 20

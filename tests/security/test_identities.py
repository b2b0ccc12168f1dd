"""Coordinators and workers that know each other: each device has a folder of its own, as on machines of its own."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from manyhands.facts.errors import ManyhandsError, Refused
from manyhands.runtime import coordinator as coordinators
from manyhands.runtime import dialler
from manyhands.runtime.audit import entries
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.device_book import DeviceBook, own_credentials, own_key
from manyhands.runtime.joining import Joining
from manyhands.runtime.serving import listen
from manyhands.runtime.worker import Worker
from manyhands.transport.keys import Role, fingerprint
from manyhands.transport.proofs import DIALLED
from manyhands.transport.transport import TcpTransport

TOKEN = "kettle-on-the-hob-9"
HERE = "127.0.0.1"


def until(is_so: Callable[[], object], limit_seconds: float = 20.0) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Desk:
    """A device that coordinates, beyond loopback."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.heard = home, list[str]()
        monkeypatch.setenv("MANYHANDS_HOME", str(home))

    def opened(self, token: str = TOKEN) -> Coordinator:
        return Coordinator(
            "0.0.0.0", 0, token, on_event=self.heard.append, announce=False, heartbeat_timeout_seconds=1.0,
            heartbeat_seconds=0.1,
            credentials=own_credentials(Role.COORDINATOR, folder=self.home),
        )  # fmt: skip

    @property
    def book(self) -> DeviceBook:
        return DeviceBook(self.home)


class Device:
    """A device that works, in a thread."""

    def __init__(self, home: Path, name: str = "", is_named: bool = True) -> None:
        self.home, self.name, self.is_named = home, name, is_named
        self.error: ManyhandsError | None = None
        self.worker: Worker | None = None

    def joining(self, coordinator: Coordinator, token: str) -> Joining:
        return Joining(
            HERE, coordinator.address[1], token, self.name, encrypted=True, is_named=self.is_named, limit_seconds=5.0,
            credentials=partial(own_credentials, Role.WORKER, folder=self.home),
        )  # fmt: skip

    def joins(self, coordinator: Coordinator, token: str = "") -> None:
        """It is here, or the reason why not is raised."""
        count = len(coordinator.alive())
        self._start(coordinator, token)
        until(lambda: self.error is not None or len(coordinator.alive()) > count)
        if self.error is not None:
            raise self.error

    def refuses(self, coordinator: Coordinator, token: str) -> None:
        """The coordinator would take it, but it does not want to: the reason is raised."""
        self._start(coordinator, token)
        until(lambda: self.error is not None)
        assert self.error is not None
        raise self.error

    def _start(self, coordinator: Coordinator, token: str) -> None:
        self.error = None
        self.worker = Worker(self.joining(coordinator, token), TcpTransport())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        assert self.worker is not None
        try:
            self.worker.run()
        except ManyhandsError as error:
            self.error = error

    @property
    def key(self) -> str:
        found = own_key(self.home)
        assert found is not None
        return fingerprint(found.public)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    DIALLED.reset()
    yield Desk(tmp_path / "desk", monkeypatch)
    DIALLED.reset()


@pytest.fixture
def pi(tmp_path: Path) -> Device:
    return Device(tmp_path / "pi", "pi")


def test_the_token_once_and_then_the_keys(desk: Desk, pi: Device) -> None:
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
    assert [(one.name, one.roles, one.fingerprint) for one in desk.book.devices()] == [("pi", ["worker"], pi.key)]
    assert [one.roles for one in DeviceBook(pi.home).devices()] == [["coordinator"]]
    assert not any(TOKEN in path.read_text() for path in pi.home.iterdir()), "one who steals it has no token"
    with desk.opened("quite another token") as coordinator:
        pi.joins(coordinator)
        assert coordinator.members["pi"].channel.peer_key.hex() == desk.book.devices()[0].key
    found = entries(desk.home)
    assert [(one["event"], one["name"], one["is_new"]) for one in found if one["event"] == "joined"] == [
        ("joined", "pi", 1), ("joined", "pi", 0),
    ]  # fmt: skip


def test_a_device_that_is_not_known_needs_the_token(desk: Desk, pi: Device) -> None:
    with desk.opened() as coordinator:
        with pytest.raises(Refused, match="does not know this device's key, and asks for the token"):
            pi.joins(coordinator)
        with pytest.raises(Refused, match="the token is not the one"):
            pi.joins(coordinator, "a wrong token")
        until(lambda: desk.heard)
        assert desk.heard == ["Warning: a wrong token came from 127.0.0.1. The sender was not let in."]
        assert desk.book.devices() == []
        pi.joins(coordinator, TOKEN)
    assert entries(desk.home)[0]["event"] == "failed proof"


def test_many_wrong_tokens_are_told_of_by_number(desk: Desk, pi: Device) -> None:
    with desk.opened() as coordinator:
        for number in range(5):
            with pytest.raises(Refused):
                pi.joins(coordinator, f"a wrong token {number}")
        until(lambda: desk.heard)
    assert len(desk.heard) == 2, "the first at once, the others at the end at the latest"
    assert desk.heard[1].startswith("Warning: 4 wrong proofs of the token from 127.0.0.1 in the last")
    assert sum(int(one["count"]) for one in entries(desk.home) if one["event"] == "failed proof") == 5


@pytest.mark.slow
def test_one_with_the_name_of_another(desk: Desk, pi: Device, tmp_path: Path) -> None:
    """With a name given by hand it is refused; a host's name that another device has gets a number."""
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
    with desk.opened() as coordinator:
        other = Device(tmp_path / "other", "pi")
        with pytest.raises(Refused, match="A device called pi has joined before with another key") as caught:
            other.joins(coordinator, TOKEN)
        assert "manyhands devices forget pi" in caught.value.hint
        other.is_named = False
        with pytest.raises(Refused) as renamed:
            other.joins(coordinator, TOKEN)
        assert renamed.value.name == "pi-2"  # type: ignore[attr-defined]
        other.name = "pi-2"
        other.joins(coordinator, TOKEN)
        keyless = Device(tmp_path / "keyless", "pi")
        joining = dataclasses.replace(keyless.joining(coordinator, TOKEN), credentials=lambda: None)
        with pytest.raises(Refused, match="this one shows no key"):
            Worker(joining, TcpTransport()).run()
        pi.joins(coordinator)
    desk.book.forget("pi")
    with desk.opened() as coordinator:
        other.name, other.is_named = "pi", True
        other.joins(coordinator)
    assert any(one["event"] == "refused" for one in entries(desk.home))


def test_a_coordinator_that_has_another_key_by_now(desk: Desk, pi: Device, tmp_path: Path) -> None:
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
    (desk.home / "device-key").unlink()
    with desk.opened() as coordinator:
        with pytest.raises(Refused, match="asks for the token"):
            pi.joins(coordinator)
        with pytest.raises(Refused, match=r"has joined before with the key .*; this one shows"):
            pi.refuses(coordinator, TOKEN)
        known = DeviceBook(pi.home)
        known.forget(known.devices()[0].name)
        until(lambda: not coordinator.alive())
        pi.joins(coordinator, TOKEN)


def test_revoked(desk: Desk, pi: Device) -> None:
    """At once: whoever is here goes, and does not come back, with the token or without; until it is forgotten."""
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
        member = coordinator.members["pi"]
        desk.book.revoke("pi")
        until(lambda: member.is_lost)
        assert member.reason == "its key was revoked"
        for token in ("", TOKEN):
            with pytest.raises(Refused, match="this device's key was revoked there"):
                pi.joins(coordinator, token)
        until(lambda: any("Warning: pi is refused: its key was revoked here" in line for line in desk.heard))
        desk.book.forget("pi")
        with pytest.raises(Refused, match="asks for the token"):
            pi.joins(coordinator)
        pi.joins(coordinator, TOKEN)
    assert {"evicted", "refused"} <= {str(one["event"]) for one in entries(desk.home)}


def test_a_worker_cannot_act_as_coordinator(desk: Desk, pi: Device, tmp_path: Path) -> None:
    """Neither to one that knows it as a worker, nor by the key it joined with: not even with the token."""
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
    stop, found = threading.Event(), threading.Event()
    where: list[tuple[str, int]] = []

    def told(address: tuple[str, int], token: str) -> None:
        where.append(address)
        found.set()

    joining = Joining(
        HERE, 0, TOKEN, "desk", encrypted=True, credentials=partial(own_credentials, Role.WORKER, folder=desk.home)
    )
    thread = threading.Thread(target=listen, args=(joining,), kwargs={"on_listening": told, "stopping": stop})
    thread.start()
    assert found.wait(10)
    try:
        with Coordinator(credentials=own_credentials(Role.COORDINATOR, folder=pi.home)) as rogue:
            with pytest.raises(Refused, match=r"in another role|known here as a coordinator"):
                rogue.invite(*where[0], TOKEN, once=True)
            DeviceBook(pi.home).forget(DeviceBook(pi.home).devices()[0].name)
            with pytest.raises(Refused, match="knows this device's key in another role"):
                rogue.invite(*where[0], TOKEN, once=True)
            desk.book.allow("pi", Role.COORDINATOR)
            assert rogue.invite(*where[0], TOKEN, once=True) == "desk"
    finally:
        stop.set()
        thread.join(20)


def test_local_runs_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "home"))
    used: list[str] = []
    for module in (coordinators, dialler):
        monkeypatch.setattr(module, "own_credentials", lambda *_: used.append("key"))
    with Coordinator(heartbeat_timeout_seconds=1.0, heartbeat_seconds=0.1) as coordinator:
        assert coordinator.security.is_secret
        worker = Worker(Joining(*coordinator.address, coordinator.token, "pi"), TcpTransport())
        thread = threading.Thread(target=worker.run)
        thread.start()
        coordinator.wait_for(["pi"], 10)
    thread.join(10)
    assert not (tmp_path / "home").exists()
    assert used == []


def test_workers_meet_by_the_runs_own_secret(desk: Desk, pi: Device, tmp_path: Path) -> None:
    """One who knows only the token cannot connect to where tensors come in."""
    other = Device(tmp_path / "other", "other")
    with desk.opened() as coordinator:
        pi.joins(coordinator, TOKEN)
        other.joins(coordinator, TOKEN)
        assert pi.worker is not None
        assert other.worker is not None
        peers = {"pi": (HERE, pi.worker.endpoint.address[1]), "other": (HERE, other.worker.endpoint.address[1])}
        thread = threading.Thread(target=pi.worker.endpoint.connect, args=({"other": peers["other"]}, 10.0))
        thread.start()
        other.worker.endpoint.connect({"pi": peers["pi"]}, 10.0)
        thread.join(10)
        assert pi.worker.endpoint.is_connected("other")
        assert coordinator.secret not in (TOKEN, coordinator.token)
    assert not any(coordinator.secret in path.read_text() for path in desk.home.iterdir())
    assert os.environ["MANYHANDS_HOME"] == str(desk.home)

"""A slow or flooding client cannot stall a run: it ends with the same numbers, and not much later."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import Attack, asking_for_data, guessing, loud, one_of_the_house, silent, slow
from looking import assert_private, holding, processes_showing

from manyhands.facts.errors import Refused
from manyhands.runtime import event_queue
from manyhands.runtime.control_messages import Heartbeat
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.event_queue import EventQueue
from manyhands.transport import listener as listening
from manyhands.transport import security as rules
from manyhands.transport.channel import Listener, connect
from manyhands.transport.security import Security, new_token
from real_runs import Ran, assert_same, names, shared, train, workers

STEPS = 30
MOST_TIMES_LONGER, MOST_SECONDS_LONGER = 10.0, 30.0
"""Machines of tests are busy; a run that is stalled takes until its limit, which is minutes."""


KINDS = ("silent", "slow", "loud", "guessing", "house", "data")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with workers(2, logs=tmp_path_factory.mktemp("logs") / "workers") as found:
        yield found


@pytest.fixture(scope="module")
def alone(coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, float]:
    """The run without an attack, and how long it takes."""
    start = time.monotonic()
    found = train(coordinator, shared(names(coordinator), 6, 6), tmp_path_factory.mktemp("alone"), steps=STEPS)
    return found, time.monotonic() - start


def attacks_on(coordinator: Coordinator, kind: str) -> list[Attack]:
    address, security = coordinator.address, coordinator.security
    data_address, data = coordinator.endpoint.address, Security(coordinator.secret, security.encrypted)
    own = next(iter(coordinator.members.values())).address
    found = {
        "silent": [silent(address, 300, security), silent(own, 100, security)],
        "slow": [slow(address, security, 0.02) for _ in range(5)],
        "loud": [loud(address), loud(own), loud(data_address)],
        "guessing": [guessing(address, security.encrypted)],
        "house": [one_of_the_house(address, security)],
        "data": [asking_for_data(data_address, data), asking_for_data(own, data)],
    }
    return [one for attacks in found.values() for one in attacks] if kind == "all" else found[kind]


def assert_as_alone(coordinator: Coordinator, attacked: Ran, seconds: float, alone: tuple[Ran, float]) -> None:
    known, seconds_alone = alone
    assert attacked.result.steps == known.result.steps == STEPS
    assert attacked.result.losses == known.result.losses
    assert_same(attacked.state, known.state)
    assert all(not coordinator.members[name].is_lost for name in known.result.logs)
    assert seconds < MOST_TIMES_LONGER * seconds_alone + MOST_SECONDS_LONGER


@pytest.mark.slow
@pytest.mark.xdist_group("flooding")
@pytest.mark.parametrize("kind", ["all", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_a_run_under_attack(coordinator: Coordinator, alone: tuple[Ran, float], tmp_path: Path, kind: str) -> None:
    """By those who have no token, and by one who has it and is no device of this run."""
    with contextlib.ExitStack() as stack:
        attacks = [stack.enter_context(one) for one in attacks_on(coordinator, kind)]
        for one in attacks:
            one.wait_for(5)
        before, start = [one.done for one in attacks], time.monotonic()
        attacked = train(coordinator, alone[0].result.plan, tmp_path, steps=STEPS)
        seconds = time.monotonic() - start
        assert all(one.done > count for one, count in zip(attacks, before, strict=True)), "they went on meanwhile"
    assert_as_alone(coordinator, attacked, seconds, alone)


@pytest.mark.slow
@pytest.mark.xdist_group("flooding")
def test_a_member_floods_a_run_that_it_has_no_part_in(
    coordinator: Coordinator, alone: tuple[Ran, float], tmp_path: Path
) -> None:
    flood = one_of_the_house(coordinator.address, coordinator.security)
    wanted = coordinator.wanted

    def stepped(*_: object) -> None:
        if flood.done == 0 and coordinator.wanted is not None:
            coordinator.wanted = None  # from now on it may join
            flood.__enter__()
            flood.wait_for(2000)

    start = time.monotonic()
    try:
        attacked = train(
            coordinator,
            alone[0].result.plan,
            tmp_path,
            steps=STEPS,
            on_step=stepped,
            max_devices=len(alone[0].result.logs),
        )
        seconds = time.monotonic() - start
    finally:
        flood.__exit__(None, None, None)
        coordinator.wanted = wanted
    assert flood.done >= 2000
    assert any(name.startswith("intruder") for name in coordinator.members), "it had joined"
    assert_as_alone(coordinator, attacked, seconds, alone)


@pytest.mark.slow
@pytest.mark.xdist_group("flooding")
def test_what_a_run_leaves_behind_is_private_and_holds_no_secret(
    coordinator: Coordinator, alone: tuple[Ran, float], tmp_path: Path
) -> None:
    """Also after somebody tried tokens, and with a mask that would let the whole world read."""
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with guessing(coordinator.address, coordinator.security.encrypted) as attack:
            attack.wait_for(3)
            train(coordinator, alone[0].result.plan, tmp_path / "runs" / "one", steps=4)
    finally:
        os.umask(before)
    assert coordinator.local.logs is not None
    for folder in (tmp_path / "runs" / "one", coordinator.local.logs):
        assert_private(folder)
        assert not holding(folder, coordinator.token)
    assert not processes_showing(coordinator.token)
    assert coordinator.token not in " ".join(coordinator.listener.reasons)
    checkpoints = list((tmp_path / "runs" / "one").rglob("*.safetensors"))
    assert checkpoints, "there is one to be looked at"


# The door


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(rules, "HANDSHAKE_LIMIT_SECONDS", 600.0)  # nobody goes by himself
    found = Listener("127.0.0.1", 0, Security(new_token(), encrypted=False))
    yield found
    found.close()


def come(listener: Listener, count: int, origin: str) -> list[socket.socket]:
    return [socket.create_connection(listener.address, 5, (origin, 0)) for _ in range(count)]


def until(listener: Listener, dropped: int) -> None:
    end = time.monotonic() + 20
    while listener.dropped < dropped:
        assert time.monotonic() < end, listener.reasons
        time.sleep(0.01)


@pytest.mark.slow
def test_room_is_made_for_who_comes_when_many_are_silent(listener: Listener) -> None:
    """Before, so many silent connections shut everybody else out."""
    crowd = come(listener, listening._MOST_HANDSHAKES + 50, "127.0.0.1")
    until(listener, 50)
    security = listener.peer_listener._security
    for _ in range(3):
        client = connect(*listener.address, security, 20, once=True)
        server = listener.accept(20)
        assert server is not None
        client.send(b"word")
        assert server.receive(20) == b"word"
        client.close()
        server.close()
    assert any("shown nothing yet" in reason for reason in listener.reasons)
    for one in crowd:
        one.close()


def test_those_make_room_who_are_most(listener: Listener) -> None:
    lone = come(listener, 1, "127.0.0.3")
    time.sleep(0.2)  # the first of all to come
    crowd = come(listener, listening._MOST_HANDSHAKES + 20, "127.0.0.2")
    until(listener, 21)
    assert all(reason.startswith("127.0.0.2: ") for reason in listener.reasons)
    lone[0].setblocking(False)
    with pytest.raises(BlockingIOError):  # still connected
        lone[0].recv(1)
    for one in [*lone, *crowd]:
        one.close()


# One of the house who says too much


def test_a_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "MOST_WAITING", 10)
    events = EventQueue()
    for _ in range(10):
        events.put(("loud", Heartbeat()), 100)
    with pytest.raises(Refused, match="more than can be received: 10 messages of 1000 bytes"):
        events.put(("loud", Heartbeat()), 100)
    events.put(("quiet", Heartbeat()), 100)  # others are not touched by it
    events.put(("loud", Heartbeat()))  # what happened here is always told
    for _ in range(3):
        assert events.get(1)[0] == "loud"
    for _ in range(3):
        events.put(("loud", Heartbeat()), 100)
    monkeypatch.setattr(event_queue, "MOST_WAITING_BYTES", 2000)
    with pytest.raises(Refused):
        events.put(("quiet", Heartbeat()), 1950)


def test_who_floods_the_coordinator_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "MOST_WAITING", 500)
    with Coordinator(heartbeat_timeout_seconds=20.0) as coordinator:
        with one_of_the_house(coordinator.address, coordinator.security) as attack:
            end = time.monotonic() + 60
            while not any(member.is_lost for member in list(coordinator.members.values())):
                assert time.monotonic() < end
                time.sleep(0.01)
        lost = next(member for member in coordinator.members.values() if member.is_lost)
        assert "more than can be received" in lost.reason
        assert attack.done > 500

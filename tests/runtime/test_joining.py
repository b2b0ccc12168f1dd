"""Who may join, and what becomes of those who may not: they learn why, and the coordinator lives on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import AddressTaken, BadValue, Refused, TimedOut, WorkerLost
from manyhands.facts.version import __version__
from manyhands.runtime import handshake
from manyhands.runtime.control import PROTOCOL, Message, decode_from_coordinator, encode
from manyhands.runtime.control_messages import AskClock, Heartbeat, Hello, Leave, Refusal, Welcome
from manyhands.runtime.control_parts import Facts
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.member import Lost, MemberJoined
from manyhands.runtime.worker import Worker
from manyhands.session.joining import LISTEN_VARIABLE
from manyhands.session.opening import open_session
from manyhands.transport.channel import Channel, connect
from manyhands.transport.security import new_token

OPEN: list[Channel] = []
"""One that nobody holds is closed."""
HELLO = Hello(__version__, PROTOCOL, "pi-1", "127.0.0.1", 1, Facts("a machine", 4, 4, 10**9, "2.6"))


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(heartbeat_timeout_seconds=2.0) as found:
        yield found
    OPEN.clear()


def dial(coordinator: Coordinator) -> Channel:
    return connect(*coordinator.address, coordinator.security, 5.0)


def greet(coordinator: Coordinator, hello: Hello) -> tuple[Channel, Message]:
    channel = dial(coordinator)
    OPEN.append(channel)
    channel.send(encode(hello))
    data = channel.receive(5.0)
    assert data is not None
    return channel, decode_from_coordinator(data)


def hear_to_the_end(channel: Channel) -> list[Message]:
    """What is said until the connection ends, which it must."""
    heard: list[Message] = []
    with contextlib.suppress(WorkerLost):
        while (data := channel.receive(5.0)) is not None:
            heard.append(decode_from_coordinator(data))
        pytest.fail("the connection is still there")
    return heard


def named(name: str) -> Hello:
    return msgspec.structs.replace(HELLO, name=name)


def assert_alive(coordinator: Coordinator) -> None:
    channel, answer = greet(coordinator, named("one-more"))
    assert isinstance(answer, Welcome)
    channel.close()


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (msgspec.structs.replace(HELLO, version="0.0.1"), f"runs manyhands 0.0.1; the coordinator runs {__version__}"),
        (msgspec.structs.replace(HELLO, protocol=99), "runs manyhands"),
        (named("taken"), "has joined already"),
        (named("stranger"), "has no device called stranger; it has one-more, pi-1, taken"),
        (named("coordinator"), "has no device called coordinator"),
    ],
    ids=["version", "protocol", "taken", "unknown", "coordinator"],
)
def test_refused(coordinator: Coordinator, hello: Hello, reason: str) -> None:
    coordinator.wanted = {"pi-1", "taken", "one-more"}
    greet(coordinator, named("taken"))
    coordinator.wait_for(["taken"], 20)
    _, answer = greet(coordinator, hello)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
    assert answer.hint
    assert set(coordinator.members) == {"taken"}
    assert_alive(coordinator)


@pytest.mark.parametrize("name", ["", "../../etc", "a\nb", "x" * 500, "coordinator"])
def test_a_name_that_is_none(coordinator: Coordinator, name: str) -> None:
    _, answer = greet(coordinator, named(name))
    assert isinstance(answer, Refusal)
    assert not coordinator.members
    assert_alive(coordinator)


def test_absurd_facts(coordinator: Coordinator) -> None:
    facts = msgspec.structs.replace(HELLO.facts, memory_bytes=-1)
    _, answer = greet(coordinator, msgspec.structs.replace(HELLO, facts=facts))
    assert isinstance(answer, Refusal)
    assert "memory_bytes is -1" in answer.reason


@pytest.mark.parametrize(
    "garbage", [b"", b"garbage", b"[" * 10_000, b'{"type":"beat"}', b"\xff\xfe", b'{"type":"hello"}']
)
def test_garbage_in_place_of_a_hello(coordinator: Coordinator, garbage: bytes) -> None:
    channel = dial(coordinator)
    channel.send(garbage)
    data = channel.receive(5.0)
    assert data is not None
    assert isinstance(decode_from_coordinator(data), Refusal)
    assert not coordinator.members
    assert_alive(coordinator)


def test_garbage_from_a_member_is_its_end(coordinator: Coordinator) -> None:
    channel, answer = greet(coordinator, HELLO)
    assert isinstance(answer, Welcome)
    coordinator.wait_for(["pi-1"], 20)
    channel.send(b'{"type": "done", "generation": "seven"}')
    hear_to_the_end(channel)  # which is how it is told
    events = [coordinator.next_event(20.0) for _ in range(2)]
    assert [(event[0], type(event[1])) for event in events if event is not None] == [
        ("pi-1", MemberJoined),
        ("pi-1", Lost),
    ]
    assert "control message cannot be read" in coordinator.members["pi-1"].reason
    with pytest.raises(WorkerLost, match="pi-1 was lost before this began: A control message cannot be read"):
        coordinator.members_for(["pi-1"])
    greet(coordinator, HELLO)
    coordinator.wait_for(["pi-1"], 20)
    assert coordinator.members_for(["pi-1"]).keys() == {"pi-1"}


def test_silence_is_the_end(coordinator: Coordinator) -> None:
    channel, _ = greet(coordinator, HELLO)
    start = time.monotonic()
    assert {type(message) for message in hear_to_the_end(channel)} == {Heartbeat, AskClock}
    assert 1.5 < time.monotonic() - start < 30
    assert "has sent nothing for" in coordinator.members["pi-1"].reason


def test_one_who_never_says_hello_does_not_hold_up_the_end(coordinator: Coordinator) -> None:
    OPEN.append(dial(coordinator))
    start = time.monotonic()
    coordinator.close()
    assert time.monotonic() - start < 15


def test_wrong_token(coordinator: Coordinator) -> None:
    with pytest.raises(Refused, match="the token is not the one it asks for"):
        Worker(Joining(*coordinator.address, new_token(), "pi-1", limit_seconds=5.0))
    assert_alive(coordinator)


def test_a_worker_is_told_why(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "__version__", "0.0.1")
    with pytest.raises(Refused, match=r"runs manyhands 0\.0\.1") as found:
        Worker(Joining(*coordinator.address, coordinator.token, "pi-1")).run()
    assert "pip install" in found.value.hint


def test_a_worker_finds_out_whether_its_own_machine_encrypts() -> None:
    """A coordinator for all the world, joined from its own machine."""
    with Coordinator("0.0.0.0") as coordinator:
        assert coordinator.encrypted
        one = Worker(Joining("127.0.0.1", coordinator.address[1], coordinator.token, "pi-1"))
        thread = threading.Thread(target=one.run, daemon=True)
        thread.start()
        coordinator.wait_for(["pi-1"], 10)
        addresses = one._reachable(coordinator.addresses(["pi-1"], "pi-1"))
        assert addresses["coordinator"][:2] == ("127.0.0.1", coordinator.address[1]), "as the worker has reached it"
        assert coordinator.cluster().names == ("pi-1",)
    thread.join(5)
    assert not thread.is_alive()


def test_a_worker_that_leaves_when_told_ends_well(coordinator: Coordinator) -> None:
    """The connection that goes right after is no loss."""
    one = Worker(Joining(*coordinator.address, coordinator.token, "pi-1"))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            one.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    coordinator.wait_for(["pi-1"], 10)
    channel = coordinator.members["pi-1"].channel
    channel.send(encode(Leave()))
    channel.close()
    thread.join(5)
    assert not thread.is_alive()
    assert not errors
    assert one._ended.is_set(), "else it would end this process in a while"


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressTaken, match="in use"):
        Coordinator(port=taken.getsockname()[1])


def test_impatience_has_a_limit() -> None:
    with pytest.raises(BadValue, match=r"heartbeat_timeout_seconds is 0\.1"):
        Coordinator(heartbeat_timeout_seconds=0.1)


def test_nobody_joined(coordinator: Coordinator) -> None:
    with pytest.raises(BadValue, match="No worker has joined"):
        coordinator.cluster()
    with pytest.raises(WorkerLost, match="pi-9 has not joined"):
        coordinator.members_for(["pi-9"])


def test_of_two_with_one_name_one_joins(coordinator: Coordinator) -> None:
    answers: list[Message] = []

    def join() -> None:
        answers.append(greet(coordinator, HELLO)[1])

    threads = [threading.Thread(target=join) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(answer, Welcome) for answer in answers) == 1


@pytest.mark.parametrize("cluster", ["pi3x6", preset("env-c")], ids=["by name", "as a value"])
def test_no_port_is_opened_for_the_devices_of_a_preset(cluster: str | Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody says where they join: a preset is to be planned with."""
    monkeypatch.delenv(LISTEN_VARIABLE, raising=False)
    monkeypatch.setattr(Coordinator, "__init__", lambda *_, **__: pytest.fail("a port was opened"))
    with pytest.raises(BadValue, match="is a preset") as refused, open_session(cluster, limit_seconds=0.1):
        pass
    assert "--listen" in refused.value.hint
    monkeypatch.undo()
    monkeypatch.setenv(LISTEN_VARIABLE, "127.0.0.1:0")
    with pytest.raises(TimedOut), open_session(cluster, limit_seconds=0.1):
        pass

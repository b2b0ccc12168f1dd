"""A worker that listens is dialled by the coordinator: everything goes out from the edge, nothing comes in there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from listening import HERE, LIMIT_SECONDS, Listening, Relay
from manyhands.facts.errors import AddressTaken, BadValue, Refused, TimedOut, WorkerLost
from manyhands.runtime import admission, inviting, probing, serving
from manyhands.runtime.control import decode_from_worker, encode
from manyhands.runtime.control_messages import Heartbeat, Hello, Leaving, Refusal, Welcome
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.inviting import Invitation, peer_address
from manyhands.runtime.measuring import probe_links
from manyhands.runtime.member import Lost, MemberJoined
from manyhands.transport import dialling
from manyhands.transport.endpoint import Address
from manyhands.transport.inprocess import InProcessTransport
from manyhands.transport.security import Purpose, Security, new_secret, new_token
from manyhands.transport.transport import TcpTransport, Transport, reach_either

GUEST = Security("the peer's token", encrypted=True)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator() as found:
        yield found


@pytest.fixture(params=[TcpTransport, InProcessTransport], ids=["tcp", "in process"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param()  # type: ignore[no-any-return]


def until(is_so: Callable[[], object], limit_seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def dial(server: Listening, token: str = "") -> tuple[object, Hello | Refusal]:
    """As a coordinator does; what is said first."""
    channel = reach_either(TcpTransport(), "coordinator", server.address, token or server.token, 5.0).channel
    data = channel.receive(5.0)
    assert data is not None
    said = decode_from_worker(data)
    assert isinstance(said, (Hello, Refusal))
    return channel, said


# Who dials whom


def members() -> st.SearchStrategy[tuple[str, Invitation | None]]:
    invitation = st.none() | st.builds(Invitation, st.just("cloud"), st.integers(1, 9), st.just(GUEST))
    return st.tuples(st.text("abc", min_size=1, max_size=3), invitation)


@given(one=members(), other=members())
def test_of_two_exactly_one_dials(one: tuple[str, Invitation | None], other: tuple[str, Invitation | None]) -> None:
    if one[0] == other[0]:
        return
    there, back = peer_address(one, other, ("far", 1)), peer_address(other, one, ("far", 2))
    assert there.is_dialled is not back.is_dialled
    for reader, peer, address in ((one, other, there), (other, one, back)):
        if reader[1] is not None and peer[1] is None:
            assert address == Address("", 0, is_dialled=False)  # it dials nobody, and learns nothing of them
        if reader[1] is None and peer[1] is not None:
            assert address.is_dialled
        if address.is_dialled:
            assert address.host == "far"
            assert address.security == (peer[1].security if peer[1] is not None else None)
        else:
            assert address.security is None, "whoever is not dialled keeps its token"


def test_an_address_keeps_its_token_to_itself() -> None:
    assert "a token" not in repr(Address("cloud", 1, is_dialled=True, security=GUEST))


# Coming and going


def test_an_invited_worker_is_a_member(transport: Transport) -> None:
    heard: list[str] = []
    with (
        Listening("server", transport=transport) as server,
        Coordinator(transport=transport, on_event=heard.append) as coordinator,
    ):
        assert coordinator.invite(*server.address, server.token) == "server"
        assert [member.name for member in coordinator.alive()] == ["server"]
        member = coordinator.members["server"]
        assert member.is_invited
        assert member.address == server.address
        event = coordinator.next_event(1.0)
        assert event is not None
        assert isinstance(event[1], MemberJoined)
        assert coordinator.members_for(["server"]).keys() == {"server"}
        coordinator.clock_sync.synchronize(["server"])  # it answers
        assert heard == ["server was invited at 127.0.0.1"]
        with pytest.raises(Refused, match="server is working for another coordinator"):
            coordinator.invite(*server.address, server.token)
    until(lambda: not server.thread.is_alive())
    assert server.error is None


def test_one_coordinator_after_another(transport: Transport) -> None:
    with Listening("server", transport=transport) as server:
        for _ in range(2):
            with Coordinator(transport=transport) as coordinator:
                coordinator.invite(*server.address, server.token)
            until(lambda: server.said[-1] == "The coordinator from 127.0.0.1 has ended its run.")


def test_once(transport: Transport) -> None:
    server = Listening("server", transport=transport, once=True)
    with Coordinator(transport=transport) as coordinator:
        coordinator.invite(*server.address, server.token)
    server.thread.join(LIMIT_SECONDS)
    assert not server.thread.is_alive()
    assert server.error is None


def test_once_and_the_coordinator_is_lost() -> None:
    server = Listening("server", once=True)
    channel, said = dial(server)
    assert isinstance(said, Hello)
    channel.close()  # type: ignore[attr-defined]
    server.thread.join(LIMIT_SECONDS)
    assert isinstance(server.error, WorkerLost)


def test_it_goes_on_where_nobody_reads_what_it_says(coordinator: Coordinator) -> None:
    def say(text: str) -> None:
        raise BrokenPipeError

    with Listening(say=say) as server:
        with pytest.raises(Refused, match="token"):
            coordinator.invite(*server.address, "another token")
        assert coordinator.invite(*server.address, server.token) == "server"


def test_it_is_asked_to_end_while_it_works(coordinator: Coordinator) -> None:
    with Listening() as server:
        coordinator.invite(*server.address, server.token)
        server.stop()
    until(lambda: coordinator.members["server"].is_lost)
    with pytest.raises(TimedOut, match="Nobody answered"):
        coordinator.invite(*server.address, server.token, limit_seconds=0.2)


def test_a_port_that_is_taken() -> None:
    with Listening() as server, pytest.raises(AddressTaken):
        Listening(port=server.address[1])


def test_a_name_that_is_taken(coordinator: Coordinator) -> None:
    with Listening("server") as one, Listening("server") as other:
        coordinator.invite(*one.address, one.token)
        with pytest.raises(Refused, match="A worker called server has joined already"):
            coordinator.invite(*other.address, other.token)
        until(lambda: any("has joined already" in line for line in other.said))


def test_another_version(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "__version__", "99.0")
    with Listening() as server:
        with pytest.raises(Refused, match=r"the coordinator runs 99\.0"):
            coordinator.invite(*server.address, server.token)
        monkeypatch.undo()
        until(lambda: any("the coordinator runs 99.0" in line for line in server.said))
        assert coordinator.invite(*server.address, server.token) == "server"


def test_names_that_were_not_wanted_may_be_invited(coordinator: Coordinator) -> None:
    coordinator.wanted = {"edge"}
    with Listening() as server:
        assert coordinator.invite(*server.address, server.token) == "server"


def test_loopback_beside_an_invited_one_far_away(coordinator: Coordinator) -> None:
    """The invited one dials nobody: that others are on loopback is none of its concern."""
    with Listening("server") as server, Listening("edge") as edge:
        coordinator.invite(*server.address, server.token)
        coordinator.invite(*edge.address, edge.token)
        coordinator.members["server"].address = ("192.0.2.1", 7078)
        coordinator.members["edge"].invitation = None
        assert len(coordinator.members_for(["edge", "server"])) == 2
        coordinator.members["server"].invitation = None
        with pytest.raises(BadValue, match="edge joined by a loopback address, which server"):
            coordinator.members_for(["edge", "server"])


# Strangers


def test_a_stranger_is_refused_and_noted(coordinator: Coordinator) -> None:
    with Listening() as server:
        with pytest.raises(Refused, match="the token is not the one it asks for"):
            coordinator.invite(*server.address, new_token())
        until(lambda: any(line.startswith("Warning: a wrong token came from 127.0.0.1") for line in server.said))
        security = Security(server.token, encrypted=True)
        with pytest.raises(Refused, match="is for control, not for data"):  # nobody is at work
            dialling.dial(*server.address, security, Purpose.DATA, time.monotonic() + 5)
        assert coordinator.invite(*server.address, server.token) == "server"


def test_whoever_says_nothing_is_not_waited_for() -> None:
    """Neither before the handshake nor after it."""
    timeout_factor = 0.05
    with (
        Listening(timeout_factor=timeout_factor, limit_seconds=0.3) as server,
        Coordinator() as coordinator,
        socket.create_connection(server.address) as silent,
    ):
        until(lambda: any("no handshake within" in line for line in server.said))
        silent.close()
        channel, said = dial(server)
        assert isinstance(said, Hello)
        until(lambda: any("did not answer" in line for line in server.said))
        assert coordinator.invite(*server.address, server.token) == "server"
        channel.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_silent_coordinator_makes_way(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link broke and nobody was told; the same one, or another, dials again."""
    with Listening() as server:
        channel, said = dial(server)
        assert isinstance(said, Hello)
        channel.send(encode(Welcome("server", 60.0, secret=new_secret())))  # type: ignore[attr-defined]
        until(lambda: any("Working for" in line for line in server.said))
        with pytest.raises(Refused, match="is working for another coordinator"):
            coordinator.invite(*server.address, server.token)
        monkeypatch.setattr(serving, "TAKEOVER_SECONDS", 1.0)
        for _ in range(8):
            time.sleep(0.15)
            channel.send(encode(Heartbeat()))  # type: ignore[attr-defined]
            with pytest.raises(Refused, match="is working for another coordinator"):
                coordinator.invite(*server.address, server.token)
        monkeypatch.setattr(serving, "TAKEOVER_SECONDS", 0.1)
        time.sleep(0.2)
        assert coordinator.invite(*server.address, server.token) == "server"
        assert any("has been silent; one from" in line for line in server.said)


def test_a_long_word_on_a_slow_link_is_no_silence() -> None:
    class Slow:
        local_host, peer_host, peer_key = HERE, HERE, b""
        unfinished_bytes = 0

        def receive(self, limit_seconds: float) -> bytes | None:
            return None

    slow = Slow()
    peer = serving._PendingPeer(slow)  # type: ignore[arg-type]
    peer.received_at -= 100
    assert peer.receive(0.0) is None
    assert peer.silent_seconds > 99
    slow.unfinished_bytes = 1000
    assert peer.receive(0.0) == encode(Heartbeat())
    assert peer.silent_seconds < 1
    peer.received_at -= 100
    assert peer.receive(0.0) is None
    assert peer.silent_seconds > 99


# Data


@pytest.mark.slow
def test_data_goes_in_at_the_same_port(coordinator: Coordinator) -> None:
    """And it is dialled though its name is the smallest, by whoever has its token from the coordinator."""
    with Listening("a") as server, Listening("zz") as edge:
        coordinator.invite(*server.address, server.token)
        coordinator.invite(*edge.address, edge.token)
        coordinator.members["zz"].invitation = None  # as if it had joined by itself...
        coordinator.members["zz"].address = (HERE, 1)  # ... and could not be reached
        found = probe_links(coordinator, ["a", "zz"])
        assert set(found["a"].links) == {"zz"}
        assert set(found["zz"].links) == {"a"}


def test_the_coordinator_dials_data_too(coordinator: Coordinator) -> None:
    security = Security("of the server", encrypted=True)
    transport = TcpTransport()
    listener = transport.listen("a", HERE, 0, security)
    endpoint = transport.endpoint("a", security, host=HERE, listener=listener)
    try:
        assert endpoint.address == listener.address
        endpoint.mailbox.limit_seconds = LIMIT_SECONDS
        endpoint.mailbox.open(0, {("coordinator", "x"): 4})
        coordinator.endpoint.mailbox.open(0, {})
        coming = threading.Thread(target=endpoint.connect, args=({"coordinator": Address("", 0, False)}, 10.0))
        coming.start()
        coordinator.endpoint.connect({"a": Address(*listener.address, True, security)}, 10.0)
        coming.join(10)
        coordinator.endpoint.send("a", 0, "x", [torch.ones(1)])
        into = torch.zeros(1)
        endpoint.mailbox.receive("coordinator", 0, "x", [into])
        assert into.item() == 1.0
    finally:
        endpoint.close()
        listener.close()


# Coming back


@pytest.mark.quick(every=2)
def test_it_is_invited_again(transport: Transport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inviting, "PAUSES_SECONDS", (0.02, 0.05))
    heard: list[str] = []
    with Coordinator(transport=transport, on_event=heard.append) as coordinator:
        first = Listening("server", transport=transport, home=tmp_path)
        keeper = coordinator.keep_inviting(*first.address, first.token)
        until(lambda: coordinator.alive())
        one = coordinator.members["server"]
        first.stop()
        until(lambda: one.is_lost and keeper.attempts > 3)
        assert "Nobody answered" in keeper.failure
        assert len([line for line in heard if "could not be invited" in line]) < 3, "the same failure is told once"
        with Listening("server", transport=transport, port=first.address[1], token=first.token, home=tmp_path):
            until(lambda: coordinator.alive())
            assert coordinator.members["server"] is not one
            until(lambda: keeper.attempts == 0)
            assert keeper.failure == ""
            kinds = []
            while (event := coordinator.next_event(0.0)) is not None:
                kinds.append(type(event[1]))
            assert kinds == [MemberJoined, Leaving, Lost, MemberJoined]
            assert one.has_left, "it had said that it goes"
            keeper.close()
            assert coordinator.alive(), "who is here stays"


@pytest.mark.slow
def test_a_cable_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side is told. The edge notices first and dials again; the server, which still waits for the old one, lets
    it in. All of it through another port than the server's own: what was dialled is what others dial."""
    monkeypatch.setattr(inviting, "PAUSES_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(serving, "TAKEOVER_SECONDS", 0.8)
    with (
        Listening("server") as server,
        Listening("edge") as edge,
        Relay(server.address) as relay,
        Coordinator(heartbeat_timeout_seconds=1.0, heartbeat_seconds=0.1) as coordinator,
    ):
        coordinator.invite(*relay.address, server.token)
        coordinator.invite(*edge.address, edge.token)
        coordinator.members["edge"].invitation = None
        one = coordinator.members["server"]
        assert one.address == relay.address
        coordinator.keep_inviting(*relay.address, server.token)
        relay.pull()
        until(lambda: one.is_lost)
        assert "has sent nothing" in one.reason
        relay.plug_in()
        until(lambda: len(coordinator.alive()) == 2)
        assert any("has been silent; one from" in line for line in server.said)
        with monkeypatch.context() as patch:
            patch.setattr(probing, "LARGE_BYTES", 80_000)
            assert set(probe_links(coordinator, ["edge", "server"])) == {"edge", "server"}


def test_pauses_grow() -> None:
    assert inviting.PAUSES_SECONDS[0] == 1.0
    assert inviting.PAUSES_SECONDS[-1] == 5.0
    assert list(inviting.PAUSES_SECONDS) == sorted(inviting.PAUSES_SECONDS)


def test_nobody_waits_for_a_network_that_swallows_everything() -> None:
    """A port whose queue is full answers nothing at all: as a link that is down."""
    with socket.socket() as full:
        full.bind((HERE, 0))
        full.listen(0)
        address = full.getsockname()
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(address)
        threads = threading.active_count()
        start = time.monotonic()
        with Coordinator() as coordinator:
            keeper = coordinator.keep_inviting(*address, "the token")
            until(lambda: keeper.attempts)
            time.sleep(0.2)
            assert keeper.failure == "", "it still waits"
        assert time.monotonic() - start < 3.0
        assert threading.active_count() <= threads
        for one in waiting:
            one.close()

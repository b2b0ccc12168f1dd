"""Who is lost, who is only slow, and who is here: members in one process under a clock of the test's, and real ones."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from manyhands.facts.errors import BadValue, ManyhandsError, WorkerLost
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL, Message, decode_from_coordinator, encode
from manyhands.runtime.control_messages import AskClock, Clock, Failed, Heartbeat, Hello, Refusal, Welcome
from manyhands.runtime.control_parts import Facts
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.joining import Joining
from manyhands.runtime.member import Event, Lost, MemberJoined
from manyhands.runtime.root_cause import find_root_cause
from manyhands.runtime.worker import Worker
from manyhands.transport.inprocess import InProcessTransport
from manyhands.transport.transport import ControlChannel, TcpTransport, Transport
from manyhands.transport.wire import write_all
from real_runs import kill, workers

LIMIT_SECONDS = 2.0
TURN_SECONDS = LIMIT_SECONDS / 8
REAL_LIMIT_SECONDS = 3.0


class VirtualClock:
    """Stands still but when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """A worker as far as control goes: beats when told, answers probes if it is one who does."""

    def __init__(
        self, transport: Transport, coordinator: Coordinator, name: str, *, answers: bool = True, beats: bool = False
    ) -> None:
        self.name, self.coordinator, self.answers, self.beats = name, coordinator, answers, beats
        self.probes = 0
        self.error: ManyhandsError | None = None
        host, port = coordinator.address
        self.channel: ControlChannel = transport.reach(name, host, port, coordinator.security, 5.0)
        self.channel.send(encode(Hello(__version__, PROTOCOL, name, host, 1, Facts("a machine", 4, 4, 10**9, "2.6"))))
        data = self.channel.receive(5.0)
        assert data is not None
        self.answer: Message = decode_from_coordinator(data)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        try:
            while True:
                data = self.channel.receive(0.1)
                if self.beats:
                    self.channel.send(encode(Heartbeat()))
                message = decode_from_coordinator(data) if data is not None else None
                if isinstance(message, AskClock):
                    self.probes += 1
                    if self.answers:
                        self.channel.send(encode(Clock(message.ticket, time.monotonic())))
        except ManyhandsError as error:
            self.error = error

    def beat(self) -> None:
        """The coordinator has heard it when this returns: its clock stands still meanwhile."""
        self.channel.send(encode(Heartbeat()))
        until(lambda: self.coordinator.membership.silent_seconds(self.name) == 0)

    def close(self) -> None:
        self.channel.close()
        self.thread.join(5.0)


def until(is_so: Callable[[], bool], limit_seconds: float = 10.0) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def next_event(coordinator: Coordinator) -> Event:
    event = coordinator.next_event(10.0)
    assert event is not None
    return event


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def played() -> InProcessTransport:
    return InProcessTransport()


@pytest.fixture
def coordinator(played: InProcessTransport, clock: VirtualClock) -> Iterator[Coordinator]:
    with Coordinator(heartbeat_timeout_seconds=LIMIT_SECONDS, transport=played, clock=clock) as found:
        yield found


@pytest.fixture
def invite(played: InProcessTransport, coordinator: Coordinator) -> Iterator[Callable[..., Peer]]:
    with ExitStack() as stack:

        def invited(name: str, **options: bool) -> Peer:
            peer = Peer(played, coordinator, name, **options)
            stack.callback(peer.close)
            return peer

        yield invited


def turn(coordinator: Coordinator, clock: VirtualClock, seconds: float = TURN_SECONDS) -> None:
    clock.now += seconds
    coordinator.heartbeats.look_around()


Invite = Callable[..., Peer]

# Under a clock of ours


def test_a_silent_one_is_lost_when_the_limit_has_passed_and_nobody_else(
    coordinator: Coordinator, clock: VirtualClock, invite: Invite
) -> None:
    there, silent = invite("there"), invite("silent", answers=False)
    coordinator.wait_for(2, 10.0)
    for number in range(1, 9):
        turn(coordinator, clock)
        there.beat()
        assert [member.name for member in coordinator.alive()] == (["there", "silent"] if number < 8 else ["there"])
    until(lambda: silent.probes == 1)
    assert coordinator.members["silent"].reason.startswith(f"it has sent nothing for {LIMIT_SECONDS:.1f} s")
    until(lambda: silent.error is not None)  # it is told, should it still be there
    events = [next_event(coordinator) for _ in range(3)]
    assert [(name, type(what)) for name, what in events] == [
        ("there", MemberJoined),
        ("silent", MemberJoined),
        ("silent", Lost),
    ]
    for _ in range(20):
        turn(coordinator, clock)
        there.beat()
    assert there.probes == 0
    assert coordinator.next_event(0.0) is None


def test_one_so_slow_that_it_misses_every_beat_is_not_lost_if_it_answers(
    coordinator: Coordinator, clock: VirtualClock, invite: Invite
) -> None:
    slow = invite("slow")
    for _ in range(40):
        turn(coordinator, clock)
        if coordinator.membership.silent_seconds("slow") >= LIMIT_SECONDS / 2:
            until(lambda: coordinator.membership.silent_seconds("slow") == 0)  # its answer has come
    assert slow.probes == 10
    assert [member.name for member in coordinator.alive()] == ["slow"]


def test_a_cable_that_is_pulled_and_put_back_in_time(
    coordinator: Coordinator, clock: VirtualClock, played: InProcessTransport, invite: Invite
) -> None:
    peer = invite("pi-1")
    played.freeze("pi-1")
    for _ in range(6):
        turn(coordinator, clock)
    assert coordinator.membership.silent_seconds("pi-1") == 6 * TURN_SECONDS
    assert peer.probes == 0
    played.thaw("pi-1")
    until(lambda: coordinator.membership.silent_seconds("pi-1") == 0)
    assert peer.probes == 1
    assert len(coordinator.alive()) == 1


def test_a_cable_that_is_pulled_is_a_loss_and_one_lost_may_join_again(
    coordinator: Coordinator, clock: VirtualClock, played: InProcessTransport, invite: Invite
) -> None:
    peer, other = invite("pi-1"), invite("pi-2")
    played.freeze("pi-1")
    for _ in range(8):
        turn(coordinator, clock)
        other.beat()
    lost = coordinator.members["pi-1"]
    assert lost.is_lost
    assert peer.error is None, "nothing reaches it"
    played.thaw("pi-1")
    until(lambda: peer.error is not None)
    assert isinstance(invite("pi-1").answer, Welcome)
    until(lambda: len(coordinator.alive()) == 2)
    assert coordinator.members["pi-1"] is not lost
    for _ in range(3):
        turn(coordinator, clock)  # it is watched from its return on
    assert len(coordinator.alive()) == 2


def test_a_broken_connection_counts_at_once(
    coordinator: Coordinator, clock: VirtualClock, played: InProcessTransport, invite: Invite
) -> None:
    invite("pi-1")
    assert isinstance(next_event(coordinator)[1], MemberJoined)
    played.cut("pi-1")
    name, what = next_event(coordinator)
    assert (name, type(what)) == ("pi-1", Lost)
    assert isinstance(what, Lost)
    assert "was cut off" in what.reason
    assert clock.now == 1000.0
    assert not coordinator.alive()


def test_a_coordinator_that_slept_gives_nobody_up(
    coordinator: Coordinator, clock: VirtualClock, invite: Invite
) -> None:
    peers = [invite(name, answers=False) for name in ("pi-1", "pi-2")]
    turn(coordinator, clock)
    turn(coordinator, clock, 3600.0)
    assert len(coordinator.alive()) == 2
    for _ in range(8):
        turn(coordinator, clock)
        peers[0].beat()
    assert [member.name for member in coordinator.alive()] == ["pi-1"]


@pytest.mark.slow
def test_one_that_is_still_speaking_is_not_silent(clock: VirtualClock) -> None:
    """A long message over a slow link: it has come in part each time somebody looks."""
    transport = TcpTransport()
    with Coordinator(heartbeat_timeout_seconds=LIMIT_SECONDS, clock=clock) as coordinator:
        peer = Peer(transport, coordinator, "pi-1", answers=False)
        until(lambda: len(coordinator.alive()) == 1)
        message = encode(Failed(0, "WorkerLost", "x" * 1000, ""))
        content = len(message).to_bytes(4, "little") + message
        step = len(content) // 7
        for place in range(0, len(content), step):
            write_all(peer.channel._wire, content[place : place + step], time.monotonic() + 5)  # type: ignore[attr-defined]
            until(lambda: coordinator.membership.silent_seconds("pi-1") == 0)
            for _ in range(3):
                turn(coordinator, clock)
        assert isinstance(next_event(coordinator)[1], MemberJoined)
        assert isinstance(next_event(coordinator)[1], Failed)
        assert len(coordinator.alive()) == 1
        peer.close()


def test_who_joins_is_news_but_not_to_a_job_that_begins_later(coordinator: Coordinator, invite: Invite) -> None:
    invite("pi-1")
    name, what = next_event(coordinator)
    assert isinstance(what, MemberJoined)
    assert what.member is coordinator.members["pi-1"]
    invite("pi-2")
    coordinator.wait_for(["pi-2"], 10.0)
    assert set(coordinator.members_for(["pi-1", "pi-2"])) == {"pi-1", "pi-2"}
    assert coordinator.next_event(0.0) is None
    invite("pi-3")
    name, what = next_event(coordinator)
    assert name == "pi-3"
    assert isinstance(what, MemberJoined)


def test_no_more_than_so_many(coordinator: Coordinator, played: InProcessTransport, invite: Invite) -> None:
    coordinator.membership.max_devices = 2
    invite("pi-1")
    invite("pi-2")
    answer = invite("pi-3").answer
    assert isinstance(answer, Refusal)
    assert answer.reason == "pi-3 comes too late: 2 workers have joined, and no more than 2 may."
    assert answer.hint
    played.cut("pi-1")
    until(lambda: len(coordinator.alive()) == 1)
    assert isinstance(invite("pi-3").answer, Welcome)
    with pytest.raises(BadValue, match="max_devices is 0; it must be at least 1"):
        Coordinator(max_devices=0)


def test_limits_of_workers_are_their_own(played: InProcessTransport) -> None:
    """Workers learn the interval of heartbeats; their timeout for the coordinator grows with a lab's scale."""
    with Coordinator(
        heartbeat_timeout_seconds=1.0, heartbeat_seconds=0.25, timeout_factor=3.0, transport=played
    ) as coordinator:
        assert coordinator.times.timeout_seconds == 3.0
        peer = Peer(played, coordinator, "pi-1")
        assert isinstance(peer.answer, Welcome)
        assert (peer.answer.name, peer.answer.heartbeat_timeout_seconds, peer.answer.heartbeat_seconds) == (
            "pi-1",
            45.0,
            0.25,
        )
        peer.close()
    with pytest.raises(BadValue, match=r"heartbeat_timeout_seconds is 1; it must be at least 4") as found:
        Coordinator(heartbeat_timeout_seconds=1.0, heartbeat_seconds=1.0)
    assert "every 1 s" in found.value.hint
    with pytest.raises(BadValue, match="heartbeat_seconds is 0"):
        Coordinator(heartbeat_seconds=0.0)


# Who is to blame


def test_nobody_is_to_blame_when_everybody_answers(coordinator: Coordinator, invite: Invite) -> None:
    for name in ("pi-1", "pi-2"):
        invite(name)
    coordinator.wait_for(2, 10.0)
    members = coordinator.members_for(["pi-1", "pi-2"])
    coordinator.events.put(("pi-1", Failed(7, "WorkerLost", "misses pi-2", "")))
    start = time.monotonic()
    assert find_root_cause(coordinator, members, 7) is None
    assert time.monotonic() - start < LIMIT_SECONDS


def test_one_that_failed_in_a_way_of_its_own_is_to_blame_and_others_news_stay(
    coordinator: Coordinator, invite: Invite
) -> None:
    for name in ("pi-1", "pi-2"):
        invite(name)
    coordinator.wait_for(2, 10.0)
    members = coordinator.members_for(["pi-1", "pi-2"])
    invite("pi-3")
    coordinator.wait_for(3, 10.0)
    failed = Failed(7, "OutOfMemory", "no memory", "")
    for one in (Failed(6, "OutOfMemory", "long ago", ""), failed):
        coordinator.events.put(("pi-2", one))
    assert find_root_cause(coordinator, members, 7) == ("pi-2", failed)
    name, what = next_event(coordinator)
    assert name == "pi-3"
    assert isinstance(what, MemberJoined)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_one_that_does_not_answer_is_to_blame(how: str) -> None:
    """By the real clock."""
    played = InProcessTransport()
    with Coordinator(heartbeat_timeout_seconds=LIMIT_SECONDS, transport=played) as coordinator, ExitStack() as stack:
        peers = [Peer(played, coordinator, name, beats=True) for name in ("pi-1", "pi-2", "pi-3")]
        for peer in peers:
            stack.callback(peer.close)
        coordinator.wait_for(3, 10.0)
        members = coordinator.members_for(["pi-1", "pi-2", "pi-3"])
        (played.cut if how == "killed" else played.freeze)("pi-2")
        start = time.monotonic()
        found = find_root_cause(coordinator, members, 7)
        assert found is not None
        assert found[0] == "pi-2"
        assert ("cut off" if how == "killed" else "has sent nothing for") in str(found[1])
        assert time.monotonic() - start < (1.0 if how == "killed" else LIMIT_SECONDS * 1.5 + 1.0)


# Real workers


def test_a_whole_worker_in_this_process_is_cut_and_comes_back(played: InProcessTransport) -> None:
    with Coordinator(transport=played) as coordinator:
        errors: list[BaseException] = []
        joining = Joining(*coordinator.address, coordinator.token, "pi-1")

        def run() -> None:
            try:
                Worker(joining, transport=played).run()
            except BaseException as error:
                errors.append(error)

        for _ in range(2):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            coordinator.wait_for(["pi-1"], 20.0)
            member = coordinator.members["pi-1"]
            assert coordinator.cluster().names == ("pi-1",)
            errors.clear()
            played.cut("pi-1")
            thread.join(10.0)
            assert not thread.is_alive()
            assert isinstance(errors[0], WorkerLost)
            until(lambda member=member: member.is_lost)  # type: ignore[misc]


@pytest.fixture(scope="module")
def session() -> Iterator[Coordinator]:
    with workers(2, heartbeat_timeout_seconds=REAL_LIMIT_SECONDS) as coordinator:
        yield coordinator


@pytest.mark.slow
@pytest.mark.xdist_group("detecting")
def test_a_worker_stopped_for_a_while_is_suspected_and_not_lost(session: Coordinator) -> None:
    name = next(iter(session.members))
    suspected: set[str] = set()
    kill(session, name, signal.SIGSTOP)
    end = time.monotonic() + 0.6 * REAL_LIMIT_SECONDS
    with contextlib.ExitStack() as stack:
        stack.callback(kill, session, name, signal.SIGCONT)
        while time.monotonic() < end:
            suspected.update(session.membership.suspects)
            time.sleep(0.01)
    assert name in suspected, "the fault did not fire"
    until(lambda: name not in session.membership.suspects)
    time.sleep(REAL_LIMIT_SECONDS / 2)
    assert len(session.alive()) == 2


@pytest.mark.slow
@pytest.mark.xdist_group("detecting")
def test_a_worker_that_is_stopped_is_lost_within_the_limit(session: Coordinator) -> None:
    name = next(iter(session.members))
    session.members_for(session.members)
    kill(session, name, signal.SIGSTOP)
    start = time.monotonic()
    event = session.next_event(30.0)
    seconds = time.monotonic() - start
    assert event is not None
    assert event[0] == name
    assert isinstance(event[1], Lost)
    assert "has sent nothing for" in event[1].reason
    assert seconds < REAL_LIMIT_SECONDS + 1.0
    assert len(session.alive()) == 1

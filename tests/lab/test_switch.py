"""The switch: who gets a frame, when and in which order; with sockets of this process in place of the ports."""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue, LabError
from manyhands.lab import switch as switch_module
from manyhands.lab.switch import Lane, Switch, member_address

HEADER = bytes(10)
TO_ALL = b"\xff" * 6


def frame(receiver: bytes, text: bytes) -> bytes:
    return HEADER + receiver + member_address(99) + text


class Failing(socket.socket):
    """A port that gives errors in place of taking frames."""

    errors: list[int]

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        if self.errors:
            raise OSError(self.errors.pop(0), "as told")
        return super().send(data, flags)


class Hub:
    """A switch that runs in a thread; what a member sends and gets goes through a pair of sockets."""

    def __init__(self, count: int, delay_seconds: Callable[[int, int], float]) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        self.members = [mine for mine, _ in pairs]
        self.inner = {f"p{n}": inner for n, (_, inner) in enumerate(pairs)}
        self.errors: dict[str, list[int]] = {port: [] for port in self.inner}
        for mine in self.members:
            mine.settimeout(20)
        self.switch = Switch(list(self.inner), delay_seconds)
        self.idle: list[float] = []
        self.idle_seconds = 0.01
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.switch.run, args=(self._over.is_set, self._on_idle))

    def open(self, port: str, *, receiving: bool) -> socket.socket:
        opened = Failing(fileno=self.inner[port].dup().detach())
        opened.errors = [] if receiving else self.errors[port]
        opened.setblocking(False)
        return opened

    def _on_idle(self, now: float) -> float:
        self.idle.append(now)
        return now + self.idle_seconds

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        for each in [*self.members, *self.inner.values()]:
            each.close()

    def get(self, member: int) -> bytes:
        return self.members[member].recv(70_000)[22:]

    def gets_nothing(self, member: int) -> bool:
        return not select.select([self.members[member]], [], [], 0)[0]


@contextlib.contextmanager
def hub(
    patch: pytest.MonkeyPatch, count: int, delay_seconds: Callable[[int, int], float] = lambda *_: 0.0
) -> Iterator[Hub]:
    made = Hub(count, delay_seconds)
    patch.setattr(switch_module, "_open", made.open)
    patch.setattr(switch_module, "be_punctual", list)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def soon(is_so: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.005)
    return is_so()


def test_addresses_carry_the_number() -> None:
    assert member_address(0).hex(":") == "02:6d:68:00:00:00"
    assert member_address(258).hex(":") == "02:6d:68:00:01:02"


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.05)), min_size=1))
def test_no_frame_overtakes_another_of_its_pair(steps: list[tuple[float, float]]) -> None:
    """Whatever the delay becomes: none leaves before the one in front of it, nor before its own time."""
    lane, arrived = Lane(0, 1, 0.0), 0.0
    for after, delay in steps:
        arrived += after
        lane.delay_seconds = delay
        due = lane.due(arrived)
        assert due >= arrived + delay
        lane.frames.append((due, b""))
    assert all(one <= other for (one, _), (other, _) in pairwise(lane.frames))


@pytest.mark.parametrize("delay", [-0.001, 61.0, float("nan"), float("inf")])
def test_a_delay_has_limits(delay: float) -> None:
    with pytest.raises(BadValue, match="0 to 60 s"):
        Switch(["p0", "p1"], lambda *_: delay)
    switch = Switch(["p0", "p1"], lambda *_: 0.0)
    with pytest.raises(BadValue, match="0 to 60 s"):
        switch.set_delay(0, 1, delay)


@pytest.mark.parametrize("count", [0, switch_module.MOST_PORTS + 1])
def test_the_number_of_ports_has_limits(count: int) -> None:
    with pytest.raises(BadValue, match=f"{count} ports"):
        Switch([f"p{n}" for n in range(count)], lambda *_: 0.0)


def test_a_port_that_is_not_there() -> None:
    with pytest.raises(LabError, match="cannot listen on no-such-port") as caught:
        Switch(["no-such-port"], lambda *_: 0.0).run(lambda: True, lambda now: now)
    assert "root" in caught.value.hint
    assert gc.isenabled()


def test_a_frame_goes_to_its_member_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 3) as made:
        made.members[0].send(frame(member_address(2), b"hello"))
        assert made.get(2) == b"hello"
        assert made.gets_nothing(0)
        assert made.gets_nothing(1)
        assert soon(lambda: made.switch.frames == 1)
        assert made.switch.bytes == 17
        assert made.switch.dropped == 0


def test_a_frame_for_all_goes_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 4, lambda sender, receiver: 0.05 * receiver) as made:
        start = time.monotonic()
        made.members[1].send(frame(TO_ALL, b"who has"))
        for member in (0, 2, 3):
            assert made.get(member) == b"who has"
            assert time.monotonic() - start >= 0.05 * member - 0.001
        assert made.gets_nothing(1)


def test_frames_for_nobody_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 2) as made:
        made.members[0].send(frame(member_address(7), b"stranger"))
        made.members[0].send(frame(member_address(0), b"myself"))
        assert soon(lambda: made.switch.dropped == 2)
        assert made.gets_nothing(0)
        assert made.gets_nothing(1)


def test_each_pair_has_its_delay_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 3, lambda sender, receiver: 1.0 if sender == 0 else 0.0) as made:
        start = time.monotonic()
        made.members[0].send(frame(member_address(2), b"slow"))
        assert soon(lambda: bool(made.switch._turn))
        made.switch.set_delay(0, 2, 0.0)
        made.members[0].send(frame(member_address(2), b"behind it"))
        made.members[1].send(frame(member_address(2), b"quick"))
        assert made.get(2) == b"quick"
        assert time.monotonic() - start < 1.0
        assert made.get(2) == b"slow"
        assert time.monotonic() - start >= 0.999
        assert made.get(2) == b"behind it"


def test_a_full_port_holds_frames_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 3) as made:
        text = bytes(30_000)
        for n in range(200):
            made.members[0].send(frame(member_address(1), n.to_bytes(2, "big") + text))
        assert soon(lambda: bool(made.switch._blocked))
        made.members[0].send(frame(member_address(2), b"another"))
        assert made.get(2) == b"another"
        assert [int.from_bytes(made.get(1)[:2], "big") for _ in range(200)] == list(range(200))
        assert made.switch.dropped == 0
        assert soon(lambda: made.switch._held_bytes == [0, 0, 0])


def test_beyond_the_bound_frames_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_module, "MOST_HELD_BYTES", 1500)
    with hub(monkeypatch, 2, lambda *_: 0.5) as made:
        for _ in range(3):
            made.members[0].send(frame(member_address(1), bytes(400)))
        assert soon(lambda: made.switch.dropped == 1)
        assert len(made.get(1)) == len(made.get(1)) == 400
        made.members[0].send(frame(member_address(1), b"again"))
        assert made.get(1) == b"again"


def test_a_refusing_queue_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 2) as made:
        made.errors["p1"] += [errno.ENOBUFS] * 5
        made.members[0].send(frame(member_address(1), b"first"))
        made.members[0].send(frame(member_address(1), b"second"))
        assert [made.get(1), made.get(1)] == [b"first", b"second"]
        assert made.errors["p1"] == []
        assert made.switch.dropped == 0


def test_a_queue_that_always_refuses_does_not_stop_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_module, "_REFUSED_TIMES", 4)
    with hub(monkeypatch, 2) as made:
        made.errors["p1"] += [errno.ENOBUFS] * 5
        made.members[0].send(frame(member_address(1), b"too large for it"))
        made.members[0].send(frame(member_address(1), b"next"))
        assert made.get(1) == b"next"
        assert made.switch.dropped == 1


def test_a_pulled_cable_costs_the_frames_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 2) as made:
        made.errors["p1"] += [errno.ENETDOWN, errno.ENXIO]
        for text in (b"lost", b"lost too", b"healed"):
            made.members[0].send(frame(member_address(1), text))
        assert made.get(1) == b"healed"
        assert made.switch.dropped == 2


def test_other_work_is_done_in_time_idle_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 2) as made:
        for _ in range(5):
            before, end = len(made.idle), time.monotonic() + 10
            while len(made.idle) == before:  # among frames
                assert time.monotonic() < end
                made.members[0].send(frame(member_address(1), b"x"))
                made.get(1)
        busy = len(made.idle)
        assert soon(lambda: len(made.idle) > busy)
        made.idle_seconds = -1.0  # it wants to be called at once, again and again
        time.sleep(0.1)
        start = time.monotonic()
        count = len(made.idle)
        time.sleep(0.2)
        assert len(made.idle) - count <= (time.monotonic() - start) * 1000 + 10
    gaps = sorted(later - earlier for earlier, later in pairwise(made.idle))
    assert gaps[len(gaps) // 2] < 0.25  # this thread has no priority, and the machine may be busy


def test_the_end_is_noticed_though_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(monkeypatch, 2) as made:
        made.idle_seconds = float("inf")
        time.sleep(0.1)
        start = time.monotonic()
    assert time.monotonic() - start < 5.0
    assert gc.isenabled()

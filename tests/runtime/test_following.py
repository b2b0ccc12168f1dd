"""A link that follows a trace: what senders are told, and what passes between workers meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import BadValue, WorkerLost
from manyhands.facts.link import Link
from manyhands.facts.trace import LinkTrace, Trace
from manyhands.runtime.control_messages import Heartbeat, Reshape
from manyhands.runtime.control_parts import Shape
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.following import MOST_A_SECOND, Following, Setting
from manyhands.runtime.joining import Joining
from manyhands.runtime.worker import Worker
from manyhands.transport.transport import TcpTransport

MBIT = 1e6 / 8
UP, DOWN = ("edge", "server"), ("server", "edge")


class Told:
    """In place of a coordinator: what was said to whom, and who is there."""

    def __init__(self) -> None:
        self.members = {name: SimpleNamespace(is_lost=False) for name in UP}
        self.said: list[tuple[str, Reshape]] = []
        self.now = 100.0

    def send(self, name: str, message: Reshape, limit_seconds: float) -> None:
        self.said.append((name, message))

    def following(self, trace: LinkTrace, **options: Any) -> Following:
        return Following(self, trace, UP, DOWN, clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def taken(self) -> list[tuple[str, Reshape]]:
        said, self.said = self.said, []
        return said


def to(name: str, rate: float, delay: float = 0.0) -> tuple[str, Reshape]:
    peer = DOWN[1] if name == DOWN[0] else UP[1]
    return name, Reshape({peer: Shape(rate, delay)})


def test_each_sender_is_told_its_rate_when_it_changes() -> None:
    told = Told()
    following = told.following(
        LinkTrace(Trace((0, 1, 2, 3), (1e6, 2e6, 2e6, 0)), Trace((0, 3), (5e6, 6e6))), delay_seconds=0.02
    )
    assert following.follow() <= 1 / MOST_A_SECOND
    assert told.taken() == [to("edge", 1e6, 0.02), to("server", 5e6, 0.02)]
    told.now += 0.5
    following.follow()
    assert told.taken() == []
    told.now += 0.5
    following.follow()
    assert told.taken() == [to("edge", 2e6, 0.02)]
    told.now += 1.0
    following.follow()
    assert told.taken() == []
    told.now += 1.0
    following.follow()
    assert told.taken() == [to("edge", 0.0, 0.02), to("server", 6e6, 0.02)]
    assert following.rates() == (0.0, 6e6)
    assert following.rates(1.5) == (2e6, 5e6)
    assert list(following.set) == [Setting(0, 1e6, 5e6), Setting(1, 2e6, 5e6), Setting(3, 0.0, 6e6)]


def test_who_joins_anew_is_told_at_once_and_who_is_lost_is_not() -> None:
    told = Told()
    following = told.following(LinkTrace.constant(1e6, 2e6))
    following.follow()
    told.taken()
    told.members["server"].is_lost = True
    following.follow()
    assert told.taken() == []
    told.members["server"] = SimpleNamespace(is_lost=False)
    following.follow()
    assert told.taken() == [to("server", 2e6)]
    following.follow()
    assert told.taken() == []
    del told.members["edge"]  # it has not joined yet
    following.follow()
    assert told.taken() == []


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0, 1e7)), min_size=2, max_size=30), st.floats(0, 0.004))
def test_a_trace_that_changes_often_is_followed_on_average(rows: list[tuple[float, float]], late: float) -> None:
    """No more often than is said, and the integral is right."""
    moments = [0.0]
    for gap, _ in rows[1:]:
        moments.append(moments[-1] + gap)
    trace = Trace(tuple(moments), tuple(rate for _, rate in rows))
    told = Told()
    following = told.following(LinkTrace(trace, trace))
    begin, length = told.now, 3.0
    while told.now < begin + length:
        due = following.follow()
        told.now = max(told.now, begin + due) + late + 1e-9  # a clock goes on
    settings_made = list(following.set)
    assert len(settings_made) <= length * MOST_A_SECOND + 2
    ends = [*(one.seconds for one in settings_made[1:]), told.now - begin]
    passed = sum(one.up_bytes_per_second * (end - one.seconds) for one, end in zip(settings_made, ends))
    changes = sum(abs(a.up_bytes_per_second - b.up_bytes_per_second) for a, b in zip(settings_made, settings_made[1:]))
    slack = 0.06 * max(trace.bytes_per_second) + (late + 1e-6) * changes
    assert passed == pytest.approx(trace.integral(0, told.now - begin), abs=slack + 1)


def test_ends_that_are_no_pair() -> None:
    trace = LinkTrace.constant(1e6, 1e6)
    with pytest.raises(BadValue, match="not the reverse"):
        Following(Told(), trace, UP, UP)  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="delay"):
        Told().following(trace, delay_seconds=-1.0)


def test_the_thread_ends() -> None:
    told = Told()
    with Following(told, LinkTrace.constant(1e6, 1e6), UP, DOWN) as following:  # type: ignore[arg-type]
        assert [name for name, _ in told.said] == ["edge", "server"]
        assert following._thread is not None
        assert following._thread.is_alive()
        told.taken()
    assert not following._thread.is_alive()
    lifted = [("edge", Reshape({"server": Shape(None, 0.0)})), ("server", Reshape({"edge": Shape(None, 0.0)}))]
    assert told.taken() == lifted
    following.close()
    assert told.taken() == []


# Workers


def wait_until(is_so: Callable[[], bool], limit_seconds: float = 10.0) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def work(worker: Worker) -> None:
    with suppress(WorkerLost):  # the connection may break before it has read that it is to leave
        worker.run()


@contextmanager
def two_workers(slowdown: float = 1.0) -> Iterator[tuple[Coordinator, dict[str, Worker]]]:
    """In threads of this process, over sockets."""
    with Coordinator(heartbeat_seconds=0.05) as coordinator:
        workers, threads = {}, []
        for name in UP:
            joining = Joining(*coordinator.address, coordinator.token, name, slowdown=slowdown)
            workers[name] = Worker(joining, TcpTransport())
            threads.append(threading.Thread(target=work, args=(workers[name],), name=name, daemon=True))
            threads[-1].start()
        coordinator.wait_for(UP, 10)
        yield coordinator, workers
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def linked(workers: dict[str, Worker], size: int) -> None:
    addresses = {name: worker.endpoint.address for name, worker in workers.items()}
    connecting = threading.Thread(target=workers["edge"].endpoint.connect, args=(addresses, 10.0))
    connecting.start()
    workers["server"].endpoint.connect(addresses, 10.0)
    connecting.join()
    for name, worker in workers.items():
        worker.endpoint.mailbox.open(0, {(other, "x"): size for other in (*UP, COORDINATOR) if other != name})


def test_a_link_between_workers_follows_and_what_arrives_is_told() -> None:
    size = 100_000
    with two_workers(slowdown=3.0) as (coordinator, workers):
        assert coordinator.members["edge"].facts.slowdown == 3.0
        linked(workers, size)
        trace = LinkTrace(Trace((0, 0.3), (2 * MBIT, 40 * MBIT)), Trace((0,), (8 * MBIT,)))
        while coordinator.next_event(0.0) is not None:
            pass
        with Following(coordinator, trace, UP, DOWN):
            wait_until(lambda: bool(workers["edge"].shaping.links and workers["server"].shaping.links))
            assert workers["server"].shaping.links == {"edge": Link(8 * MBIT, 0.0)}
            begin = time.monotonic()
            for sender, receiver in (UP, DOWN):
                workers[sender].endpoint.send(receiver, 0, "x", [torch.zeros(size, dtype=torch.uint8)])
            for sender, receiver in (UP, DOWN):
                workers[receiver].endpoint.mailbox.receive(sender, 0, "x", [torch.zeros(size, dtype=torch.uint8)])
            seconds = time.monotonic() - begin
        wait_until(lambda: all(worker.endpoint._loop._links == {} for worker in workers.values()))  # type: ignore[attr-defined]
        assert 0.09 < seconds < 2.0
        told: dict[str, list[Any]] = {name: [] for name in UP}

        def are_told() -> bool:
            event = coordinator.next_event(0.01)
            if event is not None and isinstance(event[1], Heartbeat):
                told[event[0]] += event[1].arrivals
            return all(told.values())

        wait_until(are_told)
        (one,) = told["edge"]
        assert one.source == "server"
        assert one.bytes / one.seconds == pytest.approx(8 * MBIT, rel=0.5)  # exactly: tests/transport/test_timing.py
        assert 0 <= one.ago < 10


def test_other_links_stay_when_one_is_shaped_anew() -> None:
    with two_workers() as (coordinator, workers):
        edge = workers["edge"]
        coordinator.send("edge", Reshape({"server": Shape(1000.0, 0.5), "other": Shape(None, 0.25)}))
        wait_until(lambda: len(edge.shaping.links) == 2)
        coordinator.send("edge", Reshape({"server": Shape(0.0, 0.0)}))
        wait_until(lambda: edge.shaping.links["server"].delay_seconds == 0.0)
        assert edge.shaping.links["other"] == Link(float("inf"), 0.25)
        assert 0 < edge.shaping.links["server"].bytes_per_second <= 1.0
        assert edge.endpoint._loop._links == edge.shaping.links  # type: ignore[attr-defined]

"""Workers that are lost between joining and the beginning of a job: others may join in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands.facts.profile import Profile
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL, encode
from manyhands.runtime.control_messages import Hello
from manyhands.runtime.control_parts import Facts
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session import measuring as session_measuring
from manyhands.session.measuring import measure_who_stays
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands.transport.channel import Channel, connect

HELLO = Hello(__version__, PROTOCOL, "pi-1", "127.0.0.1", 1, Facts("a machine", 4, 4, 10**9, "2.6"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def coordinator(said: list[str]) -> Iterator[Coordinator]:
    with Coordinator(on_event=said.append, heartbeat_timeout_seconds=60.0) as found:
        yield found


def join(coordinator: Coordinator, name: str) -> Channel:
    channel = connect(*coordinator.address, coordinator.security, 5.0)
    channel.send(encode(msgspec.structs.replace(HELLO, name=name)))
    assert channel.receive(5.0) is not None
    return channel


def lose(coordinator: Coordinator, name: str, channel: Channel) -> None:
    """As when its process is killed."""
    channel.close()
    until(lambda: coordinator.members[name].is_lost)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def join_once(
    said: list[str], words: str, coordinator: Coordinator, *names: str
) -> tuple[threading.Thread, list[Channel]]:
    """Some join as soon as the coordinator says that it waits."""
    joined: list[Channel] = []

    def come() -> None:
        until(lambda: any(words in text for text in said))
        joined.extend(join(coordinator, name) for name in names)

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    return thread, joined


def test_a_job_waits_for_others_in_place_of_those_lost(coordinator: Coordinator, said: list[str]) -> None:
    """Before, it ended with 'No worker has joined.'."""
    first = join(coordinator, "pi-1")
    coordinator.wait_for(1, 20.0)
    lose(coordinator, "pi-1", first)
    thread, joined = join_once(said, "Waiting for 1 worker(s) in place of those that were lost", coordinator, "pi-2")
    with open_session(coordinator) as session:
        assert session.cluster.names == ("pi-2",)
    thread.join(10)
    assert joined


def test_of_several_only_those_lost_are_waited_for(coordinator: Coordinator, said: list[str]) -> None:
    first, stays = join(coordinator, "pi-1"), join(coordinator, "pi-2")
    coordinator.wait_for(["pi-1", "pi-2"], 20.0)
    lose(coordinator, "pi-1", first)
    thread, _ = join_once(said, "Waiting for pi-1 in place", coordinator, "pi-1")
    with open_session(coordinator) as session:
        assert sorted(session.cluster.names) == ["pi-1", "pi-2"]
    thread.join(10)
    stays.close()


def test_the_wait_has_the_same_limit_as_the_first(coordinator: Coordinator, said: list[str]) -> None:
    first, second = join(coordinator, "pi-1"), join(coordinator, "pi-2")
    coordinator.wait_for(2, 0.5)
    lose(coordinator, "pi-1", first)
    with open_session(coordinator) as session:
        assert session.cluster.names == ("pi-2",)
    assert any("Beginning with 1 of 2 workers" in text for text in said)
    coordinator.wait_for(1, 0.3)
    lose(coordinator, "pi-2", second)
    with pytest.raises(TimedOut, match=r"did not join within 0\.3 s: 0 of 1"), open_session(coordinator):
        pass


def test_a_job_that_has_begun_waits_for_nobody(coordinator: Coordinator) -> None:
    first, second = join(coordinator, "pi-1"), join(coordinator, "pi-2")
    coordinator.wait_for(2, 20.0)
    with open_session(coordinator):
        lose(coordinator, "pi-1", first)
    start = time.monotonic()
    with open_session(coordinator) as session:
        assert session.cluster.names == ("pi-2",)
    assert time.monotonic() - start < 5
    second.close()


# While they measure


def measuring(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """The first measurement loses a worker; the second is made."""
    losses = [then]

    def measure(session: Session, *_: object, **__: object) -> tuple[Cluster, Profile]:
        if losses:
            losses.pop()()
            raise WorkerLost("Worker pi-1 was lost.")
        return session.cluster, Profile({})

    monkeypatch.setattr(session_measuring, "measure", measure)


def test_the_only_worker_is_lost_while_it_measures(
    coordinator: Coordinator, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = join(coordinator, "pi-1")
    coordinator.wait_for(1, 20.0)
    measuring(monkeypatch, lambda: lose(coordinator, "pi-1", first))
    thread, joined = join_once(said, "Waiting for others to join: 0 of 1", coordinator, "pi-2")
    with open_session(coordinator) as session:
        cluster, _ = measure_who_stays(session, None, 8, RetryPolicy("auto"))  # type: ignore[arg-type]
    assert cluster.names == ("pi-2",)
    thread.join(10)
    assert joined


def test_where_nobody_comes_it_ends_with_what_went_wrong(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = join(coordinator, "pi-1")
    coordinator.wait_for(1, 0.5)
    measuring(monkeypatch, lambda: lose(coordinator, "pi-1", first))
    with open_session(coordinator) as session, pytest.raises(WorkerLost, match="pi-1 was lost"):
        measure_who_stays(session, None, 8, RetryPolicy("auto"))  # type: ignore[arg-type]

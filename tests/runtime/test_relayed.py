"""Workers that cannot be reached at their own addresses, measured and examined through a relay; on loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from doctor_ports import closed_port
from manyhands.doctor.check import OK, WARNING, PairRate
from manyhands.doctor.network import pair_checks
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import WorkerLost
from manyhands.facts.link import Link
from manyhands.runtime import measuring, route_probing, routes
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.failure_diagnosis import FailureDiagnosis
from manyhands.runtime.joining import Joining
from manyhands.runtime.measuring import learn_routes, probe_pair
from manyhands.runtime.run import Run
from manyhands.runtime.stalls import Verdict
from manyhands.runtime.worker import Worker
from manyhands.transport.transport import TcpTransport


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_probing, "PROBE_LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(measuring, "LIMIT_OF_MEMBER_PROBE", 0.5)
    monkeypatch.setattr(routes, "is_behind", lambda member: False)  # as loopback is, for all others


@contextlib.contextmanager
def workers(*names: str, relays: tuple[str, ...] = ()) -> Iterator[tuple[Coordinator, list[str]]]:
    """Workers as threads. Nobody listens where `a` and `b` are said to be."""
    events: list[str] = []
    with Coordinator(on_event=events.append) as coordinator:
        coordinator.routes.is_active = True
        made = [
            Worker(Joining(*coordinator.address, coordinator.token, name, is_relay=name in relays), TcpTransport())
            for name in names
        ]
        threads = [threading.Thread(target=_run, args=(worker,), daemon=True) for worker in made]
        for thread in threads:
            thread.start()
        coordinator.wait_for(names, 20)
        for name in ("a", "b"):
            coordinator.members[name].address = ("127.0.0.1", closed_port())
        yield coordinator, events
    for thread in threads:
        thread.join(10)


def _run(worker: Worker) -> None:
    with contextlib.suppress(WorkerLost):
        worker.run()


def forwarded(coordinator: Coordinator) -> int:
    return int(coordinator.endpoint._rendezvous.relay.forwarded_bytes)  # type: ignore[attr-defined]


def measured(coordinator: Coordinator) -> dict[str, Link]:
    return probe_pair(coordinator, ("a", "b"), {"a": 50_000, "b": 50_000})


def test_a_pair_is_relayed_by_the_coordinator_and_measured_through_it() -> None:
    with workers("a", "b") as (coordinator, events):
        coordinator.routes.suspect("ab")
        links = measured(coordinator)
        assert set(links) == {"a", "b"}
        assert forwarded(coordinator) > 100_000
        assert events[-1] == "a and b do not reach each other: the coordinator relays between them"
        measured(coordinator)
        assert sum("relays between" in text for text in events) == 1, "it is news only once"


def test_one_that_offers_it_relays_and_the_coordinator_when_it_has_died() -> None:
    with workers("a", "b", "r", relays=("r",)) as (coordinator, _):
        coordinator.routes.suspect("ab")
        measured(coordinator)
        assert coordinator.routes.relay("a", "b") == "r"
        assert forwarded(coordinator) == 0
        coordinator.evict("r", "for the test")
        end = time.monotonic() + 10
        while coordinator.routes.relay("a", "b") == "r":
            assert time.monotonic() < end
        time.sleep(0.2)  # a and b notice that their connection has ended
        measured(coordinator)
        assert coordinator.routes.relay("a", "b") == COORDINATOR
        assert forwarded(coordinator) > 100_000


def test_the_doctor_says_what_is_relayed() -> None:
    with workers("a", "b", "c") as (coordinator, _):
        links: list[PairRate] = []
        checks = list(pair_checks(coordinator, ["a", "b", "c"], links, lambda text: None))
        reach = {check.where: check for check in checks if check.subject == "reach"}
        assert set(reach) == {"a, b"}, "to c both connect by themselves"
        assert reach["a, b"].state == WARNING
        assert "the coordinator relays between them" in reach["a, b"].found
        assert "manyhands worker --relay" in reach["a, b"].fix
        shown = {check.where: check for check in checks if check.subject == "link"}
        assert {check.state for check in shown.values()} == {OK}
        assert "through the coordinator" in shown["a, b"].found
        assert "through" not in shown["a, c"].found
        assert {link.relay for link in links if {link.source, link.target} == {"a", "b"}} == {COORDINATOR}
        assert {link.relay for link in links if "c" in (link.source, link.target)} == {""}


def test_a_probe_tells_a_member_from_another_at_the_same_address() -> None:
    """Two sites may have the same private addresses: who answers must be who was looked for."""
    with workers("a", "b", "c") as (coordinator, _):
        coordinator.members["a"].address = coordinator.members["c"].address
        coordinator.routes.suspect("ab")
        learn_routes(coordinator, ["a", "b"])
        assert coordinator.routes.relay("a", "b") == COORDINATOR


@pytest.mark.parametrize("is_another_way", [True, False])
def test_who_does_not_reach_another_is_evicted_only_where_there_is_no_other_way(is_another_way: bool) -> None:
    evicted: list[str] = []
    coordinator = SimpleNamespace(
        routes=SimpleNamespace(give_up=lambda pairs: is_another_way), evict=lambda name, reason: evicted.append(name)
    )
    run: Any = SimpleNamespace(coordinator=coordinator)
    run._diagnosis = FailureDiagnosis(run)
    run._diagnosis.lost = lambda name, reason: WorkerLost(reason)
    error = Run.evicted(run, Verdict("b", "it and a do not reach each other", (("a", "b"),)))
    assert isinstance(error, WorkerLost)
    assert evicted == ([] if is_another_way else ["b"])
    assert ("connected in another way" in error.message) == is_another_way
    if is_another_way:
        assert run._diagnosis.explained(error) is error, "nobody is looked for that was lost"

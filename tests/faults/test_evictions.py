"""A device that answers and is of no use is evicted within seconds, and the weights are those of an undisturbed run."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fault_cluster import PLANS, Fault, FaultCluster, Trip, reference
from manyhands.executor.executor import Executor
from manyhands.facts.errors import WorkerLost
from manyhands.runtime import quarantine, service, stalls
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.joining import Joining
from manyhands.runtime.order import RunState
from manyhands.runtime.quarantine import Quarantine
from manyhands.runtime.worker import Worker
from manyhands.transport.inprocess import InProcessTransport

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
FAULT_STEP = 4
RECOVERY_SECONDS = 20.0
"""Of a run whose limit for standstill is 0.6 s; before evictions it took ten minutes and ended."""


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LEAST_SECONDS", 0.6)
    monkeypatch.setattr(stalls, "FIRST_LEAST_SECONDS", 2.0)
    monkeypatch.setattr(stalls, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(stalls, "CONNECT_SECONDS", 0.8)


def check_evicted(trip: Trip, device: str, words: str, plan: str) -> None:
    trip.check(reference(PLANS[plan].micro_batches))
    lost = trip.facts("lost")
    assert [facts["devices"] for facts in lost] == [[device]], lost
    assert words in lost[0]["reason"], lost
    assert trip.cluster.coordinator.members[device].is_evicted
    recovered = trip.facts("recovered")
    assert recovered, trip.logged
    assert recovered[0]["seconds"] < RECOVERY_SECONDS


@pytest.mark.quick("samples-b-backward")
@pytest.mark.parametrize(
    ("plan", "device", "place"),
    [
        ("samples", "b", "backward"),
        pytest.param("samples", "c", "all-reduce", marks=pytest.mark.slow),
        ("tiles", "b", "forward"),
        pytest.param("pipeline", "b", "backward", marks=pytest.mark.slow),
        ("pipeline", "c", "loss"),
        pytest.param("hybrid", "a", "step", marks=pytest.mark.slow),
    ],
)
def test_a_device_that_hangs_is_evicted(plan: str, device: str, place: str) -> None:
    """Its heartbeats go on: judged by those, everybody waits for ten minutes and the run ends."""
    fault = Fault(device, place, "hung", step=FAULT_STEP)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS[plan])
    check_evicted(trip, device, "no progress" if place != "all-reduce" else "", plan)


@pytest.mark.slow
@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("plan", "pair", "gone"),
    [
        ("samples", ("b", "c"), "c"),
        ("tiles", ("a", "b"), "b"),
        pytest.param("pipeline", ("a", "b"), None, marks=pytest.mark.slow),
    ],
)
def test_two_devices_that_do_not_reach_each_other(plan: str, pair: tuple[str, str], gone: str | None) -> None:
    """Both reach the coordinator. The run goes on without the one that does less."""
    fault = Fault(pair[0], "send" if plan != "samples" else "forward", "parted", step=FAULT_STEP, to=pair[1])
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS[plan])
        if gone is None:
            gone = next(name for name in pair if cluster.coordinator.members[name].is_lost)
    check_evicted(trip, gone, "do not reach each other", plan)


@pytest.mark.slow
def test_two_devices_that_cannot_connect_for_the_next_plan() -> None:
    """The partition comes while the job recovers from a loss."""
    lost = Fault("c", "backward", step=FAULT_STEP)
    parted = Fault("a", "survey", "parted", to="b", after=lost)
    with FaultCluster(NAMES, lost, parted) as cluster:
        trip = cluster.travel(PLANS["samples"], at_event={"lost": lambda: break_link(cluster)})
    trip.check(reference(1))
    assert trip.facts("lost")[0]["devices"] == ["c"]
    assert any("do not reach each other" in facts["reason"] for facts in trip.facts("lost")), trip.facts("lost")


def break_link(cluster: FaultCluster) -> None:
    cluster.workers["a"].endpoint.lose("b")


@pytest.mark.slow
def test_a_device_that_sends_other_sizes_than_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver refuses it and waits for the right one, which never comes."""
    fault = Fault("b", "all-reduce", "called", step=FAULT_STEP, does=send_too_much)
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", "not in the plan", "samples")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "device"), [("hybrid", "c"), pytest.param("pipeline", "b", marks=pytest.mark.slow)])
def test_a_device_whose_copies_are_not_what_it_announced(plan: str, device: str) -> None:
    """No round is fed while copies are missing: the others have nothing to wait for."""
    fault = Fault(device, "send copy", "called", step=4, does=lambda worker: send_too_much(worker, "state"))
    with FaultCluster(NAMES, fault) as cluster:
        trip = cluster.travel(PLANS[plan], steps=14)
    trip.check(reference(PLANS[plan].micro_batches, 14))
    lost = trip.facts("lost")
    assert [facts["devices"] for facts in lost] == [[device]]
    assert "refused" in lost[0]["reason"]


def send_too_much(worker: Worker, topics: str = "") -> None:
    """From now on what this worker sends under such topics is one byte longer."""
    send = worker.endpoint.send

    def longer(to: str, step: int, topic: str, parts: Any, **options: bool) -> None:
        more = [torch.zeros(1, dtype=torch.uint8)] if topic.startswith(topics) else []
        send(to, step, topic, [*parts, *more], **options)

    worker.endpoint.send = longer  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_device_that_says_it_is_further_than_it_can_be() -> None:
    def lie(worker: Worker) -> None:
        worker._send(Progress(worker.prepared.generation, 7, 0.01, (0.0,)))  # type: ignore[union-attr]

    with FaultCluster(NAMES, Fault("b", "backward", "called", step=FAULT_STEP, does=lie)) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", "it says that it has done step 7", "samples")


@pytest.mark.slow
def test_a_device_that_says_it_is_done_and_sends_nothing() -> None:
    """Within what it was fed the lie is not absurd: the others wait for its gradients."""

    def lie(worker: Worker) -> None:
        worker._send(Progress(worker.prepared.generation, FAULT_STEP, 0.01, (0.0,)))  # type: ignore[union-attr]
        worker.endpoint.send = lambda *words, **named: None  # type: ignore[method-assign]

    with FaultCluster(NAMES, Fault("b", "backward", "called", step=FAULT_STEP, does=lie)) as cluster:
        trip = cluster.travel(PLANS["samples"])
    check_evicted(trip, "b", "for what it was to send", "samples")


@pytest.mark.slow
def test_two_that_hang_at_once() -> None:
    """The second is found when it is asked what state it holds."""
    faults = [Fault(name, "backward", "hung", step=FAULT_STEP) for name in ("b", "c")]
    with FaultCluster(NAMES, *faults) as cluster:
        trip = cluster.travel(PLANS["samples"])
    trip.check(reference(1))
    assert {name for name, one in cluster.coordinator.members.items() if one.is_evicted} == {"b", "c"}


def test_the_only_device_hangs() -> None:
    """Nobody is left: that is said at once, not after ten minutes."""
    with FaultCluster(("a",), Fault("a", "backward", "hung", step=FAULT_STEP)) as cluster:
        plan = PLANS["samples"]
        alone = plan.__class__(plan.network, plan.batch_size, (plan.stages[0].__class__((0, 3), ("a",)),))
        with pytest.raises(WorkerLost, match="no progress"):
            cluster.travel(alone)


@pytest.mark.slow
def test_a_slow_device_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times slower than usual: it is waited for."""
    act = Executor._act

    def slowly(one: Executor, action: Any) -> None:
        start = time.monotonic()
        act(one, action)
        if one.device == "b" and one.step >= 3:
            time.sleep(4 * (time.monotonic() - start))

    monkeypatch.setattr(Executor, "_act", slowly)
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(PLANS["samples"])
    trip.check(reference(1), generations=1)


@pytest.mark.slow
def test_a_slow_data_set_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the coordinator's next batch, for longer than the limit."""
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(PLANS["pipeline"], at_step={4: lambda: time.sleep(2.5)})
    trip.check(reference(2), generations=1)


@pytest.mark.slow
def test_a_slow_disk_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything has come, and the coordinator is still writing it when the last round is long over."""
    saved = ElasticJob._saved

    def slowly(one: ElasticJob, found: RunState) -> None:
        time.sleep(2.5)
        saved(one, found)

    monkeypatch.setattr(ElasticJob, "_saved", slowly)
    with FaultCluster(NAMES) as cluster:
        trip = cluster.travel(PLANS["pipeline"])
    trip.check(reference(2), generations=1)
    assert not any(member.is_evicted for member in cluster.coordinator.members.values())


class TestQuarantine:
    def test_longer_each_time(self) -> None:
        kept = Quarantine()
        assert kept.refusal("p", "pi", 0.0) is None
        kept.begin("p", "it hung", 0.0)
        refusal = kept.refusal("p", "pi", 1.0)
        assert refusal is not None
        assert refusal.again_seconds == quarantine.FIRST_SECONDS - 1
        assert "it hung" in refusal.reason
        assert kept.refusal("q", "pi", 1.0) is None
        assert kept.refusal("p", "pi", quarantine.FIRST_SECONDS) is None
        kept.begin("p", "it hung", 100.0)
        again = kept.refusal("p", "pi", 100.0)
        assert again is not None
        assert again.again_seconds == 2 * quarantine.FIRST_SECONDS

    def test_an_evicted_worker_is_told_when_it_may_come_back(self) -> None:
        with FaultCluster(("a", "b")) as cluster:
            cluster.coordinator.evict("b", "it hung")
            member = cluster.coordinator.members["b"]
            assert member.is_lost
            assert member.is_evicted
            process = member.identity.process
            found = cluster.coordinator.membership.quarantine.refusal(process, "b", cluster.clock())
            assert found is not None
            cluster.until(lambda: any(name == "b" for name, _ in cluster.ended))
            error = next(error for name, error in cluster.ended if name == "b")
            assert isinstance(error, WorkerLost)

    def test_an_evicted_worker_comes_back_when_it_may(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quarantine, "FIRST_SECONDS", 2.5)  # it tries first after a second
        monkeypatch.setattr(service, "_PAUSE_SECONDS", 0.05)
        played, said = InProcessTransport(limit_seconds=20.0), []
        with Coordinator(transport=played) as coordinator:
            joining = Joining(*coordinator.address, coordinator.token, "b", limit_seconds=20.0)
            thread = threading.Thread(target=service.serve, args=(joining, said.append), kwargs={"transport": played})
            thread.start()
            coordinator.wait_for(["b"], 20.0)
            first = coordinator.members["b"]
            coordinator.evict("b", "it hung")
            coordinator.wait_for(["b"], 20.0)
            assert coordinator.members["b"] is not first
        thread.join(20.0)
        assert not thread.is_alive()
        assert any("b was evicted from this run: it hung. Joining again in" in text for text in said), said

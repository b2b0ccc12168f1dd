"""What the exchange of state leaves alone: the bytes that a device sends for the plan."""

from __future__ import annotations

import threading

import pytest

from fault_cluster import LIMIT_SECONDS, PLANS, STEPS, FaultCluster, captured, reference
from manyhands.executor.executor import Executor
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import COORDINATOR
from manyhands.explaining.tile_report import planned_traffic
from manyhands.runtime.keeping import topic
from manyhands.schedule.policy import Schedule

pytestmark = pytest.mark.xdist_group("faults")  # the same reference
COPIED = 6
"""The steps after which the copy is taken that leaves while the log is written."""


@pytest.mark.slow
def test_a_copy_that_leaves_while_the_log_is_written_is_not_counted_with_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was once taken off the bytes sent before it was among them: a device sent -776 bytes in reductions."""
    plan, graph = PLANS["pipeline"], captured()
    leaving, written = threading.Event(), threading.Event()
    log_of = Executor.log.fget
    assert log_of is not None

    def log(executor: Executor) -> DeviceLog:
        if executor.device != "a":
            return log_of(executor)
        assert leaving.wait(LIMIT_SECONDS)
        found = log_of(executor)
        written.set()
        return found

    def sending(source: str, target: str, step: int, name: str) -> None:
        if (source, name) == ("a", topic(COPIED)) and target != COORDINATOR:
            leaving.set()
            assert written.wait(LIMIT_SECONDS)

    with FaultCluster(plan.devices) as cluster:
        cluster.transport.before_send = sending
        monkeypatch.setattr(Executor, "log", property(log))
        trip = cluster.travel(plan)
    trip.check(reference(plan.micro_batches), generations=1)
    assert written.is_set()
    traffic = planned_traffic(Schedule(plan, graph.network), graph)
    assert traffic.differences(trip.outcome.logs, plan) == []
    assert {log.rounds for log in trip.outcome.logs.values()} == {STEPS}
    assert sum(trip.outcome.logs["b"].state_bytes.values()) > 0

"""Whatever happens to a worker that holds a weight which other stages hold too: the run ends as an undisturbed one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from fault_cluster import STEPS, Fault, FaultCluster, Reference
from manyhands.executor.optimizers import slots
from manyhands.facts.errors import NotFinite
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.runtime.worker import Worker
from manyhands.schedule.actions import Reduce
from real_runs import ADAM, BATCH, CLASSES, Pictures

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c", "d")
FAULT_STEP = 5
TIED = "1.0.weight"
"""The kernel of the second layer and of the third."""


@cache
def captured() -> Graph:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, CLASSES)),
    ).double()
    module[2][0].weight = module[1][0].weight  # type: ignore[index]
    data = Pictures()
    graph = capture(module, data.pictures[:4], loss=functional.cross_entropy, target=data.classes[:4])
    read_document(to_document(graph))
    return graph


def plan(*stages: Stage) -> Plan:
    return Plan("Sequential", BATCH, stages, micro_batches=2, optimizer_slots=slots(ADAM))


def hybrid() -> Plan:
    """The weight on three devices of two stages."""
    first = Stage((0, 2), ("a", "b"), BySamples((2, 4)))
    return plan(first, Stage((2, 3), ("c",), Single()), Stage((3, 4), ("d",), Single()))


@cache
def reference() -> Reference:
    with FaultCluster(("alone",)) as cluster:
        trip = cluster.travel(plan(Stage((0, 4), ("alone",), Single())), optimizer=ADAM, graph=captured())
    assert trip.outcome.state is not None
    return Reference(trip.outcome.losses, trip.outcome.state)


@pytest.mark.quick("c-step")
@pytest.mark.parametrize("place", ["forward", "backward", "all-reduce", "step", "keep"])
@pytest.mark.parametrize("device", NAMES[:3])
def test_a_holder_is_lost(device: str, place: str) -> None:
    step = FAULT_STEP + (FAULT_STEP % 2 if place == "keep" else 0)
    with FaultCluster(NAMES, Fault(device, place, "killed", step=step)) as cluster:
        trip = cluster.travel(hybrid(), optimizer=ADAM, graph=captured())
    trip.check(reference(), generations=2)
    assert len(trip.steps) == STEPS


def drifts(worker: Worker) -> None:
    assert worker.prepared is not None
    assert worker.prepared.executor is not None
    with torch.no_grad():
        worker.prepared.executor.weights.tensors[TIED].view(-1)[0] += 1e-6


def not_a_number(worker: Worker) -> None:
    assert worker.prepared is not None
    assert worker.prepared.executor is not None
    reducer = worker.prepared.executor.reductions.reducer
    start = reducer.start

    def spoilt(reduce: Reduce, step: int, gradients: list[torch.Tensor]) -> None:
        if step >= FAULT_STEP:
            gradients[0].view(-1)[0] = float("nan")
        start(reduce, step, gradients)

    reducer.start = spoilt  # type: ignore[method-assign]


def test_gradients_that_no_replica_can_judge_end_the_run() -> None:
    """As in any pipeline: nobody else computes what c does, so it may be the network."""
    with FaultCluster(NAMES, Fault("c", "backward", "called", step=FAULT_STEP, does=not_a_number)) as cluster:
        with pytest.raises(NotFinite, match=f"it began in the gradients of step {FAULT_STEP}, in layer .* on c"):
            cluster.travel(hybrid(), optimizer=ADAM, graph=captured())
        assert not any(member.is_evicted for member in cluster.coordinator.members.values())


@pytest.mark.slow
def test_gradients_that_a_replica_has_otherwise_are_its_own() -> None:
    with FaultCluster(NAMES, Fault("a", "backward", "called", step=FAULT_STEP, does=not_a_number)) as cluster:
        trip = cluster.travel(hybrid(), optimizer=ADAM, graph=captured())
    trip.check(reference())
    assert [facts["devices"] for facts in trip.facts("lost")] == [["a"]]


@pytest.mark.slow
@pytest.mark.quick("c")
@pytest.mark.parametrize("device", NAMES[:3])
def test_a_copy_that_drifts_is_noticed(device: str) -> None:
    """Copies in other stages are compared like those of replicas."""
    with FaultCluster(NAMES, Fault(device, "forward", "called", step=FAULT_STEP, does=drifts)) as cluster:
        trip = cluster.travel(hybrid(), optimizer=ADAM, graph=captured())
    trip.check(reference())
    (lost,) = trip.facts("lost")
    assert lost["devices"] == [device]
    assert "its weights of layers 1.0 to 2.0" in lost["reason"]

"""A GPU out of memory: the job goes on once with twice as many micro-batches, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fault_cluster import Fault, FaultCluster, Trip, assert_equal, captured
from manyhands.facts.errors import BadPlan, GpuOutOfMemory, OutOfMemory
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.runtime.worker import Worker
from manyhands.schedule.more_micro_batches import with_twice_the_micro_batches
from real_runs import BATCH, CLASSES, LAYERS

pytestmark = pytest.mark.xdist_group("faults")


def plain() -> Graph:
    """Captured without batch norm, whose statistics micro-batches would cut."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)).double()
    batch = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return capture(
        module, batch, loss=functional.cross_entropy, target=torch.tensor([0, 1, 2, 3]), granularity="blocks"
    )


def shared(graph: Graph, *, micro_batches: int = 1) -> Plan:
    size = BATCH // micro_batches
    stage = Stage((0, len(graph.network.layers)), ("a", "b"), BySamples((size - size // 3, size // 3)))
    return Plan(graph.network.name, BATCH, (stage,), micro_batches=micro_batches)


def exhausted(worker: Worker) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")


def out_of_memory(device: str, step: int, **options: object) -> Fault:
    return Fault(device, "backward", "called", step=step, does=exhausted, **options)  # type: ignore[arg-type]


def travelled(graph: Graph, plan: Plan, *faults: Fault) -> Trip:
    with FaultCluster(("a", "b"), *faults) as cluster:
        return cluster.travel(plan, graph=graph, steps=6)


@pytest.mark.parametrize("step", [0, 3])
def test_a_job_goes_on_with_twice_the_micro_batches(step: int) -> None:
    graph = plain()
    undisturbed = travelled(graph, shared(graph))
    fault = out_of_memory("b", step)
    trip = travelled(graph, shared(graph), fault)
    assert len(fault.fired) == 1
    assert trip.outcome.plan is not None
    assert trip.outcome.plan.micro_batches == 2
    assert trip.outcome.plan.devices == ("a", "b")
    assert [step for step, _ in trip.steps] == list(range(6))
    assert undisturbed.outcome.state is not None
    assert trip.outcome.state is not None
    assert_equal(trip.outcome.state.weights, undisturbed.outcome.state.weights)
    (facts,) = trip.facts("out of memory")
    assert "(2147483648 bytes) more were asked for" in facts["reason"]
    assert facts["reason"].endswith("Going on with 2 micro-batches in place of 1.")
    assert "lost" not in trip.events


def test_the_second_time_it_is_an_error() -> None:
    graph, first = plain(), out_of_memory("a", 1)
    second = out_of_memory("b", 2, after=first)
    with pytest.raises(GpuOutOfMemory, match="more were asked for"):
        travelled(graph, shared(graph), first, second)
    assert len(first.fired) == len(second.fired) == 1


def test_with_batch_norm_the_result_would_change() -> None:
    """So the error stays, and says why."""
    graph = captured()
    plan = Plan("Sequential", BATCH, (Stage((0, LAYERS), ("a", "b"), BySamples((8, 4))),))
    with FaultCluster(("a", "b"), out_of_memory("a", 1)) as cluster:
        with pytest.raises(OutOfMemory):
            cluster.travel(plan, graph=graph, steps=6)
        assert cluster.trip is not None
        (facts,) = cluster.trip.facts("out of memory")
    assert "batch norm" in facts["why_not"]


def test_what_cannot_be_halved() -> None:
    graph = plain()
    last = len(graph.network.layers)
    odd = Plan(graph.network.name, 15, (Stage((0, last), ("a",), Single()),))
    with pytest.raises(BadPlan, match=r"15 sample\(s\)"):
        with_twice_the_micro_batches(resolve(odd, graph.network), graph.network)
    thin = Plan(graph.network.name, 2, (Stage((0, last), ("a", "b"), BySamples((1, 1))),))
    with pytest.raises(BadPlan, match="without samples"):
        with_twice_the_micro_batches(resolve(thin, graph.network), graph.network)
    even = with_twice_the_micro_batches(resolve(shared(graph), graph.network), graph.network)
    assert (even.micro_batches, even.micro_batch_size) == (2, BATCH // 2)

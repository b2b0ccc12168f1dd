"""Whatever happens to a worker while batches have several lengths: the run ends as an undisturbed one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from causal_network import Words, drawn_lengths, every_word, tagger
from fault_cluster import STEPS, Fault, FaultCluster, Reference
from manyhands.data.length_order import LengthOrder
from manyhands.data.loader import Prefetcher
from manyhands.data.padding import measured, wanted_lengths
from manyhands.executor.optimizers import slots
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs
from real_runs import SGD

pytestmark = pytest.mark.xdist_group("faults")

LENGTHS, BATCH, FAULT_STEP = (5, 12), 4, 5
TEXTS = Words(drawn_lengths(3 * BATCH, 2, LENGTHS[-1]))


@cache
def order() -> LengthOrder:
    padding, lengths = measured(TEXTS, wanted_lengths(LENGTHS, None))
    return LengthOrder(len(TEXTS), BATCH, True, 6, padding=padding, sample_lengths=lengths)


@cache
def captured() -> LengthGraphs:
    steps = [order().length(step) for step in range(STEPS)]
    graphs: dict[int, Graph] = {}
    with Prefetcher(TEXTS, order(), 0, STEPS) as batches:
        for step, inputs, labels in batches:
            if steps[step] not in graphs:
                graphs[steps[step]] = capture(tagger(), inputs, loss=every_word, target=labels)
    return LengthGraphs(dict(sorted(graphs.items())), 0, steps)


def job() -> dict[str, Any]:
    lengths = captured()
    return {"graph": lengths.graphs[12], "lengths": lengths, "data": TEXTS, "batches_of": order()}


def plan(*groups: tuple[str, ...]) -> Plan:
    count = len(captured().graphs[12].network.layers)
    ends = [count * place // len(groups) for place in range(len(groups) + 1)]
    stages = tuple(
        Stage((first, last), group, BySamples((1,) * len(group)) if len(group) > 1 else Single())
        for first, last, group in zip(ends[:-1], ends[1:], groups)
    )
    return Plan("Sequential", BATCH, stages, micro_batches=2, optimizer_slots=slots(SGD))


@cache
def reference() -> Reference:
    with FaultCluster(("alone",)) as cluster:
        trip = cluster.travel(plan(("alone",)), **job())
    assert trip.outcome.state is not None
    return Reference(trip.outcome.losses, trip.outcome.state)


def test_the_fault_comes_between_lengths() -> None:
    steps = list(captured().steps)
    assert set(steps[:FAULT_STEP]) == set(steps[FAULT_STEP:]) == set(LENGTHS)


@pytest.mark.quick("c-backward")
@pytest.mark.parametrize(
    ("device", "place"),
    [(device, place) for device in "ac" for place in ("forward", "backward", "feed")] + [("a", "all-reduce")],
)
def test_a_worker_is_lost(device: str, place: str) -> None:
    with FaultCluster(("a", "b", "c"), Fault(device, place, "killed", step=FAULT_STEP)) as cluster:
        trip = cluster.travel(plan(("a", "b"), ("c",)), **job())
    trip.check(reference(), generations=2)
    assert len(trip.steps) == STEPS


@pytest.mark.slow
def test_a_worker_joins() -> None:
    with FaultCluster(("a", "b")) as cluster:
        trip = cluster.travel(plan(("a",), ("b",)), at_step={2: lambda: cluster.start("c")}, **job())
    trip.check(reference(), generations=2)

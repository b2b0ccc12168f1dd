"""A smaller last batch of each epoch is trained as on one device, whatever happens to a worker in that step.

step   0   1   2   3   4   5   6   7
of    12  12   5  12  12   5  12  12       and for one plan twice 1, which leaves devices with nothing to do
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fault_cluster import PLANS, STEPS, Fault, FaultCluster, Reference, Trip, assert_near
from manyhands.data.batch_stream import BatchStream
from manyhands.data.kept import KeptBatches
from manyhands.data.loaded import LoadedBatches
from manyhands.data.pushed import PushedBatches
from manyhands.executor.optimizers import slots
from manyhands.facts.errors import BadData
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.job.validation import HeldOut, JobValidation, Validated
from manyhands.runtime import elastic_job
from manyhands.runtime.validating import CheckpointRequests
from real_runs import BATCH, LAYERS, SGD, Pictures, network

pytestmark = pytest.mark.xdist_group("faults")

NAMES = ("a", "b", "c")
SMALL = 2
"""The first step of a smaller batch."""
SIZES = (BATCH, BATCH, 5)
WHOLE = {
    **PLANS,
    "gateway": Plan("Sequential", BATCH, (Stage((0, LAYERS), NAMES, BySamples((2, 5, 5)), reduce="gateway"),)),
}
"""Plans whose batch norm takes its statistics over the whole batch, so that they come to what PyTorch does."""
for _name in ("pipeline", "hybrid"):
    WHOLE[_name] = Plan(
        "Sequential", BATCH,
        tuple(
            Stage(stage.layers, stage.devices, BySamples((4, 8)) if len(stage.devices) > 1 else Single())
            for stage in PLANS[_name].stages
        ),
    )  # fmt: skip


def batches(sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch, of batches of these sizes."""
    data, first = Pictures(), 0
    for size in sizes:
        yield data.pictures[first : first + size], data.classes[first : first + size]
        first += size


@cache
def captured() -> Graph:
    data = Pictures()
    return capture(
        network(dropout=0.0), data.pictures[:4], loss=functional.cross_entropy, target=data.classes[:4],
        granularity="blocks",
    )  # fmt: skip


@cache
def by_pytorch(sizes: tuple[int, ...] = SIZES, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of an ordinary loop."""
    model = network(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), **SGD.options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in batches(sizes):
            if len(losses) == steps:
                break
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def travelled(
    plan: Plan, *faults: Fault, sizes: tuple[int, ...] = SIZES, cluster: FaultCluster | None = None, **options: Any
) -> Trip:
    with cluster or FaultCluster(NAMES, *faults) as cluster:
        stream = BatchStream(lambda: batches(sizes))
        stream.first_batch()
        loaded = LoadedBatches(stream, options.get("steps", STEPS), KeptBatches(), wake=cluster.coordinator.wake)
        return cluster.travel(plan, loaded=loaded, graph=captured(), **options)


@cache
def alone(sizes: tuple[int, ...] = SIZES, steps: int = STEPS) -> Reference:
    stage = Stage((0, LAYERS), ("alone",), Single())
    plan = Plan("Sequential", BATCH, (stage,), optimizer_slots=slots(SGD))
    trip = travelled(plan, sizes=sizes, steps=steps, cluster=FaultCluster(("alone",)))
    assert trip.outcome.state is not None
    return Reference(trip.outcome.losses, trip.outcome.state)


def check(trip: Trip, sizes: tuple[int, ...] = SIZES, steps: int = STEPS, **wanted: Any) -> None:
    """It is what one device comes to, and that is what PyTorch comes to."""
    trip.check(alone(sizes, steps), **wanted)
    losses, weights = by_pytorch(sizes, steps)
    assert_near(trip.outcome.losses, losses)
    state = trip.outcome.state
    assert state is not None
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12, msg=name)
    expected = {step: sizes[step % len(sizes)] for step in range(steps) if sizes[step % len(sizes)] < BATCH}
    assert trip.outcome.smaller == expected


@pytest.mark.quick("samples-sizes0")
@pytest.mark.parametrize("sizes", [SIZES, (BATCH, 1)])
@pytest.mark.parametrize("plan", WHOLE)
def test_it_equals_one_device(plan: str, sizes: tuple[int, ...]) -> None:
    trip = travelled(WHOLE[plan], sizes=sizes)
    check(trip, sizes, generations=1)
    assert trip.events == []
    assert trip.outcome.plan is not None
    assert trip.outcome.plan.batch_size == BATCH, "that of a smaller batch is for it alone"
    full = STEPS - len(trip.outcome.smaller)
    assert {log.rounds for log in trip.outcome.logs.values()} == {full}, "logs are of the plan's rounds"
    assert set(trip.outcome.logs) == set(trip.outcome.plan.devices)


@pytest.mark.slow
def test_the_last_step_of_all_may_be_smaller() -> None:
    trip = travelled(WHOLE["samples"], steps=6, snapshots=(3, 5))
    check(trip, steps=6, generations=1)
    assert trip.saved == [3, 5, 6]
    assert {log.rounds for log in trip.outcome.logs.values()} == {4}


@pytest.mark.slow
def test_batches_of_one_size_are_one_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = elastic_job.Run

    def run(coordinator: Any, order: Any, *rest: Any, **named: Any) -> Any:
        made.append(order.plan.batch_size)
        return real(coordinator, order, *rest, **named)

    monkeypatch.setattr(elastic_job, "Run", run)
    travelled(WHOLE["samples"], sizes=(BATCH, BATCH))
    assert made == [BATCH]
    made.clear()
    travelled(WHOLE["samples"])
    assert made == [BATCH, 5, BATCH, 5, BATCH]


@pytest.mark.quick("samples-a-killed-backward")
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize("kind", ["killed", "silent"])
@pytest.mark.parametrize("device", ["a", "b"])
@pytest.mark.parametrize("plan", ["samples", "pipeline", "hybrid", "tiles+single"])
def test_a_worker_lost_in_the_smaller_step(plan: str, device: str, kind: str, place: str) -> None:
    begun = Fault(device, "prepare", "called", step=SMALL, does=lambda worker: None)
    trip = travelled(WHOLE[plan], begun, Fault(device, place, kind, step=SMALL, after=begun))
    check(trip, generations=2)
    (lost,) = trip.facts("lost")
    assert lost["devices"] == [device]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("plan", ["samples", "pipeline"])
def test_a_worker_lost_while_nothing_is_computed(plan: str) -> None:
    """The first question of what there is comes between the last whole batch and the smaller one."""
    trip = travelled(WHOLE[plan], Fault("b", "survey"))
    check(trip, generations=2)
    assert [facts["devices"] for facts in trip.facts("lost")] == [["b"]]


@pytest.mark.slow
def test_a_worker_lost_in_the_smaller_step_of_a_loop() -> None:
    """Batches that were pushed, which nobody could load again."""
    begun = Fault("b", "prepare", "called", step=SMALL, does=lambda worker: None)
    with FaultCluster(NAMES, begun, Fault("b", "backward", step=SMALL, after=begun)) as cluster, KeptBatches() as kept:
        pushed = PushedBatches(0, kept)
        for _, (inputs, targets) in zip(range(STEPS), chain.from_iterable(map(batches, repeat(SIZES)))):
            pushed.push(inputs, targets)
        trip = cluster.travel(WHOLE["pipeline"], loaded=nullcontext(pushed), graph=captured())
    check(trip, generations=2)
    assert pushed.samples_at(STEPS - 1) == BATCH


@pytest.mark.slow
def test_a_worker_lost_that_had_no_sample_of_it() -> None:
    """Of two samples a and b have one each: c is lost meanwhile, and the plan after it is for the others."""
    fault = Fault("a", "backward", "called", step=SMALL, does=lambda worker: cluster.transport.cut("c"))
    cluster = FaultCluster(NAMES, fault)
    trip = travelled(WHOLE["samples"], sizes=(BATCH, BATCH, 2), cluster=cluster)
    check(trip, (BATCH, BATCH, 2))
    assert [facts["devices"] for facts in trip.facts("lost")] == [["c"]]
    assert [set(plan.devices) for plan in trip.plans] == [{"a", "b"}]


@pytest.mark.slow
def test_who_had_a_sample_alone_is_lost_with_what_came_of_it() -> None:
    """b alone computes the smaller batch: the others have the state of before, and run it again."""
    sizes, plan = (BATCH, 1), Plan("Sequential", BATCH, (Stage((0, LAYERS), NAMES, BySamples((3, 6, 3))),))
    before = Fault("b", "step", "called", step=1, does=lambda worker: None)
    trip = travelled(plan, before, Fault("b", "prepare", after=before), sizes=sizes)
    check(trip, sizes, generations=2)
    assert trip.outcome.replayed_steps >= 1


@pytest.mark.slow
def test_a_worker_joins_in_the_smaller_step() -> None:
    fault = Fault("a", "backward", "called", step=SMALL, does=lambda worker: cluster.start("c"))
    cluster = FaultCluster(("a", "b"), fault)
    two = Plan("Sequential", BATCH, (Stage((0, LAYERS), ("a", "b"), BySamples((6, 6))),))
    trip = travelled(two, cluster=cluster)
    check(trip, generations=2)
    assert trip.facts("recovered")[0]["replayed"] == 0
    assert "c" in trip.plans[0].devices


@pytest.mark.slow
def test_a_worker_leaves_in_the_smaller_step() -> None:
    fault = Fault("a", "backward", "called", step=SMALL, does=lambda worker: cluster.ask_to_leave("b"))
    cluster = FaultCluster(NAMES, fault)
    trip = travelled(WHOLE["pipeline"], cluster=cluster)
    check(trip, generations=2)
    assert trip.facts("recovered")[0]["replayed"] == 0
    assert "b" not in trip.plans[0].devices


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("after", [SMALL - 1, SMALL])
def test_it_is_stopped_before_and_after_the_smaller_step(after: int) -> None:
    stops: list[int] = []
    trip = travelled(WHOLE["pipeline"], at_step={after: lambda: stops.append(after)}, should_stop=lambda: bool(stops))
    assert trip.outcome.is_stopped
    state = trip.outcome.state
    assert state is not None
    assert state.steps_done > after
    losses, weights = by_pytorch(steps=state.steps_done)
    assert_near(trip.outcome.losses, losses)
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_it_is_validated_and_saved_after_every_epoch() -> None:
    results: list[Validated] = []
    requests = CheckpointRequests()
    with FaultCluster(NAMES) as cluster:
        validation = JobValidation(
            cluster.coordinator, HeldOut(Pictures(29), 3, {}), captured(), functional.cross_entropy, steps=STEPS,
            steps_per_epoch=3, validated=0, report=lambda one, failure: results.append(one), should_stop=lambda: False,
        )  # fmt: skip
        trip = travelled(
            WHOLE["hybrid"], cluster=cluster, validation=validation, requests=requests,
            at_step={SMALL - 1: lambda: requests.add(SMALL), SMALL: lambda: requests.add(SMALL + 1)},
        )  # fmt: skip
    check(trip, generations=1)
    assert [(one.steps_done, one.epoch) for one in results] == [(3, 0), (6, 1)]
    assert set(trip.saved) >= {SMALL + 1, STEPS}
    for one in results:
        model, data = network(dropout=0.0), Pictures(29)
        model.load_state_dict(by_pytorch(steps=one.steps_done)[1])
        with torch.no_grad():
            loss = functional.cross_entropy(model.eval()(data.pictures), data.classes)
        assert one.metrics["loss"] == pytest.approx(float(loss), rel=1e-10)


def test_a_smaller_batch_that_cannot_be_trained_ends_the_job_with_its_step() -> None:
    """Local statistics: a device would have one value per channel; known only once the batch is there."""

    class Norms(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 5)
            ).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            return out

    data = Pictures()
    graph = capture(Norms(), data.pictures[:4], loss=functional.cross_entropy, target=data.classes[:4])
    stage = Stage((0, len(graph.network.layers)), ("a", "b"), BySamples((6, 6)))
    with FaultCluster(("a", "b")) as cluster:
        stream = BatchStream(lambda: batches((BATCH, BATCH, 1)))
        stream.first_batch()
        loaded = LoadedBatches(stream, STEPS, KeptBatches(), wake=cluster.coordinator.wake)
        plan = Plan(graph.network.name, BATCH, (stage,))
        with pytest.raises(BadData, match=r"(?s)step 2 has 1 sample\(s\); the others have 12.*one value.*drop_last"):
            cluster.travel(plan, loaded=loaded, graph=graph, snapshots=(2,))
        assert cluster.trip is not None
        assert cluster.trip.saved == [2]

"""Devices whose stages hold no weights: they have no state to give, and train, recover and are replaced like any other.

Whole clusters in this process, in float64, against plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fault_cluster import BACKUP_EVERY, SHUFFLED, STEPS, Fault, FaultCluster, Trip, assert_equal, assert_near
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph
from manyhands.runtime.control import Message
from manyhands.runtime.control_messages import State
from manyhands.runtime.worker import Worker
from manyhands.schedule.backup import holders
from manyhands.schedule.policy import Schedule
from real_runs import BATCH, CLASSES, Pictures

pytestmark = pytest.mark.xdist_group("without_weights")  # captured once

WEIGHTLESS = ((0, 1), (3, 5), (7, 8))
"""Layers of the network that hold no weights: at its beginning, in its middle and at its end."""


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, CLASSES, 3, padding=1), nn.BatchNorm2d(CLASSES),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).double()  # fmt: skip


def graph_of(module: nn.Module) -> Graph:
    data = Pictures(4)
    target = torch.tensor([0, 1, 2, 3])
    graph = capture(module, data.pictures, loss=functional.cross_entropy, target=target, granularity="operators")
    read_document(to_document(graph))  # msgspec crashes where several threads are the first to read a document
    return graph


@cache
def captured() -> Graph:
    graph = graph_of(network())
    assert len(graph.network.layers) == 8
    for first, last in WEIGHTLESS:
        assert not graph.network.weights_of(graph.network.layers[first].first, graph.network.layers[last - 1].last)
    return graph


PLANS: dict[str, tuple[Stage, ...]] = {
    "helped": (  # as strategy mixed may plan it: one has every weight, the other helps with pooling alone
        Stage((0, 3), ("a",), Single()), Stage((3, 5), ("a", "b"), ByTiles((2, 1))), Stage((5, 8), ("a",), Single()),
    ),
    "pipeline": (
        Stage((0, 1), ("a",), Single()), Stage((1, 3), ("b",), Single()), Stage((3, 5), ("c",), Single()),
        Stage((5, 7), ("d",), Single()), Stage((7, 8), ("e",), Single()),
    ),
    "shared": (
        Stage((0, 1), ("a", "b"), ByTiles((1, 3))), Stage((1, 3), ("c",), Single()),
        Stage((3, 5), ("d", "e"), BySamples((7, 5))), Stage((5, 8), ("c",), Single()),
    ),
}  # fmt: skip
WITHOUT = {"helped": {"b"}, "pipeline": {"a", "c", "e"}, "shared": {"a", "b", "d", "e"}}


def plan_called(kind: str) -> Plan:
    return Plan("Sequential", BATCH, PLANS[kind])


def weights_of(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    schedule = Schedule(plan, graph.network)
    return {name: schedule.lowering.work[name].weights() for name in plan.devices}


@dataclass
class Trained:
    """What plain PyTorch comes to."""

    losses: list[float]
    weights: dict[str, Tensor]


@cache
def by_pytorch() -> Trained:
    module, data = network(), Pictures()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    losses = []
    for step in range(STEPS):
        samples = SHUFFLED.indices(step)
        loss = functional.cross_entropy(module(data.pictures[samples]), data.classes[samples])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return Trained(losses, dict(module.state_dict()))


class Offers:
    """(device, step) -> the names of the tensors that a worker says its state has; None: those of the last time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heard: dict[tuple[str, int], tuple[str, ...] | None] = {}
        send = Worker._send

        def listening(worker: Worker, message: Message) -> None:
            if isinstance(message, State):
                listed = None if message.tensors is None else tuple(entry.name for entry in message.tensors)
                self.heard[worker.endpoint.name, message.step] = listed
            send(worker, message)

        patch.setattr(Worker, "_send", listening)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", PLANS)
def test_devices_without_weights_train_like_one_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, graph, offers = plan_called(kind), captured(), Offers(monkeypatch)
    assert {name for name, own in weights_of(plan, graph).items() if not own} == WITHOUT[kind]
    with FaultCluster(plan.devices) as cluster:
        trip = cluster.travel(plan, graph=graph, snapshots=(3,))
    for name in WITHOUT[kind]:
        assert offers.heard[name, 0] == (), "it says that there is nothing, which is not what it said before"
        assert offers.heard[name, BACKUP_EVERY] is None
    assert trip.saved == [3, STEPS]
    check(trip)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("kind", "device", "place"),
    [
        ("helped", "a", "backward"),  # the only copy of everything is at one without weights
        ("helped", "b", "keep"),
        ("pipeline", "b", "step"),
        ("pipeline", "e", "backward"),
        ("shared", "c", "send copy"),
        ("shared", "a", "forward"),
    ],
)
def test_a_job_goes_on_when_one_with_or_without_weights_is_lost(kind: str, device: str, place: str) -> None:
    plan, graph = plan_called(kind), captured()
    if device not in WITHOUT[kind]:
        assert holders(plan, weights_of(plan, graph))[device] in WITHOUT[kind]
    with FaultCluster(plan.devices, Fault(device, place, step=4)) as cluster:
        trip = cluster.travel(plan, graph=graph)
    (lost,) = trip.facts("lost")
    assert lost["devices"] == [device]
    assert "rewound" not in trip.events, "the copies that others keep are enough"
    check(trip, generations=2)


@pytest.mark.slow
def test_one_without_weights_is_asked_to_go() -> None:
    plan, graph = plan_called("pipeline"), captured()
    with FaultCluster(plan.devices) as cluster:
        trip = cluster.travel(plan, graph=graph, at_step={3: lambda: cluster.ask_to_leave("c")})
    assert "left" in trip.events
    assert trip.outcome.replayed_steps == 0
    check(trip, generations=2)


def check(trip: Trip, generations: int = 1) -> None:
    wanted, found = by_pytorch(), trip.outcome.state
    for fault in trip.cluster.faults:
        assert len(fault.fired) == 1, fault
    assert trip.cluster.strange == []
    assert trip.outcome.generations == generations, trip.logged
    assert_near(trip.outcome.losses, wanted.losses)
    assert found is not None
    assert found.steps_done == STEPS
    assert_equal(found.weights, wanted.weights)
    momenta = {name for name, _ in network().named_parameters()}
    assert {name.rpartition("/")[0] for name in found.optimizer} == momenta


@pytest.mark.slow
def test_a_network_without_any_weights() -> None:
    """There is nothing to train: losses are the network's own, and the state that is gathered is empty."""
    module = nn.Sequential(nn.ReLU(), nn.AvgPool2d((8, 1)), nn.Flatten())
    data, graph = Pictures(), graph_of(module)
    end = len(graph.network.layers)
    plan = Plan("Sequential", BATCH, (Stage((0, 1), ("a", "b"), ByTiles((1, 1))), Stage((1, end), ("b",), Single())))
    with FaultCluster(plan.devices) as cluster:
        trip = cluster.travel(plan, graph=graph)
    found, batches = trip.outcome.state, [SHUFFLED.indices(step) for step in range(STEPS)]
    assert_near(
        trip.outcome.losses,
        [functional.cross_entropy(module(data.pictures[one]), data.classes[one]).item() for one in batches],
    )
    assert found is not None
    assert (found.weights, found.optimizer, found.steps_done) == ({}, {}, STEPS)

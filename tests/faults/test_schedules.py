"""A worker is lost while rates change from step to step: steps that are run again have the rates that they had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from fault_cluster import PLANS, SHUFFLED, STEPS, Fault, FaultCluster
from manyhands.data.loader import Prefetcher
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.capture import capture
from real_runs import Pictures, network

pytestmark = pytest.mark.xdist_group("faults")

DECAY, GAMMA = 0.05, 0.7
GROUPS: list[dict[str, Any]] = [{"weights": ["0.1.*", "1.1.*", "2.2.bias"], "weight_decay": 0.0, "momentum": 0.5}]
SGD = Optimizer(
    "SGD", lr=0.1, momentum=0.9, weight_decay=DECAY, groups=GROUPS, schedule=("ExponentialLR", {"gamma": GAMMA})
)


@pytest.mark.quick("samples-b-step")
@pytest.mark.parametrize("place", ["forward", "step"])
@pytest.mark.parametrize(("plan", "device"), [("samples", "b"), ("hybrid", "a")])
def test_a_worker_is_lost(plan: str, device: str, place: str) -> None:
    module, reference = network(dropout=0.0), network(dropout=0.0)
    names = [[name] for name, _ in module.named_parameters()]
    with Prefetcher(Pictures(), SHUFFLED, 0, STEPS) as batches:
        data = [(inputs, targets) for _, inputs, targets in batches]
    graph = capture(module, *data[0][:1], loss=functional.cross_entropy, target=data[0][1], granularity="blocks")
    small = [p for p in reference.parameters() if p.dim() == 1]
    large = [p for p in reference.parameters() if p.dim() > 1]
    plain: list[dict[str, Any]] = [{"params": large, "weight_decay": DECAY}, {"params": small, "momentum": 0.5}]
    optimizer = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
    parts = PLANS[plan].micro_batches
    for inputs, targets in data:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts)):
            (functional.cross_entropy(reference(x), y) / parts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    fault = Fault(device, place, "killed", step=5)
    with FaultCluster(("a", "b", "c"), fault) as cluster:
        trip = cluster.travel(PLANS[plan], optimizer=SGD.over(names), graph=graph)
    assert len(fault.fired) == 1
    assert trip.outcome.generations == 2
    assert trip.outcome.state is not None
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(trip.outcome.state.weights[name], tensor, rtol=1e-9, atol=1e-11)

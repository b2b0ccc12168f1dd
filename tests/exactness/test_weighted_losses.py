"""Losses that weigh their targets, over several devices: same losses and weights as one device, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import SGD, TOLERANCE, Batch, Ran, alone, plan_for, run, shared
from manyhands.facts.errors import NotFinite
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

CLASSES, SIZE, SAMPLES, STEPS = 3, 6, 8, 3
WEIGHTS = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)


class Pixels(nn.Module):
    """A class for every pixel. No batch norm: it would see the batch in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return made


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).to(output.dtype)
    return ((output[:, 0] - target) ** 2 * mask).sum() / mask.sum()


def beside_a_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, weight=WEIGHTS) + 0.1 * output.square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored": functional.cross_entropy,
    "weights of classes": nn.CrossEntropyLoss(WEIGHTS),
    "likelihoods": lambda o, t: functional.nll_loss(o.log_softmax(1), t, WEIGHTS),
    "masked": masked,
    "beside a mean": beside_a_mean,
    "sum": lambda o, t: functional.cross_entropy(o, t, WEIGHTS, reduction="sum"),
}


def batch(seed: int) -> Batch:
    """Sample number i has about i eighths of its targets ignored, and the last has no other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((SAMPLES, 1, SIZE, SIZE), generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (SAMPLES, SIZE, SIZE), generator=generator)
    part = torch.arange(SAMPLES).view(-1, 1, 1) / (SAMPLES - 1)
    return x, torch.where(torch.rand(y.shape, generator=generator) < part, -100, y)


BATCHES = [batch(seed) for seed in range(STEPS)]


@cache
def captured(name: str) -> Graph:
    torch.manual_seed(0)
    x, y = BATCHES[0]
    return capture(Pixels().double(), x, loss=LOSSES[name], target=y, granularity="operators")


def samples(graph: Graph) -> Plan:
    return plan_for(graph, [shared(0, len(graph.network.layers), 5, 1, 2)], batch_size=SAMPLES)


def micro_batches(graph: Graph) -> Plan:
    last = len(graph.network.layers)
    return plan_for(graph, [shared(0, 2, 2), shared(2, last, 2)], batch_size=SAMPLES, micro_batches=4)


def mixed(graph: Graph) -> Plan:
    last = len(graph.network.layers)
    return plan_for(graph, [shared(0, 2, 4), shared(2, last, 1, 3)], batch_size=SAMPLES, micro_batches=2)


def tiles(graph: Graph) -> Plan:
    return tiled(graph, 1)


def tiles_of_micro_batches(graph: Graph) -> Plan:
    return tiled(graph, 2)


def tiled(graph: Graph, micro_batches: int) -> Plan:
    stage = Stage((0, len(graph.network.layers)), ("t0", "t1"), ByTiles((1, 1)))
    return plan_for(graph, [stage], batch_size=SAMPLES, micro_batches=micro_batches)


PLANS = [samples, micro_batches, mixed, tiles, tiles_of_micro_batches]


def as_on_one_device(graph: Graph, plan: Plan, batches: Sequence[Batch] = BATCHES) -> Ran:
    """One device sees the whole batch at once, whatever the plan's micro-batches."""
    ran = run(graph, plan, batches, SGD)
    ran.assert_as_planned(len(batches))
    ran.assert_equals(*alone(graph, batches, SGD))
    return ran


@pytest.mark.quick(every=30)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.__name__))
@pytest.mark.parametrize("name", LOSSES)
def test_as_on_one_device(name: str, plan: Callable[[Graph], Plan]) -> None:
    graph = captured(name)
    assert graph.loss_combination == ("sum" if name == "sum" else "weighted")
    as_on_one_device(graph, plan(graph))


@pytest.mark.parametrize("plan", [samples, micro_batches], ids=lambda plan: str(plan.__name__))
def test_as_the_module_trained_by_pytorch(plan: Callable[[Graph], Plan]) -> None:
    torch.manual_seed(0)
    module, graph = Pixels().double(), captured("weights of classes")
    module.load_state_dict(copy.deepcopy(graph.state))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for x, y in BATCHES:
        loss = functional.cross_entropy(module(x), y, WEIGHTS)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    run(graph, plan(graph), BATCHES, SGD).assert_equals(module.state_dict(), losses)


def test_parts_are_no_means_of_their_own() -> None:
    """These batches tell: their parts' own losses do not average to theirs."""
    for x, y in BATCHES:
        output = x.expand(-1, CLASSES, -1, -1) * WEIGHTS.view(-1, 1, 1)
        parts = [functional.cross_entropy(output[rows], y[rows]) for rows in (slice(0, 4), slice(4, 8))]
        whole = functional.cross_entropy(output, y)
        assert abs(float(sum(parts) / 2 - whole)) > 1e3 * TOLERANCE


@pytest.mark.parametrize("plan", [samples, micro_batches], ids=lambda plan: str(plan.__name__))
def test_a_batch_that_ignores_everything_is_reported(plan: Callable[[Graph], Plan]) -> None:
    """PyTorch divides by zero, and so does each device: the loss is no number, as on one device."""
    graph, (x, y) = captured("ignored"), BATCHES[0]
    nothing: list[Any] = [(x, torch.full_like(y, -100))]
    assert functional.cross_entropy(x.expand(-1, CLASSES, -1, -1), nothing[0][1]).isnan()
    one = plan_for(graph, [shared(0, len(graph.network.layers), SAMPLES)], batch_size=SAMPLES)
    for tried in (plan(graph), one):
        ran = run(graph, tried, nothing, SGD)
        assert any(isinstance(error, NotFinite) for error in ran.errors.values()), ran.errors

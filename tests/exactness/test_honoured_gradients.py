"""Custom autograd functions, and losses that read parameters, train over several devices as PyTorch trains them alone.

The reference is the module itself under plain autograd, not the captured graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from custom_functions import LINEAR, Between
from harness import SGD, plan_for, run, shared
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

STEPS, SAMPLES = 3, 6


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(SAMPLES, 2, 8, 8, dtype=torch.float64, generator=generator),
            torch.randint(0, 3, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def penalised(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        squares = sum(parameter.pow(2).sum() for parameter in module.parameters())
        return functional.cross_entropy(output, target) + 0.05 * squares + 0.01 * module.last.weight.abs().mean()

    return loss


@cache
def trained(name: str, has_penalty: bool) -> tuple[Graph, dict[str, Tensor], list[float]]:
    """The captured graph, and weights and losses after plain PyTorch."""
    module = Between(LINEAR[name] if name else torch.tanh).double()
    loss = penalised(module) if has_penalty else functional.cross_entropy
    graph = capture(module, batches()[0][0], loss=loss, target=batches()[0][1], verify=True)
    kept = {key: tensor.clone() for key, tensor in graph.state.items()}
    plain = copy.deepcopy(module)
    own_loss = penalised(plain) if has_penalty else functional.cross_entropy
    optimizer = torch.optim.SGD(plain.parameters(), lr=SGD.options["lr"], momentum=SGD.options["momentum"])
    losses = []
    for x, y in batches():
        value = own_loss(plain(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert all(torch.equal(kept[key], graph.state[key]) for key in kept)
    return graph, dict(plain.state_dict()), losses


def plan_of(graph: Graph, kind: str) -> Plan:
    count = len(graph.network.layers)
    assert count >= 3
    if kind == "samples":
        return plan_for(graph, [shared(0, count, 3, 1, 2)], batch_size=SAMPLES)
    if kind == "pipeline":
        return plan_for(graph, [shared(0, 1, 6), shared(1, count - 1, 2, 4), shared(count - 1, count, 6)],
                        batch_size=SAMPLES)  # fmt: skip
    tiles = Stage((0, count - 1), ("t0", "t1", "t2", "t3"), ByTiles((1, 2), (2, 1)))
    return plan_for(graph, [tiles, shared(count - 1, count, 4, 2)], batch_size=SAMPLES)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("kind", ["samples", "pipeline", "tiles"])
@pytest.mark.parametrize(
    ("name", "has_penalty"),
    [
        ("reverse", False),
        ("straight-through", False),
        ("swish", False),
        ("rectify", True),
        ("halves", True),
        ("", True),
    ],
)
def test_training_is_plain_pytorch(name: str, has_penalty: bool, kind: str) -> None:
    graph, weights, losses = trained(name, has_penalty)
    assert bool(graph.penalties) == has_penalty
    ran = run(graph, plan_of(graph, kind), batches(), SGD)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(weights, losses)


@pytest.mark.slow
def test_micro_batches_weigh_a_penalty_once() -> None:
    """Without batch norm, whose statistics would be those of micro-batches."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + 0.1 * sum(p.norm() for p in module.parameters())

    data = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))) for _ in range(STEPS)]
    graph = capture(module, data[0][0], loss=loss, target=data[0][1], granularity="operators")
    count = len(graph.network.layers)
    plan = plan_for(graph, [shared(0, 1, 2, 1), shared(1, count, 1, 2)], batch_size=6, micro_batches=2)
    ran = run(graph, plan, data, SGD)
    optimizer = torch.optim.SGD(module.parameters(), lr=SGD.options["lr"], momentum=SGD.options["momentum"])
    losses = []
    for x, y in data:
        value = loss(module(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    ran.assert_equals(dict(module.state_dict()), losses)

"""Distances to float64 of training in a lower precision: by plain PyTorch under autocast, and by manyhands."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Batch, plan_for, run, shared
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

RATE, STEPS, SAMPLES, CLASSES = 0.05, 3, 6, 5
PLAIN_SGD = Optimizer("SGD", lr=RATE, momentum=0.9)


class Pictures(nn.Module):
    """What rounds in its own way under autocast: norms, a residual, resampling, pools, a float32 weight added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c, self.d = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.e, self.f = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.g = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.b(self.a(x)))
        x = functional.avg_pool2d(x + torch.relu(self.d(self.c(x))), 2)
        x = functional.interpolate(x, scale_factor=2, mode="bilinear")
        x = torch.relu(self.f(self.e(x)))
        out: Tensor = self.g(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class Rows(nn.Module):
    """A float32 stream beside linear layers, as of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(12))
        self.a, self.b, self.c = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, CLASSES)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        x = x + self.b(functional.gelu(self.a(self.norm(x))))
        out: Tensor = self.c(torch.tanh(x))
        return out


def picture_batches(seed: int, steps: int = STEPS) -> list[Batch]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(SAMPLES, 3, 8, 8, generator=drawn), torch.randint(CLASSES, (SAMPLES,), generator=drawn))
        for _ in range(steps)
    ]


def row_batches(seed: int, steps: int = STEPS) -> list[Batch]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(SAMPLES, 12, generator=drawn), torch.randint(CLASSES, (SAMPLES,), generator=drawn))
        for _ in range(steps)
    ]


def drawn_anew(module: nn.Module, seed: int) -> None:
    """Draw the weights anew, in their own memory, which a captured graph shares."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in type(module)().state_dict().items():
            module.state_dict()[name].copy_(tensor)


def captured_in(module: nn.Module, dtype: torch.dtype, example: Batch, granularity: str = "operators") -> Graph:
    """The graph of a module under autocast; in float32 it is captured as it is."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return capture(
            module, example[0], loss=functional.cross_entropy, target=example[1], granularity=granularity
        )  # fmt: skip


def trained_plainly(
    module: nn.Module, batches: Sequence[Batch], dtype: torch.dtype, micro_batches: int = 1
) -> dict[str, Tensor]:
    """Weights and buffers after plain PyTorch under autocast; in float64 without."""
    module = copy.deepcopy(module)
    module = module.double() if dtype == torch.float64 else module
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
                loss = functional.cross_entropy(module(x.to(next(module.parameters()).dtype)), y)
            (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def distance(weights: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The norm of all differences: small weights count as little as they do in the network."""
    return float(
        torch.stack([
            (weights[name].double() - exact[name].double()).square().sum()
            for name in exact
            if exact[name].is_floating_point()
        ]).sum().sqrt()
    )  # fmt: skip


def ratio(module: nn.Module, plan: Plan, batches: Sequence[Batch], graph: Graph, dtype: torch.dtype) -> float:
    """How much further from float64 training by a plan comes than plain PyTorch under the same autocast."""
    ran = run(graph, plan, batches, PLAIN_SGD)
    ran.assert_as_planned(len(batches))
    of_all = {name: tensor for own in ran.weights.values() for name, tensor in own.items()}
    for own in ran.weights.values():  # replicas agree to the last bit
        trained = [name for name in own if graph.network.weights[name].trainable]
        assert all(torch.equal(own[name], of_all[name]) for name in trained)
    exact = trained_plainly(module, batches, torch.float64, plan.micro_batches)
    plain = trained_plainly(module, batches, dtype, plan.micro_batches)
    return distance(of_all, exact) / distance(plain, exact)


def by_samples(graph: Graph, *samples: int, micro_batches: int = 1) -> Plan:
    stage = shared(0, len(graph.network.layers), *samples)
    return plan_for(graph, [stage], batch_size=sum(samples) * micro_batches, micro_batches=micro_batches)


def by_pipeline(graph: Graph, stages: int, *, micro_batches: int = 2) -> Plan:
    count = len(graph.network.layers)
    ends = [count * place // stages for place in range(stages + 1)]
    cut = [shared(*between, SAMPLES // micro_batches) for between in pairwise(ends)]
    return plan_for(graph, cut, batch_size=SAMPLES, micro_batches=micro_batches)


def by_tiles(graph: Graph, share: ByTiles, end: int) -> Plan:
    """Tiles up to a layer, then one device."""
    devices = tuple(f"t{number}" for number in range(prod(share.grid)))
    after = shared(end, len(graph.network.layers), SAMPLES)
    return plan_for(graph, [Stage((0, end), devices, share), after], batch_size=SAMPLES)

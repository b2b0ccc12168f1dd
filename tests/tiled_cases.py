"""Captured networks over maps with batches and what one device makes of them, for plans that have tiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, settings
from torch import Tensor, nn
from torch.nn import functional

from harness import SGD, TOLERANCE, Batch, Ran, alone, micro_batches_kept, run
from manyhands.executor.boxes import place_of
from manyhands.executor.tile_call import BoxTensor
from manyhands.executor.tile_memory import TileMemory
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, LayerName, Order, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from tiled_networks import ZOO, Shape

PICTURES: tuple[tuple[int, int], ...] = ((17, 23), (16, 12), (13, 14), (24, 9))

DRAWN = settings(suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""A failing example is told as it was drawn: making it smaller would take minutes."""


@contextmanager
def unwritten_memory_noticed() -> Iterator[None]:
    """What a tile holds of a map beside what it was given is filled with numbers that would be noticed."""
    patch = pytest.MonkeyPatch()
    original = TileMemory.room

    def room(self: TileMemory, tensor: str, inside: Box) -> BoxTensor:
        made = original(self, tensor, inside)
        true = made.box.intersect(Box.whole(self.geometry.shape(tensor)))
        if not true.is_empty and made.tensor.is_floating_point():
            made.tensor[place_of(true, made.box)] = 1e3
        return made

    patch.setattr(TileMemory, "room", room)
    patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # devices are threads that wait for each other at every turn
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        torch.use_deterministic_algorithms(False)
        patch.undo()


def stirred(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In float64, to be trained, and with no bias at zero: one whose gradient is zero (before a norm) would be compared
    with its own rounding."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return module.to(dtype).train()


def target_shape(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(module(x).shape)


@dataclass
class Case:
    """A captured network with batches, and what one device makes of them."""

    graph: Graph
    batches: list[Batch]

    @property
    def network(self) -> Network:
        return self.graph.network

    @property
    def count(self) -> int:
        return len(self.network.layers)

    @cache  # noqa: B019
    def expected(self, micro_batches: int) -> tuple[dict[str, Tensor], list[float]]:
        return alone(self.graph, self.batches, SGD, seed=7, micro_batches=micro_batches)

    def __hash__(self) -> int:
        return id(self)

    def plan(self, *stages: Stage, micro_batches: int = 1, order: Order = "sequential", **options: Any) -> Plan:
        samples = len(self.batches[0][0])
        return Plan(self.network.name, samples, stages, micro_batches, order, **options)

    def tiled(
        self, share: ByTiles, first: LayerName = 0, last: LayerName | None = None, reduce: Any = "allreduce"
    ) -> Stage:
        """Layers [first, last) on t0, t1, ..."""
        devices = tuple(f"t{number}" for number in range(prod(share.grid)))
        return Stage((first, self.count if last is None else last), devices, share, reduce=reduce)

    def check(self, plan: Plan, tolerance: float = TOLERANCE, **options: Any) -> Ran:
        if currently_in_test_context():
            note(str(plan))
        ran = run(self.graph, plan, self.batches, SGD, seed=7, **options)
        ran.assert_as_planned(len(self.batches))
        ran.assert_equals(*self.expected(plan.micro_batches), tolerance)
        for executor in ran.executors.values():
            assert not micro_batches_kept(executor)
        return ran


def case_of(
    module: nn.Module, shape: Shape, *, samples: int = 2, steps: int = 2, seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Case:  # fmt: skip
    """Mean squares against a random target."""
    if currently_in_test_context():
        note(f"{shape} {module}")
    module = stirred(module, dtype)
    torch.manual_seed(seed)
    x = torch.randn(samples, *shape, dtype=dtype)
    target = target_shape(module, x)
    y = torch.randn(target, dtype=dtype)
    graph = capture(module, x, loss=functional.mse_loss, target=y, granularity="operators", name="drawn")
    batches = [(torch.randn_like(x), torch.randn_like(y)) for _ in range(steps)]
    return Case(graph, batches)


@cache
def zoo_case(name: str) -> Case:
    build, shape = ZOO[name]
    torch.manual_seed(1)
    module = build()
    if name != "unet":
        return case_of(module, shape)
    module = stirred(module)
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(2, *shape, dtype=torch.float64, generator=generator),
         torch.randint(0, 2, (2, *shape[1:]), generator=generator))
        for _ in range(3)
    ]  # fmt: skip
    graph = capture(
        module, batches[0][0], loss=functional.cross_entropy, target=batches[0][1], granularity="operators", name=name
    )
    return Case(graph, batches[1:])


@cache
def small_case(build: Callable[[], nn.Module], shape: Shape, samples: int = 2) -> Case:
    """Captured once for all plans of it."""
    torch.manual_seed(0)
    return case_of(build(), shape, samples=samples)


def tiled(name: str) -> pytest.MarkDecorator:
    """Tests of one network go to one process, which captures it once."""
    return pytest.mark.xdist_group(f"tiled {name}")


def tail_of(case: Case) -> int:
    """The layer at which the maps end: the pooling of a classifier."""
    network = case.network
    op = next(i for i, op in enumerate(network.ops) if op.tiling == "pool" and len(network.readers[op.outputs[0]]) == 1
              and network.tensors[network.ops[i + 1].outputs[0]].shape[2:] == ())  # fmt: skip
    return network.layer_of_op[op]


# Drawn networks, drawn groups

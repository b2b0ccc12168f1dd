"""A decoupled network trains as any other: by samples, tiles and stages as on one device, to 1e-10 in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Batch, assert_exact, plan_for
from manyhands.decoupling.decouple import decouple
from manyhands.facts.plan import BySamples, ByTiles, Share, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.tileable import tileable_layers

PICTURE = (3, 8, 8)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


@cache
def captured() -> Graph:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Bottleneck(8), nn.MaxPool2d(2), Bottleneck(8), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    made = decouple(module.double(), 2, "all", 1.5, inputs=PICTURE)
    assert len(made.report.shuffles) == 2
    x, y = batches(1)[0]
    return capture(made, x, loss=functional.cross_entropy, target=y, name="decoupled")


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, *PICTURE, dtype=torch.float64, generator=generator),
         torch.randint(0, 4, (4,), generator=generator))
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("share", "devices"),
    [(BySamples((3, 1)), 2), (ByTiles((1, 2)), 2), (ByTiles((1, 1), (1, 1), None, (0,)), 4)],
    ids=["samples", "tiles", "tiles with backward groups"],
)
def test_as_on_one_device(share: Share, devices: int) -> None:
    """Tiles reach over all shuffles, up to global pooling."""
    graph = captured()
    last = len(graph.network.layers)
    end = tileable_layers(graph.network)[0] if isinstance(share, ByTiles) else last
    shuffles = [index for index, op in enumerate(graph.network.ops) if "channel_shuffle" in op.target]
    assert len(shuffles) == 2
    assert all(index < graph.network.layers[end - 1].last for index in shuffles)
    names = tuple(f"d{place}" for place in range(devices))
    stages = [Stage((0, end), names, share)]
    if end < last:
        stages.append(Stage((end, last), names[:1], Single()))
    assert_exact(graph, plan_for(graph, stages, batch_size=4), batches(5))


def test_as_stages() -> None:
    graph = captured()
    last = len(graph.network.layers)
    stages = [Stage((0, 2), ("a", "b"), BySamples((1, 1))), Stage((2, last), ("c",), Single())]
    assert_exact(graph, plan_for(graph, stages, batch_size=4, micro_batches=2), batches(3))

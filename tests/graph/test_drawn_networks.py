"""Networks drawn at random, cut at random: the captured chain equals the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_same, by_module, by_pieces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture

Step = tuple[str, int]
STEPS = ("conv", "grouped", "norm", "relu", "relu_", "silu", "pool", "average", "add", "add_", "concat", "dropout",
         "upsample", "layernorm", "slice", "excite", "transposed", "permute", "scale_")  # fmt: skip


class Drawn(nn.Module):
    """Runs a list of steps on an image of 4 channels; a step's number picks its parameters or an earlier value."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(self._layer(kind, number) for kind, number in steps)
        self.head = nn.Linear(4, 3)

    @staticmethod
    def _layer(kind: str, n: int) -> nn.Module:
        kernel, dilation = 1 + n % 3, 1 + n % 2
        layers: dict[str, Any] = {
            "conv": lambda: nn.Conv2d(4, 4, kernel, padding=kernel // 2 * dilation, dilation=dilation, bias=n % 2 == 0),
            "grouped": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=(2, 4)[n % 2]),
            "norm": lambda: nn.BatchNorm2d(4, affine=n % 3 > 0, track_running_stats=n % 4 > 0),
            "pool": lambda: nn.MaxPool2d(2, stride=1 + n % 2, ceil_mode=n % 3 == 0),
            "average": lambda: nn.AvgPool2d(3, stride=1, padding=1),
            "dropout": lambda: nn.Dropout(0.0, inplace=n % 2 == 0),
            "layernorm": lambda: nn.LayerNorm(4),
            "excite": lambda: nn.Conv2d(4, 4, 1),
            "transposed": lambda: nn.ConvTranspose2d(4, 4, 2, stride=2),
        }
        return layers.get(kind, nn.Identity)()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x, -x), 1)
        seen = [x]
        for (kind, n), layer in zip(self.steps, self.layers):
            x = self._step(kind, n, layer, x, seen)
            seen.append(x)
        return self.head(x.mean((2, 3)))

    def _step(self, kind: str, n: int, layer: nn.Module, x: Tensor, seen: list[Tensor]) -> Tensor:
        alike = [earlier for earlier in seen if earlier.shape[2:] == x.shape[2:]]
        other = alike[n % len(alike)]
        if kind == "relu":
            return F.relu(x)
        if kind == "relu_":
            return F.relu_(x)
        if kind == "silu":
            return F.silu(x)
        if kind == "add":
            return x + other
        if kind == "add_":
            x += other
            return x
        if kind == "scale_":
            return x.mul_(0.5)
        if kind == "concat":
            return torch.cat((x, other), 1)[:, ::2] if n % 2 else torch.cat((other, x), 1)[:, 2:6]
        if kind == "upsample":
            return F.interpolate(x, scale_factor=2, mode=("nearest", "bilinear")[n % 2]) if x.shape[2] < 9 else x
        if kind == "transposed":
            return layer(x) if x.shape[2] < 9 else x
        if kind == "layernorm":
            return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == "slice":
            return x[:, :, 1:, :-1] if x.shape[2] > 3 else x
        if kind == "excite":
            return x * layer(x.mean((2, 3), keepdim=True)).sigmoid()
        if kind == "permute":
            return x.transpose(2, 3)
        if kind == "pool":
            return layer(x) if x.shape[2] > 3 else x
        return layer(x)


def trains(module: nn.Module, x: Tensor, target: Tensor) -> bool:
    """Whether torch itself can run backward: some writes in place destroy what backward needs."""
    try:
        F.cross_entropy(module(x), target).backward()
    except RuntimeError as error:
        if "inplace" in str(error) or "in-place" in str(error):
            return False
        raise
    module.zero_grad()
    return True


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11)), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    samples=st.integers(2, 4),
)
def test_a_drawn_network_equals_its_module(steps: list[Step], cuts: list[int], samples: int) -> None:
    torch.manual_seed(0)
    module = Drawn(steps).double()
    x, target = torch.randn(samples, 2, 6, 6, dtype=torch.float64), torch.arange(samples) % 3
    if not trains(module, x, target):
        return
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.reset_running_stats()
    try:
        graph = capture(module, x[:2], loss=F.cross_entropy, target=target[:2])
    except CaptureFailed as error:
        if "in place" in str(error) and "test_drawn_networks.py:" in str(error):
            return  # the one reason to refuse such a network, and the line is named
        raise
    wanted = by_module(module, graph, x, target, F.cross_entropy)
    places = [place % len(graph.nodes) for place in cuts]
    assert_same(by_pieces(graph, places, x, target), wanted, 1e-12)
    assert_same(by_pieces(graph, range(len(graph.nodes)), x, target), wanted, 1e-12)

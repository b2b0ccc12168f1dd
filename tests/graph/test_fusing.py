"""At rest a packed convolution adds and cuts off by itself: the same numbers, and nothing is overwritten too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.fusing import Fused, _can_fuse
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, packable
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights

REST = Context(training=False)
LINES = {"relu": nn.ReLU(), "relu6": nn.ReLU6(), "leaky": nn.LeakyReLU(0.2), "cut": nn.Hardtanh(-0.5, 0.25)}
KINDS = st.sampled_from(["conv", "conv", "block", "add", "add", "view", *LINES])
PLACES = st.integers(0, 9)
needs_onednn = pytest.mark.skipif(not _can_fuse(), reason="this build of PyTorch does not fuse")


class Drawn(nn.Module):
    """Steps on maps of one shape; what several of them made is returned."""

    def __init__(self, steps: list[tuple[str, int, int]], returned: list[int]) -> None:
        super().__init__()
        self.steps, self.returned = steps, returned
        generator = torch.Generator().manual_seed(len(steps))
        self.convolutions = nn.ModuleDict()
        for number, (kind, size, _) in enumerate(steps):
            if kind in ("conv", "block"):
                layer = nn.Conv2d(8, 8, 3 if size % 2 else 1, padding=size % 2, groups=2 if size % 3 else 1)
                with torch.no_grad():
                    layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 4)
                self.convolutions[str(number)] = layer

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        made = [x]
        for number, (kind, first, second) in enumerate(self.steps):
            a, b = made[first % len(made)], made[second % len(made)]
            if kind == "conv":
                made.append(self.convolutions[str(number)](b))
            elif kind == "block":
                made.append(a + self.convolutions[str(number)](a))
            elif kind == "add":
                made.append(a + b)
            elif kind == "view":
                made.append(a.flatten(2).view_as(b))
            else:
                made.append(LINES[kind](a))
        return [made[place % len(made)] for place in self.returned] + [made[-1]]


def at_rest(module: nn.Module, x: torch.Tensor) -> tuple[Graph, Piece]:
    """All convolutions packed."""
    graph = capture(module.eval(), x)
    choice = {node.name: Kernel(channels_last=True, packed=True) for node in graph.nodes if takes_format(graph, node)}
    return graph, Piece(graph, Weights.copied(graph), kernels=kernel_calls(graph, choice))


def targets(piece: Piece, *, training: bool = False) -> list[str]:
    return [
        "fused" if isinstance(step.call, Fused) else step.node.target.split(".")[1] for step in piece.steps(training)
    ]


def check(module: nn.Module, x: torch.Tensor, piece: Piece, graph: Graph) -> None:
    """The module's own results, before the weights are laid out and after, twice, and the input is left alone."""
    before = x.clone()
    with torch.no_grad():
        expected = module(x)
        for _ in range(3):
            found = outputs_of(graph, piece(bind_inputs(graph, x), REST))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(x, before)
            piece.rest(len(x))


@pytest.mark.slow
@needs_onednn
@settings(max_examples=30)
@given(st.lists(st.tuples(KINDS, PLACES, PLACES), min_size=1, max_size=9), st.lists(PLACES, max_size=2))
def test_drawn_networks_give_the_same(steps: list[tuple[str, int, int]], returned: list[int]) -> None:
    module = Drawn(steps, returned).eval()
    x = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(1))
    graph, piece = at_rest(module, x)
    check(module, x, piece, graph)


def chain(*steps: tuple[str, int, int], returned: tuple[int, ...] = ()) -> tuple[nn.Module, torch.Tensor, Graph, Piece]:
    module = Drawn(list(steps), list(returned)).eval()
    x = torch.randn(2, 8, 5, 5)
    return module, x, *at_rest(module, x)


@pytest.mark.quick(every=12)
@needs_onednn
@pytest.mark.parametrize(
    ("steps", "returned", "left", "overwrites"),
    [
        ([("conv", 1, 0), ("relu", 1, 0)], (), ["fused"], [False]),
        ([("conv", 1, 0), ("leaky", 1, 0)], (), ["fused"], [False]),
        ([("conv", 1, 0), ("cut", 1, 0)], (), ["fused"], [False]),
        # a residual block over a convolution's own result
        ([("conv", 1, 0), ("relu", 1, 0), ("conv", 1, 2), ("add", 2, 3), ("relu", 4, 0)], (),
         ["fused", "fused"], [False, False]),
        # what is added is read by nobody else
        ([("conv", 1, 0), ("conv", 0, 0), ("add", 1, 2), ("relu", 3, 0)], (), ["conv2d", "fused"], [True]),
        # no activation that oneDNN has after an addition
        ([("conv", 1, 0), ("conv", 0, 0), ("add", 1, 2), ("relu6", 3, 0)], (), ["conv2d", "fused", "hardtanh"], [True]),
        # what is added is the network's input, or leaves, or is seen through a view later
        ([("conv", 1, 0), ("add", 0, 1), ("relu", 2, 0)], (), ["fused"], [False]),
        ([("conv", 1, 0), ("conv", 0, 0), ("add", 1, 2), ("relu", 3, 0)], (1,), ["conv2d", "fused"], [False]),
        ([("conv", 1, 0), ("view", 1, 0), ("conv", 0, 0), ("add", 1, 3), ("add", 4, 2)], (),
         ["conv2d", "flatten", "view_as", "fused", "add"], [False]),
        # a result that leaves, or that two read, is not cut off
        ([("conv", 1, 0), ("relu", 1, 0)], (1,), ["conv2d", "relu"], []),
        ([("conv", 1, 0), ("relu", 1, 0), ("add", 1, 2)], (), ["conv2d", "relu", "add"], []),
        # twice itself
        ([("conv", 1, 0), ("add", 1, 1)], (), ["conv2d", "add"], []),
    ],
)  # fmt: skip
def test_what_is_fused(steps: list[Any], returned: tuple[int, ...], left: list[str], overwrites: list[bool]) -> None:
    module, x, graph, piece = chain(*steps, returned=returned)
    check(module, x, piece, graph)
    assert targets(piece) == left
    calls = [step.call for step in piece.steps(False) if isinstance(step.call, Fused)]
    assert [call._overwrites for call in calls] == overwrites


@needs_onednn
def test_nothing_is_fused_where_gradients_may_be_wanted_or_nothing_is_packed() -> None:
    module, x, graph, piece = chain(("conv", 1, 0), ("relu", 1, 0))
    assert packable(graph)
    assert "fused" not in targets(piece, training=True)
    plain = Piece(graph, Weights.copied(graph))
    assert "fused" not in targets(plain)
    check(module, x, plain, graph)


@needs_onednn
def test_other_shapes_are_computed_as_they_were() -> None:
    """A layout is for one shape: others go the plain way, with the addition and the activation."""
    module, x, graph, piece = chain(("conv", 1, 0), ("conv", 0, 0), ("add", 1, 2), ("relu", 3, 0))
    piece.rest(len(x))
    more = torch.randn(5, 8, 5, 5)
    with torch.no_grad():
        found = outputs_of(graph, piece(bind_inputs(graph, more), REST))
    torch.testing.assert_close(found, module(more), rtol=1e-4, atol=1e-5)

"""What is rewritten computes the same: values and gradients of the module that was captured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights

AS_WRITTEN = {(1, 5, 3), (3, 1, 5), (5, 3, 1)}
"""Orders of channel, row and column that are no turn of pixel_unshuffle's."""


class ToDepth(nn.Module):
    """Blocks of places become channels, in an order of channel (1), row (3) and column (5) of the block."""

    def __init__(self, size: int, order: tuple[int, ...], *, copies: bool) -> None:
        super().__init__()
        self.size, self.order, self.copies = size, order, copies

    def forward(self, x: Tensor) -> Tensor:
        samples, channels, rows, columns = x.shape
        size = self.size
        parts = x.view(samples, channels, rows // size, size, columns // size, size).permute(0, *self.order, 2, 4)
        shape = (samples, channels * size**2, rows // size, columns // size)
        return parts.contiguous().view(shape) if self.copies else parts.reshape(shape)


class ToSpace(nn.Module):
    """The way back."""

    def __init__(self, size: int, order: tuple[int, ...], *, copies: bool) -> None:
        super().__init__()
        self.size, self.order = size, [1 + order.index(axis) for axis in (1, 3, 5)]

    def forward(self, x: Tensor) -> Tensor:
        samples, channels, rows, columns = x.shape
        extents = [0, 0, 0]
        for axis, extent in zip(self.order, (channels // self.size**2, self.size, self.size)):
            extents[axis - 1] = extent
        channel, row, column = self.order
        parts = x.view(samples, *extents, rows, columns).permute(0, channel, 4, row, 5, column)
        return parts.reshape(samples, -1, rows * self.size, columns * self.size)


def returned(graph: Graph, x: Tensor) -> Tensor:
    return Piece(graph, Weights.copied(graph))(bind_inputs(graph, x))[graph.outputs[0]]


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("order", list(permutations((1, 3, 5))))
@pytest.mark.parametrize("kind", [ToDepth, ToSpace])
def test_space_to_depth_and_back(kind: Callable[..., nn.Module], order: tuple[int, ...]) -> None:
    @settings(max_examples=4, deadline=None, derandomize=True)
    @given(size=st.integers(2, 3), extents=st.tuples(*(st.integers(1, 3),) * 3), copies=st.booleans())
    def run(size: int, extents: tuple[int, ...], copies: bool) -> None:
        channels, rows, columns = extents
        shape = (channels, rows * size, columns * size) if kind is ToDepth else (channels * size**2, rows, columns)
        module = kind(size, order, copies=copies)
        graph = capture(module, torch.randn(3, *shape))
        x = torch.randn(2, *shape)
        assert torch.equal(returned(graph, x), module(x))
        if max(shape[1:]) > 1 and channels > 1:
            assert all(op.tiling == "local" for op in graph.network.ops) == (order not in AS_WRITTEN)

    run()


def test_what_others_read_on_the_way_stays() -> None:
    class Both(ToDepth):
        def forward(self, x: Tensor) -> Any:
            blocks = x.view(x.shape[0], 3, 2, 2, 4, 2)
            return blocks.sum(2), blocks.permute(0, 1, 3, 5, 2, 4).reshape(x.shape[0], 12, 2, 4)

    module, x = Both(2, (1, 3, 5), copies=False), torch.randn(2, 3, 4, 8)
    graph = capture(module, torch.randn(3, 3, 4, 8))
    made = Piece(graph, Weights.copied(graph))(bind_inputs(graph, x))
    for name, wanted in zip(graph.outputs, module(x), strict=True):
        assert torch.equal(made[name], wanted)


class ComputedNorm(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "weight of a batch norm":
            return functional.batch_norm(x, self.mean, self.variance, self.weight * 2, self.bias, self.training)
        if self.kind == "bias of a batch norm":
            return functional.batch_norm(x, self.mean, self.variance, None, self.bias * 2, self.training)
        if self.kind == "group norm":
            return functional.group_norm(x, 2, self.weight, self.bias * 2)
        return functional.instance_norm(x, None, None, self.weight * 2, self.bias * 3)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("kind", ["weight of a batch norm", "bias of a batch norm", "group norm", "instance norm"])
def test_norms_with_computed_weights(kind: str) -> None:
    module, x = ComputedNorm(kind).double(), torch.randn(3, 4, 5, 6, dtype=torch.float64)
    graph = capture(module, x)
    weights = Weights.copied(graph)
    made = Piece(graph, weights)(bind_inputs(graph, x))[graph.outputs[0]]
    wanted = module(x)
    torch.testing.assert_close(made, wanted)
    slope = torch.randn_like(made)
    made.backward(slope)
    wanted.backward(slope)
    for name, parameter in module.named_parameters():
        assert (weights.tensors[name].grad is None) == (parameter.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(weights.tensors[name].grad, parameter.grad)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(weights.tensors[name], buffer)
    assert all(op.tiling in ("local", "norm") for op in graph.network.ops if not op.is_fixed)

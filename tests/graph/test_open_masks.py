"""Masks of attention that let everything through are left out; every other one stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights

LENGTH, WIDTH = 6, 8
Mask = Callable[[Tensor], Tensor]


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _from_zero(x: Tensor) -> Tensor:
    """As transformers' encoders write it."""
    return (_places(x)[None, None, :, None] >= 0).expand(x.shape[0], 1, LENGTH, LENGTH)


def _shifted(x: Tensor) -> Tensor:
    return ((torch.arange(3, 3 + LENGTH) - 3 + 3) >= 3)[None, :].expand(LENGTH, LENGTH)


def _both(x: Tensor) -> Tensor:
    return _from_zero(x) & (_places(x)[None, :] + 2 >= 1.5)


def _causal(x: Tensor) -> Tensor:
    return _places(x)[:, None] >= _places(x)[None, :]


def _from_one(x: Tensor) -> Tensor:
    return (_places(x) >= 1)[None, :].expand(LENGTH, LENGTH)


def _window(x: Tensor) -> Tensor:
    """Open at this length, not at every one."""
    places = _places(x)
    return places[:, None] - places[None, :] < LENGTH


def _one_of_both(x: Tensor) -> Tensor:
    return _from_zero(x) & _causal(x)


def _of_data(x: Tensor) -> Tensor:
    return (x[:, None, None, :, 0] * 0 >= 0).expand(x.shape[0], 1, LENGTH, LENGTH)


class Attention(nn.Module):
    def __init__(self, mask: Mask, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.mask, self.dropout = nn.Linear(WIDTH, WIDTH), mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(x.shape[0], LENGTH, 2, WIDTH // 2).transpose(1, 2)
        made = functional.scaled_dot_product_attention(heads, heads, heads, self.mask(x), self.dropout)
        return made.transpose(1, 2).reshape(x.shape)


def captured(mask: Mask, dropout: float = 0.0) -> tuple[nn.Module, Graph, Tensor]:
    torch.manual_seed(0)
    module, x = Attention(mask, dropout).double(), torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    return module, capture(module, x), x


def masks_of(graph: Graph) -> list[object]:
    return [
        node.arguments[3] for node in graph.nodes if "scaled_dot_product" in node.target and len(node.arguments) > 3
    ]


@pytest.mark.parametrize("mask", [_from_zero, _both])
def test_an_open_mask_is_left_out_with_all_that_makes_it(mask: Mask) -> None:
    module, graph, x = captured(mask)
    assert masks_of(graph) in ([], [None])
    assert not any(node.target.startswith(("aten.arange", "aten.ge")) for node in graph.nodes)
    made = Piece(graph, Weights.copied(graph))(bind_inputs(graph, x), Context(training=False))
    assert torch.allclose(outputs_of(graph, made), module(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("mask", [_shifted, _causal, _from_one, _window, _one_of_both, _of_data])
def test_a_mask_that_may_hide_something_stays(mask: Mask) -> None:
    """Also one that is open for this length or this data alone, and one by arithmetic that is not followed."""
    module, graph, x = captured(mask)
    assert masks_of(graph) not in ([], [None])
    made = Piece(graph, Weights.copied(graph))(bind_inputs(graph, x), Context(training=False))
    assert torch.allclose(outputs_of(graph, made), module(x), rtol=0, atol=1e-14)


def test_dropouts_inside_draw_as_with_the_mask() -> None:
    """An open mask, and one that says the same by numbers of the data, drop the same weights."""
    drawn = []
    for mask in (_from_zero, _of_data):
        _, graph, x = captured(mask, 0.3)
        graph_inputs = bind_inputs(graph, x)
        drawn.append(outputs_of(graph, Piece(graph, Weights.copied(graph))(graph_inputs, Context(seed=5))))
    assert torch.allclose(drawn[0], drawn[1], rtol=0, atol=1e-14)

"""Custom autograd functions are captured with their own backward, or refused by name and line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_same, by_module, by_pieces
from torch import Tensor, nn

from custom_functions import LINEAR, Between, ByNumpy, Clip, Constant, Dirty, Linear, Shift, reverse
from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph


def pictures(samples: int = 5) -> Tensor:
    return torch.randn(samples, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CLASSES = torch.tensor([0, 2, 1, 0, 2])


def captured(module: nn.Module, batch: Tensor) -> Graph:
    return capture(module, batch, loss=F.cross_entropy, target=CLASSES)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_those_of_the_function(name: str) -> None:
    module = Between(LINEAR[name]).double()
    graph = captured(module, pictures())
    wanted = by_module(module, graph, pictures(), CLASSES, F.cross_entropy)
    for cuts in ((), (1, 3)):
        assert_same(by_pieces(graph, cuts, pictures(), CLASSES), wanted)


@pytest.mark.slow
def test_ignoring_the_backward_would_be_noticed() -> None:
    """The functions' gradients are others than those that autograd finds for what their forward computes."""
    module, plain = Between(LINEAR["reverse"]).double(), Between(lambda x: x.view_as(x)).double()
    graphs = [captured(one, pictures()) for one in (module, plain)]
    one, other = (by_pieces(graph, (), pictures(), CLASSES) for graph in graphs)
    with pytest.raises(AssertionError):
        assert_same(one, other)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight, self.bias = nn.LSTM(3, 4, batch_first=True), nn.Parameter(torch.randn(3, 4)), None
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return Linear.apply(reverse(self.body(x)[0], 0.7)[:, -1], self.weight, self.offset)


@pytest.mark.slow
def test_weights_of_a_function_and_what_comes_before_it() -> None:
    """After a recurrent layer, which is traced by its shapes only; gradients of a weight and a bias."""
    torch.manual_seed(0)
    module, batch = Dense().double(), torch.randn(5, 4, 3, dtype=torch.float64)
    graph = captured(module, batch)
    assert_same(by_pieces(graph, (), batch, CLASSES), by_module(module, graph, batch, CLASSES, F.cross_entropy))


REFUSED = {
    "clip": (Clip.apply, "not linear in the gradient"),
    "shift": (Shift.apply, "the first layer with another gradient is before"),
    "constant": (Constant.apply, "does not follow from the incoming gradient"),
    "numpy": (ByNumpy.apply, "ByNumpy has a backward"),
    "dirty": (Dirty.apply, "writes to its input in place"),
}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_with_its_place(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(CaptureFailed, match=words) as refused:
        captured(Between(function).double(), pictures())
    assert ".py:" in str(refused.value) or "at before" in str(refused.value)


def test_inference_needs_no_gradient() -> None:
    """Without a loss nothing is differentiated: a backward that could not be captured is not in the way."""
    graph = capture(Between(Shift.apply).double(), pictures())
    assert graph.loss is None


@pytest.mark.slow
def test_a_function_in_the_loss() -> None:
    module = Between(torch.tanh).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(reverse(output, 0.5), target)

    graph = capture(module, pictures(), loss=loss, target=CLASSES)
    assert graph.loss_combination == "mean"
    assert_same(by_pieces(graph, (), pictures(), CLASSES), by_module(module, graph, pictures(), CLASSES, loss))


def test_a_masked_write() -> None:
    """`x[mask] = number`, outside of a function too."""

    def masked(x: Tensor) -> Tensor:
        y = x * 2
        y[x < 0] = 0.5
        return y

    module = Between(masked).double()
    graph = captured(module, pictures())
    assert any(node.target == "aten.masked_fill.Tensor" for node in graph.nodes)
    wanted = by_module(module, graph, pictures(), CLASSES, F.cross_entropy)
    assert_same(by_pieces(graph, (), pictures(), CLASSES), wanted)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: -gradient)
    return x


def test_hooks_in_forward_are_refused_with_their_line() -> None:
    with pytest.raises(CaptureFailed, match="registers a gradient hook") as refused:
        captured(Between(hooked), pictures().float())
    assert re.search(r"custom_functions\.py:\d+", str(refused.value))

"""The comparison of a captured graph with its module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.graph.capture import capture
from manyhands_bench.networks.forward import forward_difference, relative
from network_tasks import Small


def batch(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8, dtype=torch.float64)


@pytest.mark.slow
def test_a_graph_with_dropout_returns_what_the_module_does() -> None:
    module = Small().double()
    graph = capture(module, batch(3))
    assert forward_difference(graph, module, batch(2)) <= 1e-12


def test_a_module_that_changed_since_is_told_apart() -> None:
    module = Small(p=0.0).double()
    graph = capture(module, batch(3))
    module.register_forward_hook(lambda *arguments: arguments[2] * (1 + 1e-9))
    assert forward_difference(graph, module, batch(2)) == pytest.approx(1e-9, rel=1e-3)


class _DrawsTwice(nn.Module):
    """Draws once more than its graph, into nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.draws = nn.Linear(4, 4), nn.Dropout(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draws and self.training:
            torch.bernoulli(torch.full((2,), 0.5))
        return self.dropout(self.layer(x))


def test_a_module_that_draws_otherwise_is_compared_in_evaluation() -> None:
    module = _DrawsTwice().double()
    graph = capture(module, torch.randn(3, 4, dtype=torch.float64))
    module.draws = True
    assert forward_difference(graph, module, torch.randn(2, 4, dtype=torch.float64)) <= 1e-12
    assert not module.training


def test_relative() -> None:
    two = torch.tensor([2.0, -4.0])
    assert relative(two, two) == 0
    assert relative(two + 1, two) == 0.25
    assert relative(two[:1], two) == float("inf")
    assert relative(two.double(), two) == float("inf")
    assert relative(torch.tensor([float("nan")]), two[:1]) == float("inf")
    assert relative(torch.tensor([1.0]), torch.tensor([0.0])) == float("inf")
    assert relative(torch.tensor([1e-6]), torch.tensor([0.0]), least=1e-3) == pytest.approx(1e-3)
    assert relative(torch.tensor([1]), torch.tensor([2])) == float("inf")

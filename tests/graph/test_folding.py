"""Batch norms folded into convolutions: the same answers with fewer operators, and nothing folded that others need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.folding import at_rest
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import outputs_of
from manyhands.graph.weights import Weights
from manyhands.models import registry


class Cases(nn.Module):
    """Folded: plain, with a bias, grouped. Not: weights or results that others read, transposed, no own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.plain, self.a = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.biased, self.b = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.grouped, self.c = nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.BatchNorm2d(4)
        self.shared, self.d, self.e = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.up, self.f = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.twice, self.g = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.bare, self.h = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(self.plain(self.first(x))))
        x = self.c(self.grouped(torch.relu(self.b(self.biased(x)))))
        x = self.e(self.shared(self.d(self.shared(x))))
        x = self.twice(self.f(self.up(x)))
        out: Tensor = self.h(self.bare(self.g(x) + x))
        return out


def answers(graph: Graph, batch: Tensor) -> Tensor:
    made = Piece(graph, Weights.copied(graph))({graph.inputs[0].name: batch}, Context(training=False))
    found: Tensor = outputs_of(graph, made)
    return found


def drawn(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                module.weight.data.uniform_(0.5, 2)
                module.bias.data.normal_()
    return model.double().eval()


@pytest.mark.slow
def test_the_same_answers_with_fewer_operators() -> None:
    model = drawn(Cases())
    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = capture(model, batch)
    folded = at_rest(graph)
    assert sum(node.target == "aten.batch_norm.default" for node in folded.nodes) == 6
    assert len(graph.nodes) - len(folded.nodes) == 3 + sum(bool(node.updates) for node in graph.nodes)
    with torch.no_grad():
        expected = model(batch)
    torch.testing.assert_close(answers(folded, batch), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(answers(graph, batch), expected, rtol=1e-12, atol=1e-12)  # the given one is unchanged
    assert {spec.name for spec in folded.weights} == set(folded.state)


@pytest.mark.slow
def test_layers_stay_as_many() -> None:
    graph = capture(registry.build("resnet18").eval(), registry.example_batch("resnet18", 2, input_shape=(3, 32, 32)))
    folded = at_rest(graph)
    assert len(folded.layers) == len(graph.layers)
    assert not any(op.target == "aten.batch_norm.default" for op in folded.network.ops)

"""Random tensors by size: stochastic depth written with torch.rand trains and rests as the module does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.linear(x)
        if self.training:
            kept = 0.8 + torch.rand((x.shape[0], 1), dtype=x.dtype)
            kept.floor_()
            branch = branch.div(0.8) * kept
        return x + branch


def test_stochastic_depth_trains_and_rests_as_the_module() -> None:
    torch.manual_seed(0)
    module, x = StochasticDepth().double(), torch.randn(6, 8, dtype=torch.float64)
    graph = capture(module, x, loss=F.mse_loss, target=torch.zeros_like(x), verify=True)
    assert [op.name for op in graph.network.ops if op.mixes_samples] == []
    piece = Piece(graph, Weights.copied(graph))
    (name,) = graph.outputs
    at_rest = piece({graph.inputs[0].name: x}, Context(training=False))[name]
    torch.testing.assert_close(at_rest, module.eval()(x), rtol=0, atol=1e-14)
    whole = piece({graph.inputs[0].name: x})[name]
    part = piece({graph.inputs[0].name: x[2:5]}, Context(first_sample=2))[name]
    torch.testing.assert_close(whole[2:5], part, rtol=0, atol=1e-12)  # drawn by the sample's number
    assert not torch.equal(whole, at_rest)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    "compared",
    [
        lambda drawn, p: drawn < 0.5, lambda drawn, p: torch.gt(p, drawn), lambda drawn, p: (1 - drawn) < 0.5,
        lambda drawn, p: torch.floor(2 * drawn), lambda drawn, p: torch.round(drawn),
    ],
    ids=["less", "reversed", "after arithmetic", "floor of a multiple", "round"],
)  # fmt: skip
def test_a_comparison_of_random_numbers_is_refused(compared: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Compared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * compared(torch.rand(x.shape[0], 1), x[:, :1])

    with pytest.raises(CaptureFailed, match="of uniform random numbers"):
        capture(Compared(), torch.randn(4, 8))

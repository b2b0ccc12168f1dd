"""Numbers of samples: a mask that every sample looks its own row up in keeps samples apart; other uses do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights


class Masked(nn.Module):
    """Looks a mask up as Hugging Face's networks do: mask[rows, columns], both of four axes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keep = x[:, :, 0] > 0
        rows = torch.arange(x.shape[0])[:, None, None, None]
        columns = torch.arange(x.shape[1])[None, None, None, :]
        looked_up = keep[rows, columns].expand(-1, 1, x.shape[1], -1)
        scores = (self.linear(x) @ x.transpose(1, 2))[:, None]
        return scores.masked_fill(~looked_up, 0.0).sum((1, 2))


@pytest.mark.slow
def test_samples_that_look_up_their_own_rows_are_not_mixed() -> None:
    torch.manual_seed(0)
    module, x = Masked().double(), torch.randn(6, 5, 8, dtype=torch.float64)
    graph = capture(module, x)
    assert [op.name for op in graph.network.ops if op.mixes_samples] == []
    piece, source = Piece(graph, Weights.copied(graph)), graph.inputs[0].name
    whole = piece({source: x})[graph.outputs[0]]
    torch.testing.assert_close(whole, module(x), rtol=0, atol=1e-13)
    part = piece({source: x[2:5]}, Context(first_sample=2))[graph.outputs[0]]
    torch.testing.assert_close(part, whole[2:5], rtol=0, atol=1e-13)


def test_no_cut_lies_where_a_number_is_still_needed() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0])
            for layer in self.layers[:2]:
                x = layer(x).relu()
            x = x[rows, torch.zeros(1, dtype=torch.int64)][:, None] + x
            for layer in self.layers[2:]:
                x = layer(x).relu()
            return x

    network = capture(Later(), torch.randn(4, 8), granularity="operators").network
    assert not any(op.mixes_samples for op in network.ops)
    made, read = (
        next(place for place, op in enumerate(network.ops) if word in op.name) for word in ("arange", "index")
    )
    assert not any(made < layer.first <= read for layer in network.layers)
    assert len(network.layers) > 1


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, table: x + torch.arange(x.shape[0])[:, None],
        lambda x, table: x[torch.arange(x.shape[0]).flip(0)],
        lambda x, table: x[torch.arange(x.shape[0]) * 0],
        lambda x, table: table[torch.arange(x.shape[0])] + x,
    ],
    ids=["added", "reversed", "all the first", "of a table"],
)
def test_other_uses_of_numbers_mix_samples(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(9, 8))

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.table)

    assert any(op.mixes_samples for op in capture(Uses(), torch.ones(4, 8)).network.ops)

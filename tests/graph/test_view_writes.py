"""In-place writes to a part or a view of a tensor: values and gradients are the module's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.check import check_graph
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document


def part(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 2:4] = x[:, :2]
    y[:, 5] = 1.0
    return y + x


def to_the_end(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 3:] = x[:, :5]
    return y


def read_through_an_older_view(x: Tensor) -> Tensor:
    y = x.clone()
    view = y.view(-1, 2, 4)
    y[:, 1] = 0.0
    return view[:, 0] * y[:, :4]


def read_before_and_after(x: Tensor) -> Tensor:
    y = x.clone()
    before = y[:, :4] * 1.0
    y[:, :4].mul_(2.0)
    return before + y[:, :4]


def through_several_views(x: Tensor) -> Tensor:
    y = x.clone().view(-1, 2, 4).transpose(1, 2)
    y[:, 1:3, 0].fill_(3.0)
    return y.reshape(-1, 8)


def narrowed(x: Tensor) -> Tensor:
    y = x.clone()
    y.narrow(1, 4, 4).add_(y.narrow(1, 0, 4))
    return y


def masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = 0.5
    y[:, [0, 2]] = x[:, [1, 3]]
    return y


def rolled_window_mask(x: Tensor) -> Tensor:
    mask = x.new_zeros((4, 8))
    for count, (rows, columns) in enumerate([(slice(0, 2), slice(0, 4)), (slice(2, 4), slice(4, 8))]):
        mask[rows, columns] = count + 1
    return x + mask.sum(0)


WRITES = [part, to_the_end, read_through_an_older_view, read_before_and_after, through_several_views, narrowed, masked,
          rolled_window_mask]  # fmt: skip


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.before = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x))


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_values_and_gradients_are_the_modules_own(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Applied(function).double(), torch.randn(4, 8, dtype=torch.float64)
    target = torch.zeros_like(module(x.clone())).detach()
    graph = capture(module, x, loss=F.mse_loss, target=target, verify=True)
    assert [op.name for op in graph.network.ops if op.mixes_samples] == []
    check_graph(read_document(to_document(graph)))  # as a worker does

"""Operators that are not run whole: the graph computes what the module does, values and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.graph import ops
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "diff": lambda x: torch.diff(x, dim=1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1)[1],
    "min of two": lambda x: torch.min(x, x * 2),
    "glu": lambda x: F.glu(x, 1),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "diagonal": lambda x: torch.diagonal(x.reshape(-1, 2, 2, 2), 0, 1, 2),
    "im2col": lambda x: F.unfold(x.reshape(-1, 1, 2, 4), 2),
    "bicubic": lambda x: F.interpolate(x.reshape(-1, 1, 2, 4), scale_factor=2, mode="bicubic"),
    "nearest-exact": lambda x: F.interpolate(x.reshape(-1, 1, 2, 4), scale_factor=2, mode="nearest-exact"),
    "trilinear": lambda x: F.interpolate(x.reshape(-1, 1, 2, 2, 2), scale_factor=2, mode="trilinear"),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "eye": lambda x: x @ torch.eye(8),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "trunc": lambda x: x - torch.trunc(x),
    "kthvalue": lambda x: torch.kthvalue(x, 2, 1)[0],
    "rand": lambda x: x * torch.rand(x.shape[0], 1),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.before = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.before(x))


def captured(function: Callable[[Tensor], Tensor]) -> Graph:
    """The graph, after its loss, gradients and buffers were compared with the module's own."""
    torch.manual_seed(0)
    module, x = Applied(function).double(), torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        target = torch.zeros_like(module(x))
    return capture(module, x, loss=F.mse_loss, target=target, verify=True)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_what_the_module_does_for_each_sample_alone(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        graph = captured(FUNCTIONS[name])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {node.target for node in graph.nodes} <= ops.ALLOWED
    assert [op.name for op in graph.network.ops if op.mixes_samples] == []


def test_what_has_no_decomposition_is_refused_by_its_name() -> None:
    with pytest.raises(Exception, match=r"_cdist_forward.*none of those"):
        captured(lambda x: torch.cdist(x.reshape(-1, 2, 4), x.reshape(-1, 2, 4)))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "function",
    [lambda x: torch.cumprod(x, 0), lambda x: torch.logaddexp(x, x.flip(0)), lambda x: x.unfold(0, 1, 1)],
    ids=["cumprod", "flip", "unfold"],
)
def test_along_the_batch_samples_are_mixed(function: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Applied(function), torch.randn(4, 8))
    assert any(op.mixes_samples for op in graph.network.ops)

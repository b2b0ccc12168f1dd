"""The way in which tiles compute each operator: what they take, what its gradient reads, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.network import Network, Op
from manyhands.graph.capture import capture


class Weighted(nn.Module):
    """A function of a map, a kernel and a number for each of its channels."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.kernel, self.factor = nn.Parameter(torch.rand(4, 4, 3, 3)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.tanh(x * self.factor[0]), self.kernel, self.factor)


def captured(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Network:
    return capture(Weighted(function), torch.randn(3, 4, 9, 8)).network


def op_of(network: Network, name: str) -> Op:
    (op,) = [op for op in network.ops if op.target.split(".")[1] == name]
    return op


def standardised(x: Tensor, kernel: Tensor, factor: Tensor) -> Tensor:
    rows = functional.batch_norm(kernel.reshape(1, 4, -1), None, None, factor * 2, training=True)
    return functional.conv2d(x, rows.reshape_as(kernel), factor - 1)


def test_a_convolution_with_a_computed_weight_is_tiled() -> None:
    network = captured(standardised)
    convolution = op_of(network, "conv2d")
    data, weight, bias = convolution.inputs
    assert convolution.tiling == "local"
    assert set(convolution.derives_from) == {data, weight}
    chain = network.ops[: network.producer[weight] + 1]
    assert not any(op.statistics for op in network.ops)  # what standardises a weight is no batch norm
    assert op_of(network, "batch_norm").is_fixed
    assert network.tensors[bias].batch_axis is None
    assert network.backward_passes(convolution) == 2
    assert not any(op.tiling for op in chain if op.is_fixed)


def test_what_computes_a_weight_stays_with_its_convolution() -> None:
    network = captured(standardised)
    convolution = network.layer_of_op[network.op_index[op_of(network, "conv2d").name]]
    assert network.layer_of_op[network.op_index[op_of(network, "batch_norm").name]] == convolution


LEFT_ALONE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows as parts": lambda x, kernel, factor: x.split((4, 5), 2)[1],
    "columns as parts": lambda x, kernel, factor: x.chunk(2, -1)[0],
    "columns that follow each other in a circle": lambda x, kernel, factor: functional.pad(
        x, (1,) * 4, mode="circular"
    ),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("what", LEFT_ALONE)
def test_other_forms_are_not(what: str) -> None:
    network = captured(LEFT_ALONE[what])
    assert any(not op.tiling for op in network.ops if op.inputs and not op.is_fixed)

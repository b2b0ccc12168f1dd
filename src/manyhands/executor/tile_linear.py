"""Linear layers on boxes: along the last axis, place by place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, add_gradient, placed
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, WeightGradientCall
from manyhands.graph.nodes import Weight


class Linear(TileOperator):
    """A linear layer along an axis that is not cut. The gradient of its input reads nothing but the weight."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        weight, bias = (*self.node.arguments, None)[1:3]
        assert isinstance(weight, Weight)
        self.weight = self.weights.tensors[weight.name]
        self.bias = self.weights.tensors[bias.name] if isinstance(bias, Weight) else None

    def forward(self, call: ForwardCall) -> Tensor:
        data = call.inputs[0].view(self.demand(0, call.out))
        return placed(F.linear(data, self.weight, self.bias), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        if not call.wanted[0]:
            return [None]
        return [BoxTensor(self.demand(0, call.out), torch.matmul(call.gradient, self.weight))]

    def weight_gradients(self, call: WeightGradientCall) -> None:
        rows = call.gradient.reshape(-1, call.gradient.shape[-1])
        if self.weight.requires_grad:
            data = call.inputs[0].view(self.demand(0, call.out))
            add_gradient(self.weight, rows.t() @ data.reshape(-1, data.shape[-1]))
        if self.bias is not None and self.bias.requires_grad:
            add_gradient(self.bias, rows.sum(0))

"""Pooling over windows, on boxes. Divisors are those of the whole axis, whatever the box."""

from __future__ import annotations

from math import inf, prod
from typing import Any, cast

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, are_alike, placed, widened
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall
from manyhands.facts.boxes import Box
from manyhands.facts.reads import Adaptive, Window
from manyhands.graph.memory_formats import memory_format_of

_aten = torch.ops.aten


class _WindowPool(TileOperator):
    """The common part of pools over sliding windows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.axes = [rule for rule in self.op.reads[0].rules[2:] if isinstance(rule, Window)]
        assert len(self.axes) == len(self.op.reads[0].rules) - 2, f"{self.node.name} does not pool over spatial axes"
        self.unpadded = [0 for _ in self.axes]
        self.windows = [rule.kernel for rule in self.axes]
        self.stride = [rule.stride for rule in self.axes]
        self.dilation = [rule.dilation for rule in self.axes]

    def _raw(self, out: Box) -> Box:
        """Return the box that the windows cover, also beyond the border."""
        inner = (
            (a * w.stride - w.padding, (b - 1) * w.stride - w.padding + w.dilation * (w.kernel - 1) + 1)
            for w, (a, b) in zip(self.axes, out.intervals[2:], strict=True)
        )
        return Box((*out.intervals[:2], *inner))


class MaxPool(_WindowPool):
    """The largest of each window, also of volumes; the gradient goes to the first of equals, row by row.

    On a CPU, windows of 2x2 side by side are taken apart into columns and rows, unless channels come last: several
    times faster than ATen's loop, with the same choice among equals. Otherwise the places found forward are kept in the
    notes: to make smaller numbers of them takes as long as to find them again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        kind = f"max_pool{len(self.axes)}d_with_indices"
        self.pool, self.backward = getattr(_aten, kind), getattr(_aten, f"{kind}_backward")

    def forward(self, call: ForwardCall) -> Tensor:
        out, into, notes = call.out, call.into, call.notes
        data = self._data(call.inputs[0], out)
        if self._is_halving(data):
            wide = torch.maximum(data[..., 0::2], data[..., 1::2])
            return torch.maximum(wide[:, :, 0::2], wide[:, :, 1::2], out=into)
        settings = (self.windows, self.stride, self.unpadded, self.dilation)
        if into is not None and are_alike(data, into):
            places = torch.empty_like(into, dtype=torch.int64)
            made, _ = self.pool.out(data, *settings, out=into, indices=places)
        else:
            made, places = self.pool.default(data, *settings)
            made = placed(made, into)
        if notes is not None:
            notes["places"] = BoxTensor(out, places)
        return cast(Tensor, made)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        inputs, gradient, out, notes = call.inputs, call.gradient, call.out, call.notes
        if not call.wanted[0]:
            return [None]
        assert inputs[0] is not None, f"{self.node.name} needs its input"
        raw, settings = self._raw(out), (self.windows, self.stride, self.unpadded, self.dilation)
        noted = notes.get("places") if notes is not None else None
        if noted is not None and noted.box == out:
            data, places = self._like_data(inputs[0], raw), noted.tensor
        else:
            data = self._data(inputs[0], out)
            if self._is_halving(data):
                return [BoxTensor(raw, _halved_backward(data, gradient))]
            _, places = self.pool.default(data, *settings)
        input_gradient = self.backward.default(gradient, data, *settings, False, places)
        return [BoxTensor(raw, input_gradient)]

    def _data(self, source: BoxTensor, out: Box) -> Tensor:
        """Return the input over all windows, with nothing larger beyond the border."""
        demand = self.demand(0, out)
        return widened(source.view(demand), demand, self._raw(out), -inf)

    def _like_data(self, source: BoxTensor, raw: Box) -> Tensor:
        """Return a tensor with the shape and format of the input over all windows."""
        if source.box.contains(raw):
            return source.view(raw)
        last = memory_format_of(raw.rank, True)
        layout = last if source.tensor.is_contiguous(memory_format=last) else torch.contiguous_format
        return torch.empty(raw.shape, dtype=source.tensor.dtype, device=source.tensor.device, memory_format=layout)

    def _is_halving(self, data: Tensor) -> bool:
        is_plain = self.windows == self.stride == [2, 2] and self.dilation == [1, 1]
        return is_plain and data.stride(3) == 1 and not data.is_cuda


def _halved_backward(data: Tensor, gradient: Tensor) -> Tensor:
    left, right = data[..., 0::2], data[..., 1::2]
    wide = torch.maximum(left, right)
    is_upper = wide[:, :, 0::2] >= wide[:, :, 1::2]
    upper, lower = wide[:, :, 0::2], wide[:, :, 1::2]  # from here on, gradients
    torch.mul(gradient, is_upper, out=upper)
    torch.sub(gradient, upper, out=lower)
    input_gradient = torch.empty_like(data)
    torch.mul(wide, left >= right, out=input_gradient[..., 0::2])
    torch.sub(wide, input_gradient[..., 0::2], out=input_gradient[..., 1::2])
    return input_gradient


class AveragePool(_WindowPool):
    """The mean of each window, by the divisors of the whole map."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        kind = f"avg_pool{len(self.axes)}d"
        self.pool, self.backward = getattr(_aten, kind), getattr(_aten, f"{kind}_backward")

    def forward(self, call: ForwardCall) -> Tensor:
        out, into = call.out, call.into
        demand = self.demand(0, out)
        data = widened(call.inputs[0].view(demand), demand, self._raw(out))
        made = self.pool.default(data, self.windows, self.stride, self.unpadded, False, True, 1)
        return torch.div(made, self._divisors(out, made), out=made if into is None else into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient, out = call.gradient, call.out
        if not call.wanted[0]:
            return [None]
        raw = self._raw(out)
        shares = gradient / self._divisors(out, gradient)
        like = gradient.new_empty(()).expand(raw.shape)
        input_gradient = self.backward.default(shares, like, self.windows, self.stride, self.unpadded, False, True, 1)
        return [BoxTensor(raw, input_gradient)]

    def _divisors(self, out: Box, like: Tensor) -> Tensor | float:
        arguments = (*self.node.arguments, *(None for _ in range(7)))
        if arguments[6]:
            return float(arguments[6])
        with_padding = arguments[5] is None or bool(arguments[5])
        counts: list[Tensor] = []
        for axis, rule in enumerate(self.axes, start=2):
            first = torch.arange(*out.intervals[axis]) * rule.stride - rule.padding
            extent, border = self.sources[0].shape[axis], rule.padding if with_padding else 0
            last = (first + rule.kernel).clamp(max=extent + border)
            counts.append(last - (first if with_padding else first.clamp(min=0)))
        if all(bool((each == each[0]).all()) for each in counts):
            return float(prod(int(each[0]) for each in counts))
        divisors = counts[0]
        for each in counts[1:]:
            divisors = divisors.unsqueeze(-1) * each
        return divisors.to(like)


class AdaptiveAveragePool(TileOperator):
    """Means over windows whose bounds follow from the whole axes; as one product with a narrow matrix for each axis."""

    def forward(self, call: ForwardCall) -> Tensor:
        out = call.out
        demand = self.demand(0, out)
        data = call.inputs[0].view(demand)
        for axis in range(2, out.rank):
            means = self._means(axis, demand, out, data)
            data = torch.matmul(data.transpose(axis, -1), means.t()).transpose(axis, -1)
        return placed(data.contiguous(), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient, out = call.gradient, call.out
        if not call.wanted[0]:
            return [None]
        demand = self.demand(0, out)
        for axis in range(2, out.rank):
            means = self._means(axis, demand, out, gradient)
            gradient = torch.matmul(gradient.transpose(axis, -1), means).transpose(axis, -1)
        return [BoxTensor(demand, gradient)]

    def _means(self, axis: int, demand: Box, out: Box, like: Tensor) -> Tensor:
        """Return a matrix [outputs, inputs]: each row has the same share on every element of its window, together 1."""
        rule = Adaptive(axis, self.sources[0].shape[axis], self.output.shape[axis])
        low, high = demand.intervals[axis]
        matrix = like.new_zeros(out.shape[axis], high - low)
        for row, place in enumerate(range(*out.intervals[axis])):
            first, last = rule.demand((place, place + 1), rule.inputs)
            matrix[row, first - low : last - low] = 1.0 / (last - first)
        return matrix

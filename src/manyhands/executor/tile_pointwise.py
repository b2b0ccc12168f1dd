"""Operators that work element by element, on boxes: activations, sums, products and copies by formulas of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, is_dense, placed
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall
from manyhands.facts.boxes import Box
from manyhands.graph.nodes import Node, Value, Weight

_aten = torch.ops.aten

Backward = Callable[..., Tensor]
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def _numbers(node: Node, *defaults: float) -> list[float]:
    """Return the numbers after the first argument, with defaults for those that are not given."""
    numbers = [float(number) for number in node.arguments[1 : 1 + len(defaults)]]
    return numbers + list(defaults[len(numbers) :])


def _relu_backward(gradient: Tensor, values: Tensor, place: Tensor | None = None) -> Tensor:
    if place is None:
        return cast(Tensor, _aten.threshold_backward.default(gradient, values, 0))
    return cast(Tensor, _aten.threshold_backward.grad_input(gradient, values, 0, grad_input=place))


def _leaky_relu_backward(slope: float, gradient: Tensor, values: Tensor, place: Tensor | None = None) -> Tensor:
    if place is None:
        return cast(Tensor, _aten.leaky_relu_backward.default(gradient, values, slope, slope > 0))
    call = _aten.leaky_relu_backward.grad_input
    return cast(Tensor, call(gradient, values, slope, slope > 0, grad_input=place))


def _leaky_relu(node: Node) -> tuple[Any, tuple[Any, ...], Backward]:
    (slope,) = _numbers(node, 0.01)
    return _aten.leaky_relu.out, (slope,), partial(_leaky_relu_backward, slope)


def _hardtanh(node: Node) -> tuple[Any, tuple[Any, ...], Backward]:
    low, high = (0.0, 6.0) if "relu6" in node.target else _numbers(node, -1.0, 1.0)
    return _aten.hardtanh.out, (low, high), lambda g, v: _aten.hardtanh_backward.default(g, v, low, high)


def _elu(node: Node) -> tuple[Any, tuple[Any, ...], Backward]:
    numbers = _numbers(node, 1.0, 1.0, 1.0)
    is_result = all(number > 0 for number in node.arguments[1:])
    return _aten.elu.out, tuple(numbers), lambda g, v: _aten.elu_backward.default(g, *numbers, is_result, v)


def _gelu(node: Node) -> tuple[Any, tuple[Any, ...], Backward]:
    kind = node.options.get("approximate", "none")

    def forward(x: Tensor, out: Tensor) -> Tensor:
        made: Tensor = _aten.gelu.out(x, approximate=kind, out=out)
        return made

    return forward, (), lambda g, v: _aten.gelu_backward.default(g, v, approximate=kind)


# Target -> its call with `out`, the arguments after the input, and its backward from the input's or output's values.
_ACTIVATIONS: dict[str, Callable[[Node], tuple[Any, tuple[Any, ...], Backward]]] = {
    "aten.relu.default": lambda _: (_aten.clamp_min.out, (0,), _relu_backward),
    "aten.leaky_relu.default": _leaky_relu,
    "aten.sigmoid.default": lambda _: (_aten.sigmoid.out, (), _aten.sigmoid_backward.default),
    "aten.tanh.default": lambda _: (_aten.tanh.out, (), _aten.tanh_backward.default),
    "aten.hardtanh.default": _hardtanh,
    "aten.relu6.default": _hardtanh,
    "aten.silu.default": lambda _: (_aten.silu.out, (), _aten.silu_backward.default),
    "aten.hardswish.default": lambda _: (_aten.hardswish.out, (), _aten.hardswish_backward.default),
    "aten.hardsigmoid.default": lambda _: (_aten.hardsigmoid.out, (), _aten.hardsigmoid_backward.default),
    "aten.mish.default": lambda _: (_aten.mish.out, (), _aten.mish_backward.default),
    "aten.elu.default": _elu,
    "aten.gelu.default": _gelu,
}


class Activation(TileOperator):
    """A function of one tensor, written straight to where it belongs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.call, self.numbers, self.derivative = _ACTIVATIONS[self.node.target](self.node)
        self.from_output = self.output.name in self.op.derives_from
        self.derives_in_place = self.node.target in ("aten.relu.default", "aten.leaky_relu.default")

    def forward(self, call: ForwardCall) -> Tensor:
        into = call.into
        data = call.inputs[0].view(call.out)
        if into is None:
            into = data if call.may_overwrite else torch.empty_like(data)
        made: Tensor = self.call(data, *self.numbers, out=into)
        return made

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient, out = call.gradient, call.out
        values = call.output if self.from_output else call.inputs[0]
        assert values is not None, f"{self.node.name} needs the values it derives from"
        if not call.wanted[0]:
            return [None]
        crop = values.view(out)
        if call.may_overwrite and self.derives_in_place and is_dense(gradient):
            return [BoxTensor(out, self.derivative(gradient, crop, gradient))]
        return [BoxTensor(out, self.derivative(gradient, crop))]


class _Combination(TileOperator):
    """Two tensors, or one and a number, broadcast together."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.numbers = [None if isinstance(a, Value) else a for a in self.node.arguments[:2]]

    def _operands(self, inputs: Sequence[BoxTensor | None], out: Box) -> list[Any]:
        """Return both operands in the order of the call, which is the order of the reads."""
        crops = iter(self._crops(inputs, out))
        return [next(crops) if number is None else number for number in self.numbers]

    def _reduced(self, part: Tensor, number: int, out: Box) -> BoxTensor:
        """Return the gradient of an input that may have been broadcast."""
        box = self.demand(number, out)
        return BoxTensor(box, part if tuple(part.shape) == box.shape else part.sum_to_size(box.shape))


class Sum(_Combination):
    """a + k·b, a - k·b, k·b - a."""

    def forward(self, call: ForwardCall) -> Tensor:
        into = call.into
        first, second = self._operands(call.inputs, call.out)
        name, alpha = self.node.target.split(".")[1], self.node.options.get("alpha", 1)
        function = getattr(torch, name)
        if into is None or name == "rsub":
            return placed(function(first, second, alpha=alpha), into)
        made: Tensor = function(first, second, alpha=alpha, out=into)
        return made

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient = call.gradient
        name, alpha = self.node.target.split(".")[1], self.node.options.get("alpha", 1)
        factors = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name]
        used = [factor for factor, number in zip(factors, self.numbers) if number is None]
        return [
            self._reduced(gradient if factor == 1 else gradient * factor, place, call.out)
            if call.wanted[place]
            else None
            for place, factor in enumerate(used)
        ]


class Product(_Combination):
    """a · b, also with a number."""

    def forward(self, call: ForwardCall) -> Tensor:
        first, second = self._operands(call.inputs, call.out)
        return torch.mul(first, second, out=call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        out = call.out
        first, second = self._operands(call.inputs, out)
        others = [other for other, number in ((second, self.numbers[0]), (first, self.numbers[1])) if number is None]
        return [
            self._reduced(call.gradient * other, place, out) if call.wanted[place] else None
            for place, other in enumerate(others)
        ]


class Copy(TileOperator):
    """The same numbers again."""

    def forward(self, call: ForwardCall) -> Tensor:
        into = call.into
        data = call.inputs[0].view(call.out)
        return data.clone() if into is None else into.copy_(data)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        return [BoxTensor(call.out, call.gradient) if call.wanted[0] else None]


def pointwise(node: Node, dtypes: set[str]) -> type[TileOperator]:
    """Return the class that knows a formula for an operator, or the one that runs it again."""
    if len(dtypes) > 1 or not dtypes & _FLOATS:
        return TileOperator
    if node.target in _ACTIVATIONS:
        return Activation
    name = node.target.split(".")[1]
    if name in ("clone", "contiguous", "alias"):
        return Copy
    operands = node.arguments[:2]
    is_plain = not any(isinstance(operand, Weight) for operand in operands) and len(set(map(repr, operands))) == 2
    if is_plain and name in ("add", "sub", "rsub"):
        return Sum
    return Product if is_plain and name == "mul" else TileOperator

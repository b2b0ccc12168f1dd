"""Convolutions on boxes, plain and transposed, by the kernel chosen for them.

    as much padding on both sides of an axis     by the convolution: the input is held up to the border
    on one side, or not as much on the other     zeros in place, in the memory that holds the input

Both gradients are calls of their own, so that weights can be derived while a halo travels (one call for both is no
faster). The input's needs no values, and leaves out the padding on every axis that has as much of it on both sides.

A weight or bias may be computed by operators before (weight standardisation): then it is an input, which every tile has
whole, and its gradient over a box is this tile's part of a sum, as that of an own weight is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, add_gradient, blank, placed, widened
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, WeightGradientCall
from manyhands.facts.boxes import Box, Interval
from manyhands.facts.reads import Spread, Window
from manyhands.graph.convolution_kernels import by_groups, goes_by_groups, product
from manyhands.graph.kernel_flags import Flags
from manyhands.graph.kernels import kernel_calls, takes_product
from manyhands.graph.memory_formats import memory_format_of
from manyhands.graph.nodes import Value, Weight
from manyhands.graph.packed_convolution import PackedConvolution

_aten = torch.ops.aten


class _Operands(NamedTuple):
    """The weight and the bias of a convolution."""

    weight: Tensor
    bias: Tensor | None


class _TileConvolution(TileOperator):
    """The common part of plain and transposed convolutions."""

    transposed = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.axes = [rule for rule in self.op.reads[0].rules[2:] if isinstance(rule, (Window, Spread))]
        self.rank = len(self.op.reads[0].rules)
        assert len(self.axes) == self.rank - 2, f"{self.node.name} is not a convolution over spatial axes"
        self.no_padding = [0 for _ in self.axes]
        node_arguments = (*self.node.arguments, *(None for _ in range(7)))
        self.weight, self.bias = (
            self.weights.tensors[argument.name] if isinstance(argument, Weight) else None
            for argument in node_arguments[1:3]
        )
        tensors = [read.tensor for read in self.op.reads]
        self._weight_place, self._bias_place = (
            tensors.index(argument.name) if isinstance(argument, Value) else 0 for argument in node_arguments[1:3]
        )
        """The places of a computed weight and bias among the inputs; 0, which is the map's: not computed."""
        self.groups = int(node_arguments[6] or 1)
        self.stride = [rule.stride for rule in self.axes]
        self.dilation = [rule.dilation for rule in self.axes]
        kernel = self.kernel
        self.format = memory_format_of(self.rank, kernel is not None and kernel.channels_last)
        self.has_flags = kernel is not None and not kernel.is_plain
        self.is_product = kernel is not None and kernel.product and takes_product(self.graph, self.node)
        self.packed: PackedConvolution | None = None
        self.goes_by_groups = False

    def rest(self) -> None:
        is_plain = self.kernel is not None and self.kernel.channels_last and self.kernel.is_plain and self.rank == 4
        self.goes_by_groups = is_plain and not self.transposed and goes_by_groups(self.groups)
        if self.kernel is not None and self.kernel.packed:
            call = kernel_calls(self.graph, {self.node.name: self.kernel}).get(self.node.name)
            self.packed = call if isinstance(call, PackedConvolution) else None

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the flags that the kernel wants."""
        if not self.has_flags or self.kernel is None:
            return function(*arguments)
        with Flags(self.kernel):
            return function(*arguments)

    def _formatted(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the format that the kernel reads; without a kernel, as it is."""
        return tensor if self.kernel is None else tensor.contiguous(memory_format=self.format)

    def _operands(self, inputs: Sequence[BoxTensor | None]) -> _Operands:
        """Return weight and bias, whether they are the operator's own or computed. For a gradient that does not read a
        computed one, only its shape matters."""
        weight, bias = (
            self._computed(place, inputs) if place else parameter
            for place, parameter in ((self._weight_place, self.weight), (self._bias_place, self.bias))
        )
        assert weight is not None
        return _Operands(weight, bias)

    def _computed(self, place: int, inputs: Sequence[BoxTensor | None]) -> Tensor:
        given = inputs[place]
        return (
            blank(Box.whole(self.sources[place].shape), self.dtype, self.weights.device)
            if given is None
            else given.tensor
        )

    def _convolved(self, data: Tensor, padding: list[int], operands: _Operands) -> Tensor:
        weight, bias = operands
        if self.is_product:
            return product(self._formatted(data), weight, bias)
        if self.packed is not None:
            if not self.packed.shape:  # the first box
                self.packed.pack(self.weights, tuple(data.shape), padding)
                weight = self.weight = self.weights.tensors[self.packed.weight]
            return self.packed(data, weight, bias, padding=padding)
        if self.goes_by_groups:
            data, weight = self._formatted(data), self._formatted(weight)
            return by_groups(data, weight, bias, self.stride, padding, self.dilation, self.groups)
        made: Tensor = self._called(
            torch.convolution, self._formatted(data), self._formatted(weight), bias, self.stride, padding,
            self.dilation, self.transposed, self.no_padding, self.groups,
        )  # fmt: skip
        return made

    def _derived(
        self, gradient: Tensor, data: Tensor, padding: list[int], mask: list[bool], operands: _Operands
    ) -> list[Tensor]:
        weight, bias = operands
        if self.is_product:
            return self._product_derived(self._formatted(gradient), data, mask, weight)
        bias_shape = None if bias is None else list(bias.shape)
        gradients: list[Tensor] = self._called(
            _aten.convolution_backward.default, self._formatted(gradient), data, self._formatted(weight), bias_shape,
            self.stride, padding, self.dilation, self.transposed, self.no_padding, self.groups, mask,
        )  # fmt: skip
        return gradients

    def _product_derived(self, gradient: Tensor, data: Tensor, mask: list[bool], weight: Tensor) -> list[Tensor]:
        """Return the gradients as `convolution_backward` does; those that the mask leaves out are empty."""
        rows_last, none = gradient.movedim(1, -1), gradient.new_empty(0)
        rows = rows_last.reshape(-1, rows_last.shape[-1])
        of_data = (rows_last @ weight.flatten(1)).movedim(-1, 1) if mask[0] else none
        of_weight = rows.t() @ data.movedim(1, -1).reshape(-1, data.shape[1]) if mask[1] else none
        return [of_data, of_weight.view(weight.shape) if mask[1] else none, rows.sum(0) if mask[2] else none]

    def _like_input(self, shape: tuple[int, ...], gradient: Tensor) -> Tensor:
        """Return a tensor with the input's shape and format: its values do not matter, its memory is not used."""
        if self.format is not torch.contiguous_format:
            return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=self.format)
        return gradient.new_empty(()).expand(shape)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradients: list[BoxTensor | None] = [None for _ in call.wanted]
        if call.wanted[0]:
            gradients[0] = self._input_gradient(call)
        mask = [False, *(bool(place) and call.wanted[place] for place in (self._weight_place, self._bias_place))]
        if any(mask):
            parts = self._operand_gradients(call.inputs, call.gradient, call.out, mask)
            for place, part in zip((self._weight_place, self._bias_place), parts):
                if part is not None:
                    gradients[place] = BoxTensor(Box.whole(part.shape), part)
        return gradients

    def weight_gradients(self, call: WeightGradientCall) -> None:
        mask = [False, *(p is not None and p.requires_grad for p in (self.weight, self.bias))]
        if any(mask):
            parts = self._operand_gradients(call.inputs, call.gradient, call.out, mask)
            for parameter, part in zip((self.weight, self.bias), parts):
                if parameter is not None and part is not None:
                    add_gradient(parameter, part)

    def _input_gradient(self, call: InputGradientCall) -> BoxTensor | None:
        """Return the gradient of the map."""
        raise AssertionError("a convolution must say how its input is derived")

    def _operand_gradients(
        self, inputs: Sequence[BoxTensor | None], gradient: Tensor, out: Box, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias, where the mask says so."""
        raise AssertionError("a convolution must say how its weights are derived")

    def _covered(self, spatial: Sequence[Interval]) -> list[Interval]:
        """Return what the windows at some places cover, also beyond the border."""
        return [
            (a * w.stride - w.padding, (b - 1) * w.stride - w.padding + w.dilation * (w.kernel - 1) + 1)
            for w, (a, b) in zip(self.axes, spatial, strict=True)
        ]


class Convolution(_TileConvolution):
    """A convolution with any kernel, stride, padding, dilation and groups."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._read: dict[tuple[Box, Box], tuple[Box, list[int] | None]] = {}
        """(box held, box made of it) -> the box that is read, and the padding on both sides of it."""
        self._gradients: dict[Box, tuple[Box, list[int]]] = {}
        """The box that is differentiated -> the box of the input's gradient, and the padding that it leaves out."""

    def raw_demand(self, number: int, out: Box) -> Box:
        if number:
            return self.demand(number, out)  # a computed weight
        box, raw = self.demand(0, out), self._raw(out)
        for axis in range(2, self.rank) if not box.is_empty else ():
            if not _is_even(box.intervals[axis], raw.intervals[axis]):
                box = box.replace(axis, raw.intervals[axis])
        return box

    def _raw(self, out: Box) -> Box:
        """Return the box that the windows cover, also beyond the border."""
        samples, channels = self.extents(0, out)[:2]
        return Box.of((0, samples), (0, channels), *self._covered(out.intervals[2:]))

    def _data(self, source: BoxTensor, out: Box) -> tuple[Tensor, list[int]]:
        """Return the input with zeros wherever windows reach over the border, but for those that the convolution adds
        itself."""
        entry = self._read.get((source.box, out))
        if entry is None:
            entry = self._read[source.box, out] = self._to_read(source.box, out)
        box, padding = entry
        if padding is not None:
            return source.view(box), padding
        raw = self._raw(out)
        if box.is_empty:  # nothing but padding
            return source.tensor.new_zeros(raw.shape), self.no_padding
        return widened(source.view(box), box, raw), self.no_padding

    def _to_read(self, source: Box, out: Box) -> tuple[Box, list[int] | None]:
        raw, demand = self._raw(out), self.demand(0, out)
        if demand.is_empty:
            return demand, None
        box = raw.intersect(source)
        assert box.contains(demand), f"{self.node.name} needs {demand}, and only {source} is here"
        for axis in range(2, self.rank):  # another reader may have wanted zeros on one side
            if not _is_even(box.intervals[axis], raw.intervals[axis]):
                box = box.replace(axis, demand.intervals[axis])
        return box, _even_padding(box, raw)

    def forward(self, call: ForwardCall) -> Tensor:
        data, padding = self._data(call.inputs[0], call.out)
        return placed(self._convolved(data, padding, self._operands(call.inputs)), call.into)

    def _input_gradient(self, call: InputGradientCall) -> BoxTensor | None:
        gradient, out = call.gradient, call.out
        entry = self._gradients.get(out)
        if entry is None:
            entry = self._gradients[out] = self._to_derive(out)
        box, padding = entry
        if box.is_empty:
            return None
        like, operands = self._like_input(box.shape, gradient), self._operands(call.inputs)
        return BoxTensor(box, self._derived(gradient, like, padding, [True, False, False], operands)[0])

    def _to_derive(self, out: Box) -> tuple[Box, list[int]]:
        box = self.raw_demand(0, out)
        return box, _even_padding(box, self._raw(out)) or self.no_padding

    def _operand_gradients(
        self, inputs: Sequence[BoxTensor | None], gradient: Tensor, out: Box, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        source, of_bias = inputs[0], _of_bias(gradient) if mask[2] and not mask[1] else None
        if of_bias is not None:
            return None, of_bias
        assert source is not None, f"{self.node.name} needs its input"
        data, padding = self._data(source, out)
        parts = self._derived(gradient, self._formatted(data), padding, mask, self._operands(inputs))
        return parts[1], parts[2] if mask[2] else None


class TransposedConvolution(_TileConvolution):
    """A transposed convolution: every input element spreads over a window of the output."""

    transposed = True

    def _full(self, demand: Box, out: Box) -> Box:
        """Return the box that the demanded inputs make in all: mostly a little more than `out`, by output padding
        less."""
        return Box((*out.intervals[:2], *self._covered(demand.intervals[2:])))

    def forward(self, call: ForwardCall) -> Tensor:
        inputs, out, into, operands = call.inputs, call.out, call.into, self._operands(call.inputs)
        demand = self.demand(0, out)
        full = Box(tuple((0, 0) for _ in out.intervals)) if demand.is_empty else self._full(demand, out)
        if full.contains(out) and not full.is_empty:
            made = self._convolved(inputs[0].view(demand), self.no_padding, operands)
            return placed(widened(made, full, out), into)
        made = torch.zeros(out.shape, dtype=self.dtype, device=self.weights.device) if into is None else into.zero_()
        if operands.bias is not None:
            made += operands.bias.view(1, -1, *(1 for _ in self.axes))
        common = full.intersect(out)
        if not common.is_empty:
            convolved = self._convolved(inputs[0].view(demand), self.no_padding, operands)
            BoxTensor(out, made).view(common).copy_(BoxTensor(full, convolved).view(common))
        return made

    def _input_gradient(self, call: InputGradientCall) -> BoxTensor | None:
        gradient, out = call.gradient, call.out
        demand = self.demand(0, out)
        if demand.is_empty:
            return None
        spread = widened(gradient, out, self._full(demand, out))
        like, operands = self._like_input(demand.shape, gradient), self._operands(call.inputs)
        return BoxTensor(demand, self._derived(spread, like, self.no_padding, [True, False, False], operands)[0])

    def _operand_gradients(
        self, inputs: Sequence[BoxTensor | None], gradient: Tensor, out: Box, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        demand = self.demand(0, out)
        of_bias = _of_bias(gradient) if mask[2] else None  # also of output that no input made
        if not mask[1] or demand.is_empty:
            return None, of_bias
        source = inputs[0]
        assert source is not None, f"{self.node.name} needs its input"
        spread, data = widened(gradient, out, self._full(demand, out)), self._formatted(source.view(demand))
        return self._derived(spread, data, self.no_padding, [False, True, False], self._operands(inputs))[1], of_bias


def _of_bias(gradient: Tensor) -> Tensor:
    """Return the gradient of the bias: it is added in every place."""
    return gradient.sum((0, *range(2, gradient.dim())))


def _is_even(inner: Interval, outer: Interval) -> bool:
    """Return whether as much is missing on both sides."""
    return inner[0] - outer[0] == outer[1] - inner[1]


def _even_padding(box: Box, raw: Box) -> list[int] | None:
    """Return the zeros on both sides that make `raw` of `box`; None where the sides differ."""
    pairs = list(zip(box.intervals[2:], raw.intervals[2:], strict=True))
    return [low - first for (low, _), (first, _) in pairs] if all(_is_even(*pair) for pair in pairs) else None

"""Operators on boxes that only move elements, or drop some: concatenation, slices, padding, shuffles, dropout, and
other orders of axes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, placed, widened
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall
from manyhands.facts.boxes import Box
from manyhands.facts.reads import Mirrored
from manyhands.graph.piece import Context
from manyhands.graph.random_ops import RANDOM_CALLS, dropped


class Concatenation(TileOperator):
    """Maps one after the other, along channels or another axis that is not cut."""

    def forward(self, call: ForwardCall) -> Tensor:
        into = call.into
        parts, axis = self._crops(call.inputs, call.out), self._axis
        return torch.cat(parts, axis) if into is None else torch.cat(parts, axis, out=into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradients: list[BoxTensor | None] = []
        first = 0
        for number, want in enumerate(call.wanted):
            box = self.demand(number, call.out)
            size = box.shape[self._axis]
            gradients.append(BoxTensor(box, call.gradient.narrow(self._axis, first, size)) if want else None)
            first += size
        return gradients

    @property
    def _axis(self) -> int:
        return int(self.node.arguments[1]) % len(self.output.shape)


class Regrouping(TileOperator):
    """Axes in another order, joined or split, but for the spatial ones. The result is a copy: its memory is its own."""

    def forward(self, call: ForwardCall) -> Tensor:
        out, into = call.out, call.into
        data = call.inputs[0].view(self.demand(0, out))
        made = data.permute(self._order) if self._order else data.reshape(out.shape)
        if into is not None:
            return into.copy_(made)
        return made.clone(memory_format=torch.contiguous_format)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient = call.gradient
        if not call.wanted[0]:
            return [None]
        demand = self.demand(0, call.out)
        if not self._order:
            return [BoxTensor(demand, gradient.reshape(demand.shape))]
        return [BoxTensor(demand, gradient.permute([self._order.index(axis) for axis in range(len(self._order))]))]

    @cached_property
    def _order(self) -> list[int]:
        """The order that axes are put in; empty where they are joined or split."""
        name, rank = self.node.target.split(".")[1], len(self.output.shape)
        if name == "permute":
            return [axis % rank for axis in self.node.arguments[1]]
        if name not in ("transpose", "swapaxes"):
            return []
        order = list(range(rank))
        first, second = (axis % rank for axis in self.node.arguments[1:3])
        order[first], order[second] = second, first
        return order


class Slice(TileOperator):
    """A range of any axis but that of samples, or every second element of one, say."""

    def forward(self, call: ForwardCall) -> Tensor:
        into = call.into
        data = call.inputs[0].view(self.demand(0, call.out))[self._chosen]
        return data.clone() if into is None else into.copy_(data)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        if not call.wanted[0]:
            return [None]
        demand = self.demand(0, call.out)
        if demand.shape == call.out.shape:
            return [BoxTensor(demand, call.gradient)]
        spread = call.gradient.new_zeros(demand.shape)
        spread[self._chosen] = call.gradient
        return [BoxTensor(demand, spread)]

    @cached_property
    def _chosen(self) -> tuple[slice, ...]:
        """The elements of a crop that are taken."""
        axis, step = ((*self.node.arguments[1:], *(None,) * 3)[place] for place in (0, 3))
        rank = len(self.output.shape)
        return tuple(slice(None, None, step if number == (axis or 0) % rank else None) for number in range(rank))


class Split(TileOperator):
    """A map in parts along its channels: the one operator with several outputs."""

    def part(self, number: int, out: Box) -> Box:
        """Return the box of the input that is `out` of an output."""
        first = sum(spec.shape[self._axis] for spec in self.node.outputs[:number])
        return out.shift([first if axis == self._axis else 0 for axis in range(out.rank)])

    @cached_property
    def _axis(self) -> int:
        return int(self.node.arguments[2]) % len(self.output.shape)


class Expansion(TileOperator):
    """A tensor spread over a map: the map only tells its size."""

    def forward(self, call: ForwardCall) -> Tensor:
        spread = call.inputs[0].view(self.demand(0, call.out)).expand(call.out.shape)
        return spread.clone(memory_format=torch.contiguous_format) if call.into is None else call.into.copy_(spread)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        if not call.wanted[0]:
            return [None for _ in call.wanted]
        demand = self.demand(0, call.out)
        return [BoxTensor(demand, call.gradient.sum_to_size(demand.shape)), None]


class Padding(TileOperator):
    """A constant around the map; less than nothing cuts."""

    def forward(self, call: ForwardCall) -> Tensor:
        inputs, out, into = call.inputs, call.out, call.into
        position = 2 if "constant" in self.node.target else 3
        value = float(self.node.arguments[position] or 0) if len(self.node.arguments) > position else 0.0
        demand = self.demand(0, out)
        if demand.is_empty:
            return placed(inputs[0].tensor.new_full(out.shape, value), into)
        data = inputs[0].view(demand)
        if into is None:
            made = widened(data, self._shifted(demand), out, value)
            return made.clone() if made is data else made
        into.fill_(value)
        BoxTensor(out, into).view(self._shifted(demand)).copy_(data)
        return into

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        out = call.out
        demand = self.demand(0, out)
        if not call.wanted[0] or demand.is_empty:
            return [None]
        return [BoxTensor(demand, BoxTensor(out, call.gradient).view(self._shifted(demand)))]

    def _shifted(self, demand: Box) -> Box:
        """Return where an input box lies in the output."""
        amounts, last = self.node.arguments[1], demand.rank - 1
        before = [amounts[2 * (last - axis)] if 2 * (last - axis) < len(amounts) else 0 for axis in range(last + 1)]
        return demand.shift(before)


class EdgePadding(TileOperator):
    """Elements of the map around it: mirrored at its edges, or the edges again. Only the true edges count."""

    def forward(self, call: ForwardCall) -> Tensor:
        demand = self.demand(0, call.out)
        data, axes = call.inputs[0].view(demand), self._padded(call.out)
        for axis in axes:
            data = data.index_select(axis, self._places(axis, call.out, demand, data))
        return placed(data if axes else data.clone(), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        if not call.wanted[0]:
            return [None]
        demand, gradient = self.demand(0, call.out), call.gradient
        for axis in self._padded(call.out):
            shape = list(gradient.shape)
            shape[axis] = demand.shape[axis]
            places = self._places(axis, call.out, demand, gradient)
            gradient = gradient.new_zeros(shape).index_add_(axis, places, gradient)
        return [BoxTensor(demand, gradient)]

    def _padded(self, out: Box) -> list[int]:
        """Return the axes along which a box reaches over the edges of the input."""
        rules = [rule for rule in self.op.reads[0].rules if isinstance(rule, Mirrored)]
        return [
            rule.axis
            for rule in rules
            if out.intervals[rule.axis][0] < rule.before
            or out.intervals[rule.axis][1] > rule.before + self.sources[0].shape[rule.axis]
        ]

    def _places(self, axis: int, out: Box, demand: Box, like: Tensor) -> Tensor:
        """Return the element of a crop that each element of the box is."""
        rule, last = self.op.reads[0].rules[axis], self.sources[0].shape[axis] - 1
        assert isinstance(rule, Mirrored)
        places = torch.arange(*out.intervals[axis], device=like.device) - rule.before
        places = places.clamp(0, last) if rule.repeats else last - (last - places.abs()).abs()
        return places - demand.intervals[axis][0]


class PixelShuffle(TileOperator):
    """Channels to neighbours (pixel_shuffle) or neighbours to channels (pixel_unshuffle)."""

    def forward(self, call: ForwardCall) -> Tensor:
        out = call.out
        demand = self.demand(0, out)
        made = self._moved(call.inputs[0].view(demand), "unshuffle" in self.node.target)
        return placed(BoxTensor(self._full(demand, out), made).view(out), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        out = call.out
        if not call.wanted[0]:
            return [None]
        demand = self.demand(0, out)
        spread = widened(call.gradient, out, self._full(demand, out))
        return [BoxTensor(demand, self._moved(spread, "unshuffle" not in self.node.target))]

    def _moved(self, data: Tensor, to_channels: bool) -> Tensor:
        factor = self.node.arguments[1]
        return torch.pixel_unshuffle(data, factor) if to_channels else torch.pixel_shuffle(data, factor)

    def _full(self, demand: Box, out: Box) -> Box:
        """Return the box that a crop becomes."""
        factor = self.node.arguments[1]
        if "unshuffle" in self.node.target:
            inner = [(a // factor, b // factor) for a, b in demand.intervals[2:]]
        else:
            inner = [(a * factor, b * factor) for a, b in demand.intervals[2:]]
        return Box((*out.intervals[:2], *inner))


class TileChannelShuffle(TileOperator):
    """Channels dealt out among groups, place by place; the way back deals them the other way."""

    def forward(self, call: ForwardCall) -> Tensor:
        return placed(
            torch.channel_shuffle(call.inputs[0].view(call.out).contiguous(), self.node.arguments[1]), call.into
        )

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        out = call.out
        if not call.wanted[0]:
            return [None]
        return [
            BoxTensor(out, torch.channel_shuffle(call.gradient.contiguous(), out.shape[1] // self.node.arguments[1]))
        ]


class Dropout(TileOperator):
    """All kinds of dropout: the part of the mask that belongs to the box, drawn again for the gradient."""

    def forward(self, call: ForwardCall) -> Tensor:
        out, context, into = call.out, call.context, call.into
        data = call.inputs[0].view(out)
        if not self._draws(context):
            return data.clone() if into is None else into.copy_(data)
        factor, offset = self._mask(out, context, data)
        made = torch.mul(data, factor, out=into)
        return made if offset is None else made.add_(offset)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient, out, context = call.gradient, call.out, call.context
        if not call.wanted[0]:
            return [None]
        return [BoxTensor(out, gradient * self._mask(out, context, gradient)[0] if self._draws(context) else gradient)]

    def _draws(self, context: Context) -> bool:
        return RANDOM_CALLS[self.node.target].draws(self.node, context.training)

    def _mask(self, out: Box, context: Context, like: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = context.first_sample * self.output.rows_per_sample
        box = out.shift([rows if axis == self.output.batch_axis else 0 for axis in range(out.rank)])
        return dropped(self.node, context.seed, context.step, box, like.dtype, like.device)

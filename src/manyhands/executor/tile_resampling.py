"""Nearest and linear up-sampling on boxes, with the places and coefficients of the whole axes.

By whole factors a crop is resampled by torch itself: every block of the output is made like any other. By other factors
each axis is gathered by a table that is made once for the whole axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, placed, widened
from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall
from manyhands.facts.boxes import Box
from manyhands.facts.reads import Blocks, Window
from manyhands.graph.read_rules import resampling_factors, resampling_scales

_aten = torch.ops.aten


class Resampling(TileOperator):
    """Up-sampling of pictures and volumes, nearest and (bi- or tri-)linear, also with aligned corners."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.linear = "linear" in self.node.target
        kind = self.node.target.split(".")[1]
        self.call, self.backward = getattr(_aten, kind), getattr(_aten, f"{kind}_backward")
        self.aligned = self.linear and bool(self.node.arguments[2])
        rules = self.op.reads[0].rules[2:]
        self.factors = [rule.outputs for rule in rules if isinstance(rule, Blocks)]
        self.is_by_blocks = len(self.factors) == len(rules)
        self.changed = [axis for axis, rule in enumerate(rules, start=2) if not isinstance(rule, Window)]
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor | None]] = {}

    def forward(self, call: ForwardCall) -> Tensor:
        out, into = call.out, call.into
        demand = self.demand(0, out)
        data = call.inputs[0].view(demand)
        if self.is_by_blocks:
            full = self._full(demand)
            made = self.call.default(data, full.shape[2:], *([False] if self.linear else []))
            return placed(BoxTensor(full, made).view(out), into)
        for axis in self.changed:
            data = self._gathered(data, axis, demand, out)
        return placed(data, into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        gradient, out = call.gradient, call.out
        if not call.wanted[0]:
            return [None]
        demand = self.demand(0, out)
        if self.is_by_blocks:
            full = self._full(demand)
            spread, sizes = widened(gradient, out, full).contiguous(), (full.shape[2:], demand.shape)
            input_gradient = self.backward.default(spread, *sizes, *([False] if self.linear else []))
            return [BoxTensor(demand, input_gradient)]
        for axis in reversed(self.changed):
            gradient = self._scattered(gradient, axis, demand, out)
        return [BoxTensor(demand, gradient)]

    def _full(self, demand: Box) -> Box:
        """Return the box that a crop becomes."""
        inner = ((a * factor, b * factor) for factor, (a, b) in zip(self.factors, demand.intervals[2:], strict=True))
        return Box((*demand.intervals[:2], *inner))

    def _gathered(self, data: Tensor, axis: int, demand: Box, out: Box) -> Tensor:
        first, second, share = self._places(axis, demand, out, data)
        if second is None or share is None:
            return data.index_select(axis, first)
        return torch.lerp(data.index_select(axis, first), data.index_select(axis, second), share)

    def _scattered(self, gradient: Tensor, axis: int, demand: Box, out: Box) -> Tensor:
        """Return the crop's gradient: every output's gradient goes to the elements that the output was made from."""
        first, second, share = self._places(axis, demand, out, gradient)
        shape = list(gradient.shape)
        shape[axis] = demand.shape[axis]
        scattered = gradient.new_zeros(shape)
        if second is None or share is None:
            return scattered.index_add_(axis, first, gradient)
        of_second = gradient * share
        return scattered.index_add_(axis, first, gradient - of_second).index_add_(axis, second, of_second)

    def _places(self, axis: int, demand: Box, out: Box, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return for each output of the box the one or two elements of the crop that it is made from, and the second's
        share."""
        key = axis, like.dtype, like.device
        if key not in self._tables:
            self._tables[key] = self._table(axis, like)
        places, shares = (None if t is None else t[slice(*out.intervals[axis])] for t in self._tables[key])
        assert places is not None
        low, last = demand.intervals[axis][0], self.sources[0].shape[axis] - 1
        if shares is None:
            return places - low, None, None
        return (
            places - low,
            (places + 1).clamp(max=last) - low,
            shares.view([-1 if a == axis else 1 for a in range(like.dim())]),
        )

    def _table(self, axis: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return for the whole axis the element that each output is made from, and the next one's share."""
        before, after = self.sources[0].shape[axis], self.output.shape[axis]
        if not self.linear:  # torch itself shows which element it takes: rounding decides where two are as near
            ramp = torch.arange(before, dtype=like.dtype, device=like.device).view(1, 1, before, 1)
            factor = resampling_factors(self.node, like.dim() - 2)[axis - 2]
            nearest = _aten.upsample_nearest2d.default(ramp, [after, 1], factor, None)
            return nearest.flatten().long(), None
        places = torch.arange(after, dtype=like.dtype, device=like.device)
        scales = resampling_scales(self.node, self.sources[0].shape[2:], self.output.shape[2:])
        scale = torch.tensor(scales[axis - 2], dtype=like.dtype, device=like.device)
        places = places * scale if self.aligned else ((places + 0.5) * scale - 0.5).clamp_(min=0)
        whole = places.floor().clamp_(max=before - 1)
        return whole.long(), (places - whole).clamp_(0, 1)

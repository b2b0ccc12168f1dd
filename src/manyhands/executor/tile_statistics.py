"""Operators of a tiled stage that need statistics of all tiles, which an all-gather brings: what they share, and pools.

local_statistics ──all tiles' rows──▶ combine ──GatheredStatistics──▶ forward
local_backward_statistics ──rows added up──▶ input_gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from manyhands.executor.tile_base import TileOperator, blank, placed
from manyhands.executor.tile_call import (
    BoxTensor,
    ForwardCall,
    GatheredStatistics,
    InputGradientCall,
    WeightGradientCall,
)
from manyhands.facts.boxes import Box

PieceGradient = tuple[BoxTensor, Tensor]
"""A piece of a map, and the gradient of what was made of it."""


class StatisticsOperator(TileOperator):
    """An operator that needs statistics of all tiles, forward and backward."""

    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        """Return this tile's row for the forward all-gather: sums over what it owns of the input, zeros of an empty
        box."""
        raise AssertionError("an operator with statistics must say which")

    def combine(self, rows: Sequence[Tensor], shares: Sequence[int]) -> GatheredStatistics:
        """Return the combined statistics of all tiles, from their rows in the order of the devices; `shares`: how many
        places of a plane each owns."""
        raise AssertionError("an operator with statistics must combine them")

    def forward(self, call: ForwardCall) -> Tensor:
        """Compute `call.out` of the output by the statistics of all tiles."""
        raise AssertionError("an operator with statistics must use them")

    def local_backward_statistics(
        self,
        inputs: Sequence[BoxTensor | None],
        gradient: BoxTensor,
        over: Box,
        statistics: GatheredStatistics,
        beyond: Sequence[PieceGradient] = (),
    ) -> Tensor:
        """Return this tile's row for the backward all-gather: sums over the box `over`. `beyond`: where the input is
        held in pieces, the others of it, with their gradients."""
        raise AssertionError("an operator with statistics must say which")

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        """Compute the input's gradient by the backward statistics of all tiles, added up (`call.total`).

        A normalization adds its correction inside `call.corrected` only; a pool gives the gradient over that box of its
        input.
        """
        raise AssertionError("an operator with statistics must use them")

    def weight_gradients(self, call: WeightGradientCall) -> None:
        """Do nothing, but for normalizations."""


class GlobalPool(StatisticsOperator):
    """The mean or the sum of every whole map: the same on all tiles."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spatial = self.graph.network.spatial[self.sources[0].name]

    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        if owned.is_empty:
            # of the input there may be nothing at all
            return inputs[0].tensor.new_zeros(prod(self._sums_shape(owned)))
        return inputs[0].view(owned).sum(self.spatial).flatten()

    def combine(self, rows: Sequence[Tensor], shares: Sequence[int]) -> GatheredStatistics:
        total = torch.stack(list(rows)).sum(0).mul_(self._factor)
        samples = total.numel() // self.output.elements
        return GatheredStatistics(result=total.view(self.output.shape_for(samples)))

    def forward(self, call: ForwardCall) -> Tensor:
        statistics = call.statistics
        assert statistics is not None
        assert statistics.result is not None, f"{self.node.name} needs the sums of all tiles"
        return placed(statistics.result, call.into)

    def local_backward_statistics(
        self,
        inputs: Sequence[BoxTensor | None],
        gradient: BoxTensor,
        over: Box,
        statistics: GatheredStatistics,
        beyond: Sequence[PieceGradient] = (),
    ) -> Tensor:
        return gradient.tensor.reshape(-1)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        wanted, total, corrected = call.wanted, call.total, call.corrected
        assert total is not None
        assert corrected is not None, f"{self.node.name} must be told where its gradient is wanted"
        if not wanted[0] or corrected.is_empty:
            return [None]
        shares = (total * self._factor).view(self._sums_shape(corrected))
        return [BoxTensor(corrected, shares.expand(corrected.shape))]

    @property
    def _factor(self) -> float:
        return 1.0 if "sum" in self.node.target else 1.0 / prod(self.sources[0].shape[axis] for axis in self.spatial)

    def _sums_shape(self, box: Box) -> list[int]:
        """Return the shape of the sums over a box of the input: one place along each spatial axis."""
        return [1 if axis in self.spatial else extent for axis, extent in enumerate(box.shape)]


class FromShape(StatisticsOperator):
    """A tensor of a shape of its own: the map only determines its device and its type. It needs no sums at all."""

    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        return inputs[0].tensor.new_empty(0)

    def combine(self, rows: Sequence[Tensor], shares: Sequence[int]) -> GatheredStatistics:
        return GatheredStatistics()

    def forward(self, call: ForwardCall) -> Tensor:
        context = call.context
        like = blank(Box.of((0, 1)), getattr(torch, self.sources[0].dtype), self.weights.device)
        context = replace(context, samples=self.samples(call.out))
        return placed(self._piece({self.op.reads[0].tensor: like}, context)[self.output.name], call.into)

"""Operators of a tiled stage on maps of a smaller type than float32, for which manyhands has formulas of its own.

PyTorch's kernels for such maps compute in float32 and round once, at the end; so do these: what a formula reads is
widened, and its result is rounded. Sums over tiles are formed, and travel, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from manyhands.executor.statistics import wide
from manyhands.executor.tile_base import TileOperator, placed
from manyhands.executor.tile_call import (
    BoxTensor,
    ForwardCall,
    GatheredStatistics,
    InputGradientCall,
    WeightGradientCall,
)
from manyhands.executor.tile_normalization import Normalization
from manyhands.executor.tile_pooling import AdaptiveAveragePool, AveragePool
from manyhands.executor.tile_resampling import Resampling
from manyhands.executor.tile_statistics import GlobalPool, PieceGradient, StatisticsOperator
from manyhands.facts.boxes import Box

_BY_FORMULA = (Normalization, GlobalPool, AveragePool, AdaptiveAveragePool, Resampling)
"""Operators whose formulas are not the kernels that PyTorch has for them."""

if TYPE_CHECKING:
    _Operator = TileOperator
    _Statistics = StatisticsOperator
else:
    _Operator = _Statistics = object


_CLASSES: dict[type[TileOperator], type[TileOperator]] = {}


def in_float32(kind: type[TileOperator]) -> type[TileOperator]:
    """Return the class of operators that compute as those of `kind`, in float32, on maps of a smaller type."""
    if not issubclass(kind, _BY_FORMULA):
        return kind
    if kind not in _CLASSES:
        beside = (_WideStatistics, _Wide) if issubclass(kind, StatisticsOperator) else (_Wide,)
        _CLASSES[kind] = type(f"{kind.__name__}InFloat32", (*beside, kind), {})
    return _CLASSES[kind]


def _widened(inputs: Sequence[BoxTensor | None]) -> list[Any]:
    return [None if given is None else BoxTensor(given.box, wide(given.tensor)) for given in inputs]


class _Wide(_Operator):
    def forward(self, call: ForwardCall) -> Tensor:
        made = super().forward(msgspec.structs.replace(call, inputs=_widened(call.inputs), into=None))
        return placed(made.to(self.dtype), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        output = None if call.output is None else BoxTensor(call.output.box, wide(call.output.tensor))
        replaced = msgspec.structs.replace(
            call, inputs=_widened(call.inputs), output=output, gradient=wide(call.gradient)
        )
        gradients = super().input_gradients(replaced)
        return [
            None if made is None else BoxTensor(made.box, made.tensor.to(getattr(torch, source.dtype)))
            for made, source in zip(gradients, self.sources, strict=True)
        ]

    def weight_gradients(self, call: WeightGradientCall) -> None:
        super().weight_gradients(
            msgspec.structs.replace(call, inputs=_widened(call.inputs), gradient=wide(call.gradient))
        )


class _WideStatistics(_Statistics):
    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        return super().local_statistics(_widened(inputs), owned)

    def local_backward_statistics(
        self,
        inputs: Sequence[BoxTensor | None],
        gradient: BoxTensor,
        over: Box,
        statistics: GatheredStatistics,
        beyond: Sequence[PieceGradient] = (),
    ) -> Tensor:
        (wide_gradient,) = _widened([gradient])
        pieces = [(BoxTensor(piece.box, wide(piece.tensor)), wide(more)) for piece, more in beyond]
        return super().local_backward_statistics(_widened(inputs), wide_gradient, over, statistics, pieces)

    def rim_gradient(self, gradient: Tensor, statistics: GatheredStatistics) -> Tensor:
        """Return a normalization's gradient where nothing is corrected."""
        made: Tensor = super().rim_gradient(wide(gradient), statistics)  # type: ignore[misc]
        return made.to(gradient.dtype)

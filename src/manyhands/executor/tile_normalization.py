"""Normalizations of a tiled stage, by the moments of all tiles.

Every one is x · scale + offset for each feature: a channel (batch norm), or a channel of a sample (group and instance
norm, whose samples and channels are one axis here). With μ, σ² over all tiles, n numbers, and dy the gradient:

    dx = w/σ · dy  -  (Σ w·dy  +  x̂ · Σ w·dy·x̂) / (n·σ),   x̂ = (x - μ)/σ

The second part, the correction, is a function of x alone, so it can be added where the plan wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.executor.statistics import Moments, follow, merged, own_moments
from manyhands.executor.tile_base import add_gradient, are_alike, is_dense
from manyhands.executor.tile_call import (
    BoxTensor,
    ForwardCall,
    GatheredStatistics,
    InputGradientCall,
    WeightGradientCall,
)
from manyhands.executor.tile_statistics import PieceGradient, StatisticsOperator
from manyhands.facts.boxes import Box
from manyhands.graph.cumulative_norms import momentum_of
from manyhands.graph.nodes import Weight
from manyhands.graph.piece import Context

_aten = torch.ops.aten


class Normalization(StatisticsOperator):
    """The common part of all normalizations."""

    moments_of_samples = True
    """Whether samples have moments of their own, so that features are samples times channels."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        node_arguments = self.node.arguments
        weight, bias, epsilon = self._arguments(node_arguments)
        self.weight, self.bias = self._weight(weight), self._weight(bias)
        self.epsilon = float(epsilon)
        self.channels = self.sources[0].shape[1]
        self.places = [1 for _ in self.sources[0].shape[2:]]
        self._zeros_and_ones: tuple[Tensor, Tensor] | None = None
        self._unused: tuple[Tensor, Tensor] | None = None
        """The tensors that PyTorch wants to write a batch's moments to; there are none, so they are empty."""

    def _arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Return weight, bias and epsilon from among the arguments."""
        return arguments[1], arguments[2], arguments[7]

    def _weight(self, argument: Any) -> Tensor | None:
        return self.weights.tensors[argument.name] if isinstance(argument, Weight) else None

    def _features(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its features as the second axis. A single sample is returned as it is: a view of it
        would lie in memory in an order that PyTorch's backward kernel beside a tensor in another order takes for a
        third, and adds up wrongly."""
        samples, channels, *places = tensor.shape
        if not self.moments_of_samples or samples == 1:
            return tensor
        return tensor.reshape(1, samples * channels, *places)

    def _per_feature(self, parameter: Tensor | None, moments: Moments, default: float) -> Tensor:
        """Return a weight or bias for each feature."""
        if parameter is None:
            return torch.full_like(moments.mean, default)
        times = moments.mean.numel() // self.channels
        return parameter.detach() if times == 1 else parameter.detach().repeat(times)

    def forward(self, call: ForwardCall) -> Tensor:
        statistics = call.statistics
        assert statistics is not None
        assert statistics.moments is not None, f"{self.node.name} needs the moments of all tiles"
        moments = statistics.moments
        weight, bias = (self._per_feature(p, moments, d) for p, d in ((self.weight, 1.0), (self.bias, 0.0)))
        return self._normalized(call.inputs[0].view(call.out), weight, bias, moments.mean, moments.variance, call.into)

    def _normalized(
        self,
        data: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        into: Tensor | None,
    ) -> Tensor:
        features = self._features(data)
        if into is None:
            made = torch.batch_norm(features, weight, bias, mean, variance, False, 0.0, self.epsilon, False)
            return made.view(data.shape) if self.moments_of_samples else made
        if not self.moments_of_samples and are_alike(data, into):
            self._write_normalized(data, weight, bias, mean, variance, self.epsilon, into)
            return into
        scale = (variance + self.epsilon).rsqrt_()
        scale = scale if weight is None else scale.mul_(weight)
        offset = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        leading = self._leading(data)
        return torch.addcmul(offset.view(leading), data, scale.view(leading), out=into)

    def _leading(self, data: Tensor) -> list[int]:
        """Return the shape of a number for each feature, beside some data."""
        return [data.shape[0] if self.moments_of_samples else 1, self.channels, *self.places]

    def local_backward_statistics(
        self,
        inputs: Sequence[BoxTensor | None],
        gradient: BoxTensor,
        over: Box,
        statistics: GatheredStatistics,
        beyond: Sequence[PieceGradient] = (),
    ) -> Tensor:
        assert inputs[0] is not None
        assert statistics.moments is not None
        inside = over.intersect(inputs[0].box) if beyond else over
        of_weight, of_bias = self._sums(inputs[0], gradient, inside, statistics.moments)
        for piece, piece_gradient in beyond:
            more = self._sums(piece, BoxTensor(piece.box, piece_gradient), piece.box, statistics.moments)
            of_weight, of_bias = of_weight + more[0], of_bias + more[1]
        statistics.local_sums = over, of_weight, of_bias
        return self._row(of_weight, of_bias)

    def _sums(self, data: BoxTensor, gradient: BoxTensor, over: Box, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return for each feature Σ dy·x̂ and Σ dy over a box."""
        if over.is_empty:
            return torch.zeros_like(moments.mean), torch.zeros_like(moments.mean)
        weight = None if moments.mean.device.type == "cpu" else torch.ones_like(moments.mean)  # CUDA's needs one
        _, of_weight, of_bias = _aten.native_batch_norm_backward.default(
            self._features(gradient.view(over)), self._features(data.view(over)), weight, moments.mean,
            moments.variance, moments.mean, moments.inverse(self.epsilon), True, self.epsilon, [False, True, True],
        )  # fmt: skip
        return of_weight, of_bias

    def _row(self, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        """Return the sums as they travel."""
        return torch.cat([of_weight, of_bias])

    def _shares(self, total: Tensor, moments: Moments) -> Sequence[Tensor]:
        """Return for each feature Σ w·dy·x̂ and Σ w·dy over all tiles, times -1/(n·σ). The weight is in the sums of
        groups already, and in w/σ for others."""
        return (total.view(2, -1) * (self._scale(moments) * (-1.0 / moments.count))).unbind(0)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        inputs, gradient, out, statistics, total, corrected = (
            call.inputs,
            call.gradient,
            call.out,
            call.statistics,
            call.total,
            call.corrected,
        )
        if not call.wanted[0]:
            return [None]
        assert inputs[0] is not None
        assert statistics is not None
        assert statistics.moments is not None
        assert total is not None
        moments = statistics.moments
        inverse, scale = moments.inverse(self.epsilon), self._scale(moments)
        of_weight, of_bias = self._shares(total, moments)
        slope = of_weight * inverse
        offset = torch.addcmul(of_bias, slope, moments.mean, value=-1)
        leading = self._leading(gradient)
        inside = out if corrected is None else out.intersect(corrected)
        if inside == out:
            data = inputs[0].view(out)
            if call.may_overwrite and not self.moments_of_samples and is_dense(gradient):
                self._affine_in_place(gradient, scale, offset)
                return [BoxTensor(out, gradient.addcmul_(data, slope.view(leading)))]
            return [BoxTensor(out, self._affine(data, slope, offset).addcmul_(gradient, scale.view(leading)))]
        input_gradient = gradient * scale.view(leading)
        if not inside.is_empty:
            BoxTensor(out, input_gradient).view(inside).add_(self._affine(inputs[0].view(inside), slope, offset))
        return [BoxTensor(out, input_gradient)]

    def rim_gradient(self, gradient: Tensor, statistics: GatheredStatistics) -> Tensor:
        """Return the input's gradient where nothing is corrected: in places that belong to other tiles."""
        assert statistics.moments is not None
        leading = self._leading(gradient)
        return gradient * self._scale(statistics.moments).view(leading)

    def _scale(self, moments: Moments) -> Tensor:
        """Return w/σ for each feature."""
        weight = None if self.weight is None else self._per_feature(self.weight, moments, 1.0)
        return moments.scale(weight, self.epsilon)

    def _affine(self, data: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """Return data · slope + offset for each feature: PyTorch's fastest kernel for that is batch norm's own."""
        made = torch.batch_norm(self._features(data), slope, offset, *self._neutral(slope), False, 0.0, 0.0, False)
        return made.view(data.shape) if self.moments_of_samples else made

    def _affine_in_place(self, data: Tensor, slope: Tensor, offset: Tensor) -> None:
        """Write data · slope + offset over the data's own memory; every element is read before it is written."""
        self._write_normalized(data, slope, offset, *self._neutral(slope), 0.0, data)

    def _write_normalized(
        self,
        data: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        into: Tensor,
    ) -> None:
        """Normalise by given moments, into given memory that lies as the data does."""
        if self._unused is None:
            self._unused = data.new_empty(0), data.new_empty(0)
        first, second = self._unused
        _aten.native_batch_norm.out(
            data, weight, bias, mean, variance, False, 0.0, epsilon, out=into, save_mean=first, save_invstd=second
        )

    def _neutral(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return moments that change nothing: zeros and ones."""
        if self._zeros_and_ones is None or self._zeros_and_ones[0].shape != like.shape:
            self._zeros_and_ones = torch.zeros_like(like), torch.ones_like(like)
        return self._zeros_and_ones

    def weight_gradients(self, call: WeightGradientCall) -> None:
        out, statistics = call.out, call.statistics
        if not self.trainable:
            return
        assert statistics is not None
        assert statistics.moments is not None
        if statistics.local_sums is None or statistics.local_sums[0] != out:
            statistics.local_sums = (
                out,
                *self._sums(call.inputs[0], BoxTensor(out, call.gradient), out, statistics.moments),
            )
        for parameter, sums in zip((self.weight, self.bias), statistics.local_sums[1:]):
            if parameter is not None and parameter.requires_grad:
                is_one = sums.numel() == self.channels
                add_gradient(parameter, sums if is_one else sums.view(-1, self.channels).sum(0))
        statistics.local_sums = None  # given away


class BatchNorm(Normalization):
    """Batch normalization: by the moments of all tiles in training, by the running ones otherwise."""

    moments_of_samples = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, _, _, mean, variance, self.by_batch, momentum, _, _ = self.node.arguments
        self.running_mean, self.running_variance = self._weight(mean), self._weight(variance)
        counter = self._weight(momentum)
        self.momentum = float(momentum) if counter is None else counter

    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        if owned.is_empty:
            return inputs[0].tensor.new_zeros(1 + 2 * self.channels)
        return own_moments(inputs[0].view(owned))

    def combine(self, rows: Sequence[Tensor], shares: Sequence[int]) -> GatheredStatistics:
        """Return the moments of all tiles; the running statistics follow them."""
        moments = merged(list(rows))
        if self.running_mean is not None and self.running_variance is not None:
            follow(self.running_mean, self.running_variance, moments, momentum_of(self.momentum))
        return GatheredStatistics(moments=moments)

    def needs_sums(self, context: Context) -> bool:
        """Return whether the operator normalises by the batch at hand."""
        return bool(self.by_batch) and (context.training or self.running_mean is None)

    def forward(self, call: ForwardCall) -> Tensor:
        statistics = call.statistics
        if statistics is not None and statistics.moments is not None:
            moments = statistics.moments
            mean, variance = moments.mean, moments.variance
        else:
            assert self.running_mean is not None
            assert self.running_variance is not None
            mean, variance = self.running_mean, self.running_variance
        return self._normalized(call.inputs[0].view(call.out), self.weight, self.bias, mean, variance, call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        if self.by_batch:
            return super().input_gradients(call)
        if not call.wanted[0]:
            return [None]
        moments = self._running()  # captured in evaluation mode: a fixed factor for each channel
        factor = moments.inverse(self.epsilon) * self._per_feature(self.weight, moments, 1.0)
        return [BoxTensor(call.out, call.gradient * factor.view(1, -1, *self.places))]

    def weight_gradients(self, call: WeightGradientCall) -> None:
        if call.statistics is None:
            call = msgspec.structs.replace(call, statistics=GatheredStatistics(moments=self._running()))
        super().weight_gradients(call)

    def _running(self) -> Moments:
        assert self.running_mean is not None
        assert self.running_variance is not None
        return Moments(1.0, self.running_mean, self.running_variance)


class GroupNorm(Normalization):
    """Group normalization: every sample's groups of channels have moments of their own, over the whole map."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups = self._group_count()

    def _group_count(self) -> int:
        return int(self.node.arguments[1])

    def _arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        arguments = (*arguments, *(None for _ in range(3)))
        return arguments[2], arguments[3], 1e-5 if arguments[4] is None else arguments[4]

    def local_statistics(self, inputs: Sequence[BoxTensor], owned: Box) -> Tensor:
        """Return means and variances of what is owned, for each sample and group."""
        samples = owned.shape[0]
        if owned.is_empty:
            return inputs[0].tensor.new_zeros(2 * samples * self.groups)
        data = inputs[0].view(owned).reshape(1, samples * self.groups, -1)
        return own_moments(data)[1:]

    def combine(self, rows: Sequence[Tensor], shares: Sequence[int]) -> GatheredStatistics:
        together = self.channels // self.groups
        counted = [
            torch.cat([row.new_full((1,), share * together), row]) for row, share in zip(rows, shares, strict=True)
        ]
        group_moments = merged(counted)
        return GatheredStatistics(
            moments=Moments(
                group_moments.count,
                group_moments.mean.repeat_interleave(together),
                group_moments.variance.repeat_interleave(together),
            )
        )

    def _row(self, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        weight = 1.0 if self.weight is None else self.weight
        parts = (part.view(-1, self.channels) * weight for part in (of_weight, of_bias))
        return torch.cat([part.view(-1, self.channels // self.groups).sum(1) for part in parts])

    def _shares(self, total: Tensor, moments: Moments) -> Sequence[Tensor]:
        sums = total.view(2, -1).repeat_interleave(self.channels // self.groups, dim=1)
        return (sums * (moments.inverse(self.epsilon) * (-1.0 / moments.count))).unbind(0)


class InstanceNorm(GroupNorm):
    """Instance normalization: every channel is a group of its own."""

    def _group_count(self) -> int:
        return self.channels

    def _arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        return arguments[1], arguments[2], arguments[7]

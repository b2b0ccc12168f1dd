"""Operators of a tiled stage that need sums over all tiles: normalisations and global pooling.

    own_row ──every tile's row──▶ merged ──state──▶ forward
    own_backward_row ──rows added up──▶ input_gradients

Every normalisation is x · scale + offset for each feature: a channel (batch norm), or a channel of a sample (group and
instance norm, whose samples and channels are one axis here). With μ, σ² over all tiles, n numbers, and dy the gradient:

    dx = w/σ · dy  -  (Σ w·dy  +  x̂ · Σ w·dy·x̂) / (n·σ),   x̂ = (x - μ)/σ

The second part, the correction, is a function of x alone, so it can be added where the plan wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manyhands.executor.statistics import Moments, follow, merged, own_moments
from manyhands.executor.tile_base import Held, Notes, TileOperator, add_gradient, are_alike, blank, is_dense, placed
from manyhands.facts.boxes import Box
from manyhands.graph.graph import Weight
from manyhands.graph.piece import Context

_aten = torch.ops.aten


@dataclass
class State:
    """What the rows of all tiles say, for one micro-batch."""

    result: Tensor | None = None
    """Of a pool: its output."""
    moments: Moments | None = None
    """Of a normalisation: for each feature, over all tiles."""
    own_sums: tuple[Box, Tensor, Tensor] | None = None
    """The box that backward's own sums are over, and for each feature Σ dy·x̂ and Σ dy: the weights' gradients too."""


Pair = tuple[Held, Tensor]
"""A piece of a map, and the gradient of what was made of it."""


class SumsOperator(TileOperator):
    """An operator with sums over all tiles, forward and backward."""

    def own_row(self, inputs: Sequence[Held], owned: Box) -> Tensor:
        """Forward: the sums over what this tile owns of the input, to send; zeros of an empty box."""
        raise AssertionError("an operator with sums must say which")

    def merged(self, rows: Sequence[Tensor], shares: Sequence[int]) -> State:
        """From everybody's rows, in the order of the devices; `shares`: how many places of a plane each owns."""
        raise AssertionError("an operator with sums must say what they make")

    def forward(
        self,
        inputs: Sequence[Held],
        out: Box,
        context: Context,
        into: Tensor | None = None,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
    ) -> Tensor:
        """`out` of the output, by the sums of all tiles."""
        raise AssertionError("an operator with sums must use them")

    def own_backward_row(
        self, inputs: Sequence[Held | None], gradient: Held, over: Box, state: State, beyond: Sequence[Pair] = ()
    ) -> Tensor:
        """Backward: this tile's sums over the box `over`, to send. `beyond`: where the input is held in pieces, the
        others of it, with their gradients."""
        raise AssertionError("an operator with sums must say which")

    def input_gradients(
        self,
        inputs: Sequence[Held | None],
        output: Held | None,
        gradient: Tensor,
        out: Box,
        wanted: Sequence[bool],
        context: Context,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
        total: Tensor | None = None,
        corrected: Box | None = None,
    ) -> list[Held | None]:
        """`total`: everybody's backward rows, added up.

        A normalisation adds its correction inside `corrected` only; a pool gives the gradient over `corrected`, a box
        of its input.
        """
        raise AssertionError("an operator with sums must use them")

    def weight_gradients(
        self, inputs: Sequence[Held], gradient: Tensor, out: Box, context: Context, *, notes: Notes | None = None,
        state: State | None = None,
    ) -> None:  # fmt: skip
        """Nothing, but for normalisations."""


class GlobalPool(SumsOperator):
    """The mean or the sum of every whole map: the same on all tiles."""

    def own_row(self, inputs: Sequence[Held], owned: Box) -> Tensor:
        if owned.is_empty:
            samples, channels = owned.shape[:2]  # of the input there may be nothing at all
            return inputs[0].tensor.new_zeros(samples * channels)
        return inputs[0].view(owned).sum((2, 3)).flatten()

    def merged(self, rows: Sequence[Tensor], shares: Sequence[int]) -> State:
        total = torch.stack(list(rows)).sum(0).mul_(self._factor)
        samples = total.numel() // self.output.elements
        return State(result=total.view(self.output.shape_for(samples)))

    def forward(
        self,
        inputs: Sequence[Held],
        out: Box,
        context: Context,
        into: Tensor | None = None,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
    ) -> Tensor:
        assert state is not None
        assert state.result is not None, f"{self.node.name} needs the sums of all tiles"
        return placed(state.result, into)

    def own_backward_row(
        self, inputs: Sequence[Held | None], gradient: Held, over: Box, state: State, beyond: Sequence[Pair] = ()
    ) -> Tensor:
        return gradient.tensor.reshape(-1)

    def input_gradients(
        self,
        inputs: Sequence[Held | None],
        output: Held | None,
        gradient: Tensor,
        out: Box,
        wanted: Sequence[bool],
        context: Context,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
        total: Tensor | None = None,
        corrected: Box | None = None,
    ) -> list[Held | None]:
        assert total is not None
        assert corrected is not None, f"{self.node.name} must be told where its gradient is wanted"
        if not wanted[0] or corrected.is_empty:
            return [None]
        shares = (total * self._factor).view(*corrected.shape[:2], 1, 1)
        return [Held(corrected, shares.expand(corrected.shape))]

    @property
    def _factor(self) -> float:
        rows, columns = self.sources[0].shape[2:]
        return 1.0 if "sum" in self.node.target else 1.0 / (rows * columns)


class FromShape(SumsOperator):
    """A tensor of a shape of its own: the map only says where it is made, and of which type. No sums at all."""

    def own_row(self, inputs: Sequence[Held], owned: Box) -> Tensor:
        return inputs[0].tensor.new_empty(0)

    def merged(self, rows: Sequence[Tensor], shares: Sequence[int]) -> State:
        return State()

    def forward(
        self,
        inputs: Sequence[Held],
        out: Box,
        context: Context,
        into: Tensor | None = None,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
    ) -> Tensor:
        like = blank(Box.of((0, 1)), getattr(torch, self.sources[0].dtype), self.weights.device)
        context = replace(context, samples=self.samples(out))
        return placed(self._piece({self.op.reads[0].tensor: like}, context)[self.output.name], into)


class Normalisation(SumsOperator):
    """What all normalisations share."""

    moments_of_samples = True
    """Whether samples have moments of their own, so that features are samples times channels."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        given = self.node.arguments
        weight, bias, epsilon = self._arguments(given)
        self.weight, self.bias = self._weight(weight), self._weight(bias)
        self.epsilon = float(epsilon)
        self.channels = self.sources[0].shape[1]
        self._zeros_and_ones: tuple[Tensor, Tensor] | None = None
        self._unused: tuple[Tensor, Tensor] | None = None
        """What PyTorch wants to write a batch's moments to, of which there are none."""

    def _arguments(self, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Weight, bias and epsilon among the arguments."""
        return given[1], given[2], given[7]

    def _weight(self, argument: Any) -> Tensor | None:
        return self.weights.tensors[argument.name] if isinstance(argument, Weight) else None

    def _features(self, tensor: Tensor) -> Tensor:
        """A tensor with its features as the second axis. One sample's is itself: a view of it would lie in memory in an
        order that PyTorch's backward kernel beside a tensor in another order takes for a third, and adds up wrongly."""
        samples, channels, rows, columns = tensor.shape
        if not self.moments_of_samples or samples == 1:
            return tensor
        return tensor.reshape(1, samples * channels, rows, columns)

    def _per_feature(self, parameter: Tensor | None, moments: Moments, default: float) -> Tensor:
        """A weight or bias for each feature."""
        if parameter is None:
            return torch.full_like(moments.mean, default)
        times = moments.mean.numel() // self.channels
        return parameter.detach() if times == 1 else parameter.detach().repeat(times)

    def forward(
        self,
        inputs: Sequence[Held],
        out: Box,
        context: Context,
        into: Tensor | None = None,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
    ) -> Tensor:
        assert state is not None
        assert state.moments is not None, f"{self.node.name} needs the moments of all tiles"
        moments = state.moments
        weight, bias = (self._per_feature(p, moments, d) for p, d in ((self.weight, 1.0), (self.bias, 0.0)))
        return self._normalised(inputs[0].view(out), weight, bias, moments.mean, moments.variance, into)

    def _normalised(
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
            self._write_normalised(data, weight, bias, mean, variance, self.epsilon, into)
            return into
        scale = (variance + self.epsilon).rsqrt_()
        scale = scale if weight is None else scale.mul_(weight)
        offset = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        leading = (data.shape[0] if self.moments_of_samples else 1, self.channels, 1, 1)
        return torch.addcmul(offset.view(leading), data, scale.view(leading), out=into)

    def own_backward_row(
        self, inputs: Sequence[Held | None], gradient: Held, over: Box, state: State, beyond: Sequence[Pair] = ()
    ) -> Tensor:
        assert inputs[0] is not None
        assert state.moments is not None
        inside = over.intersect(inputs[0].box) if beyond else over
        of_weight, of_bias = self._sums(inputs[0], gradient, inside, state.moments)
        for piece, slopes in beyond:
            more = self._sums(piece, Held(piece.box, slopes), piece.box, state.moments)
            of_weight, of_bias = of_weight + more[0], of_bias + more[1]
        state.own_sums = over, of_weight, of_bias
        return self._row(of_weight, of_bias)

    def _sums(self, data: Held, gradient: Held, over: Box, moments: Moments) -> tuple[Tensor, Tensor]:
        """For each feature, Σ dy·x̂ and Σ dy over a box."""
        if over.is_empty:
            return torch.zeros_like(moments.mean), torch.zeros_like(moments.mean)
        weight = None if moments.mean.device.type == "cpu" else torch.ones_like(moments.mean)  # CUDA's needs one
        _, of_weight, of_bias = _aten.native_batch_norm_backward.default(
            self._features(gradient.view(over)), self._features(data.view(over)), weight, moments.mean,
            moments.variance, moments.mean, moments.inverse(self.epsilon), True, self.epsilon, [False, True, True],
        )  # fmt: skip
        return of_weight, of_bias

    def _row(self, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        """The sums as they travel."""
        return torch.cat([of_weight, of_bias])

    def _shares(self, total: Tensor, moments: Moments) -> Sequence[Tensor]:
        """For each feature, Σ w·dy·x̂ and Σ w·dy over all tiles, times -1/(n·σ). The weight is in the sums of groups
        already, and in w/σ for others."""
        return (total.view(2, -1) * (self._scale(moments) * (-1.0 / moments.count))).unbind(0)

    def input_gradients(
        self,
        inputs: Sequence[Held | None],
        output: Held | None,
        gradient: Tensor,
        out: Box,
        wanted: Sequence[bool],
        context: Context,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
        total: Tensor | None = None,
        corrected: Box | None = None,
    ) -> list[Held | None]:
        if not wanted[0]:
            return [None]
        assert inputs[0] is not None
        assert state is not None
        assert state.moments is not None
        assert total is not None
        moments = state.moments
        inverse, scale = moments.inverse(self.epsilon), self._scale(moments)
        of_weight, of_bias = self._shares(total, moments)
        slope = of_weight * inverse
        offset = torch.addcmul(of_bias, slope, moments.mean, value=-1)
        leading = (gradient.shape[0] if self.moments_of_samples else 1, self.channels, 1, 1)
        inside = out if corrected is None else out.intersect(corrected)
        if inside == out:
            data = inputs[0].view(out)
            if may_overwrite and not self.moments_of_samples and is_dense(gradient):
                self._affine_in_place(gradient, scale, offset)
                return [Held(out, gradient.addcmul_(data, slope.view(leading)))]
            return [Held(out, self._affine(data, slope, offset).addcmul_(gradient, scale.view(leading)))]
        found = gradient * scale.view(leading)
        if not inside.is_empty:
            Held(out, found).view(inside).add_(self._affine(inputs[0].view(inside), slope, offset))
        return [Held(out, found)]

    def rim_gradient(self, gradient: Tensor, state: State) -> Tensor:
        """The input's gradient where nothing is corrected: in places that belong to other tiles."""
        assert state.moments is not None
        leading = (gradient.shape[0] if self.moments_of_samples else 1, self.channels, 1, 1)
        return gradient * self._scale(state.moments).view(leading)

    def _scale(self, moments: Moments) -> Tensor:
        """w/σ for each feature."""
        weight = None if self.weight is None else self._per_feature(self.weight, moments, 1.0)
        return moments.scale(weight, self.epsilon)

    def _affine(self, data: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """data · slope + offset for each feature: PyTorch's fastest kernel for that is batch norm's own."""
        made = torch.batch_norm(self._features(data), slope, offset, *self._neutral(slope), False, 0.0, 0.0, False)
        return made.view(data.shape) if self.moments_of_samples else made

    def _affine_in_place(self, data: Tensor, slope: Tensor, offset: Tensor) -> None:
        """The same, over its own memory; every element is read before it is written."""
        self._write_normalised(data, slope, offset, *self._neutral(slope), 0.0, data)

    def _write_normalised(
        self,
        data: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        epsilon: float,
        into: Tensor,
    ) -> None:
        """By given moments, into given memory that lies as the data does."""
        if self._unused is None:
            self._unused = data.new_empty(0), data.new_empty(0)
        first, second = self._unused
        _aten.native_batch_norm.out(
            data, weight, bias, mean, variance, False, 0.0, epsilon, out=into, save_mean=first, save_invstd=second
        )

    def _neutral(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Moments that change nothing: zeros and ones."""
        if self._zeros_and_ones is None or self._zeros_and_ones[0].shape != like.shape:
            self._zeros_and_ones = torch.zeros_like(like), torch.ones_like(like)
        return self._zeros_and_ones

    def weight_gradients(
        self, inputs: Sequence[Held], gradient: Tensor, out: Box, context: Context, *, notes: Notes | None = None,
        state: State | None = None,
    ) -> None:  # fmt: skip
        if not self.trainable:
            return
        assert state is not None
        assert state.moments is not None
        if state.own_sums is None or state.own_sums[0] != out:
            state.own_sums = out, *self._sums(inputs[0], Held(out, gradient), out, state.moments)
        for parameter, sums in zip((self.weight, self.bias), state.own_sums[1:]):
            if parameter is not None and parameter.requires_grad:
                is_one = sums.numel() == self.channels
                add_gradient(parameter, sums if is_one else sums.view(-1, self.channels).sum(0))
        state.own_sums = None  # given away


class BatchNorm(Normalisation):
    """Batch normalisation: by the moments of all tiles in training, by the running ones otherwise."""

    moments_of_samples = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _, _, _, mean, variance, self.by_batch, momentum, _, _ = self.node.arguments
        self.running_mean, self.running_variance = self._weight(mean), self._weight(variance)
        self.momentum = float(momentum)

    def own_row(self, inputs: Sequence[Held], owned: Box) -> Tensor:
        if owned.is_empty:
            return inputs[0].tensor.new_zeros(1 + 2 * self.channels)
        return own_moments(inputs[0].view(owned))

    def merged(self, rows: Sequence[Tensor], shares: Sequence[int]) -> State:
        """The moments of all; the running statistics follow them."""
        moments = merged(list(rows))
        if self.running_mean is not None and self.running_variance is not None:
            follow(self.running_mean, self.running_variance, moments, self.momentum)
        return State(moments=moments)

    def forward(
        self,
        inputs: Sequence[Held],
        out: Box,
        context: Context,
        into: Tensor | None = None,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
    ) -> Tensor:
        if state is not None and state.moments is not None:
            moments = state.moments
            mean, variance = moments.mean, moments.variance
        else:
            assert self.running_mean is not None
            assert self.running_variance is not None
            mean, variance = self.running_mean, self.running_variance
        return self._normalised(inputs[0].view(out), self.weight, self.bias, mean, variance, into)

    def input_gradients(
        self,
        inputs: Sequence[Held | None],
        output: Held | None,
        gradient: Tensor,
        out: Box,
        wanted: Sequence[bool],
        context: Context,
        *,
        notes: Notes | None = None,
        may_overwrite: bool = False,
        state: State | None = None,
        total: Tensor | None = None,
        corrected: Box | None = None,
    ) -> list[Held | None]:
        if self.by_batch:
            return super().input_gradients(
                inputs,
                output,
                gradient,
                out,
                wanted,
                context,
                notes=notes,
                may_overwrite=may_overwrite,
                state=state,
                total=total,
                corrected=corrected,
            )
        moments = self._running()  # captured in evaluation mode: a fixed factor for each channel
        factor = moments.inverse(self.epsilon) * self._per_feature(self.weight, moments, 1.0)
        return [Held(out, gradient * factor.view(1, -1, 1, 1)) if wanted[0] else None]

    def weight_gradients(
        self, inputs: Sequence[Held], gradient: Tensor, out: Box, context: Context, *, notes: Notes | None = None,
        state: State | None = None,
    ) -> None:  # fmt: skip
        state = state or State(moments=self._running())
        super().weight_gradients(inputs, gradient, out, context, notes=notes, state=state)

    def _running(self) -> Moments:
        assert self.running_mean is not None
        assert self.running_variance is not None
        return Moments(1.0, self.running_mean, self.running_variance)


class GroupNorm(Normalisation):
    """Group normalisation: every sample's groups of channels have moments of their own, over the whole map."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups = self._group_count()

    def _group_count(self) -> int:
        return int(self.node.arguments[1])

    def _arguments(self, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        given = (*given, *(None for _ in range(3)))
        return given[2], given[3], 1e-5 if given[4] is None else given[4]

    def own_row(self, inputs: Sequence[Held], owned: Box) -> Tensor:
        """Means and variances of what is owned, for each sample and group."""
        samples = owned.shape[0]
        if owned.is_empty:
            return inputs[0].tensor.new_zeros(2 * samples * self.groups)
        data = inputs[0].view(owned).reshape(1, samples * self.groups, -1)
        return own_moments(data)[1:]

    def merged(self, rows: Sequence[Tensor], shares: Sequence[int]) -> State:
        together = self.channels // self.groups
        counted = [
            torch.cat([row.new_full((1,), share * together), row]) for row, share in zip(rows, shares, strict=True)
        ]
        found = merged(counted)
        return State(
            moments=Moments(
                found.count, found.mean.repeat_interleave(together), found.variance.repeat_interleave(together)
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
    """Instance normalisation: every channel is a group of its own."""

    def _group_count(self) -> int:
        return self.channels

    def _arguments(self, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        return given[1], given[2], given[7]

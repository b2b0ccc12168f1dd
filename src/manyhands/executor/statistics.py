"""Batch normalisation over all devices of a stage: exact statistics from each one's count, mean and variance.

Forward (Chan et al. 1979, over devices i):   n = Σ n_i,  μ = Σ n_i μ_i / n,  σ² = Σ n_i (σ_i² + (μ_i - μ)²) / n
Backward:  dx = w/σ · (dy - Σ dy / n - x̂ · Σ(dy · x̂) / n), both sums over all devices; PyTorch's evaluation kernel
gives w/σ · dy and this device's two sums in one pass, so only the two correction terms are added afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from manyhands.graph.cumulative_norms import momentum_of
from manyhands.graph.nodes import Node, Value, Weight
from manyhands.graph.weights import Weights

_aten = torch.ops.aten


@dataclass
class Moments:
    """Statistics of the whole batch: per channel mean and (biased) variance, and how many numbers each is over."""

    count: float
    mean: torch.Tensor
    variance: torch.Tensor
    _inverse: torch.Tensor | None = None
    _scale: torch.Tensor | None = None

    def inverse(self, epsilon: float) -> torch.Tensor:
        """Return 1/σ, computed once: it is of one normalisation, so always with the same epsilon."""
        if self._inverse is None:
            self._inverse = (self.variance + epsilon).rsqrt_()
        return self._inverse

    def scale(self, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
        """Return w/σ, computed once: always with the same weight too."""
        if self._scale is None:
            inverse = self.inverse(epsilon)
            self._scale = inverse if weight is None else inverse * weight
        return self._scale


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type in which its sums over devices are formed: float32 in place of a smaller one."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def own_moments(data: torch.Tensor) -> torch.Tensor:
    """Return count, means and variances of what is here, as one row to send."""
    data = wide(data)
    count = data.numel() // data.shape[1] if data.shape[1] else 0
    mean, variance = _aten.batch_norm_update_stats.default(data, None, None, 0.0)
    return torch.cat([mean.new_full((1,), float(count)), mean, variance])


def merged(rows: list[torch.Tensor]) -> Moments:
    """Return the moments of all devices' data, from their rows in the order of the devices."""
    channels = (rows[0].numel() - 1) // 2
    if len(rows) == 2:
        return _merged_two(rows[0], rows[1], channels)
    counts, means, variances = torch.stack(rows).split_with_sizes([1, channels, channels], 1)
    total = counts.sum()
    weights = counts / total
    mean = (weights * means).sum(0)
    variance = (weights * (variances + (means - mean) ** 2)).sum(0)
    return Moments(float(total), mean, variance)


def _merged_two(first: torch.Tensor, second: torch.Tensor, channels: int) -> Moments:
    """Return the moments of two rows, in few calls: the variance of all is the mean one, plus what the distance of the
    means adds."""
    counts = first[0].item(), second[0].item()
    total = sum(counts)
    share = counts[1] / total
    distance = (second - first).narrow(0, 1, channels)
    _, mean, variance = torch.lerp(first, second, share).split_with_sizes([1, channels, channels])
    return Moments(total, mean, variance.addcmul_(distance, distance, value=share * (1.0 - share)))


def follow(mean: torch.Tensor, variance: torch.Tensor, moments: Moments, momentum: float) -> None:
    """Move running statistics towards those of a batch; the variance towards its unbiased estimate."""
    unbiased = moments.count / max(1.0, moments.count - 1.0)
    mean.mul_(1 - momentum).add_(moments.mean, alpha=momentum)
    variance.mul_(1 - momentum).add_(moments.variance, alpha=momentum * unbiased)


class SharedBatchNorm:
    """One batch norm of a graph, run with given moments in training."""

    def __init__(self, node: Node, weights: Weights) -> None:
        data, weight, bias, running_mean, running_variance, _, momentum, epsilon, _ = node.arguments
        assert isinstance(data, Value)
        self.input, self.output = data.name, node.outputs[0].name
        self.momentum = weights.tensors[momentum.name] if isinstance(momentum, Weight) else float(momentum)
        self.epsilon = float(epsilon)
        self.weight, self.bias = _weight(weight, weights), _weight(bias, weights)
        self.running_mean, self.running_variance = _weight(running_mean, weights), _weight(running_variance, weights)

    @torch.no_grad()
    def forward(self, data: torch.Tensor, moments: Moments) -> torch.Tensor:
        """Normalise by the moments, and let the running statistics follow them."""
        if self.running_mean is not None and self.running_variance is not None:
            follow(self.running_mean, self.running_variance, moments, momentum_of(self.momentum))
        return self.normalised(data, moments)

    def normalised(self, data: torch.Tensor, moments: Moments) -> torch.Tensor:
        made: torch.Tensor = torch.batch_norm(
            data, self.weight, self.bias, moments.mean, moments.variance, False, 0.0, self.epsilon, False
        )
        return made

    @torch.no_grad()
    def own_sums(
        self, data: torch.Tensor, gradient: torch.Tensor, moments: Moments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return w/σ · dy, and this device's Σ dy · x̂ and Σ dy as one row to send."""
        data, gradient = wide(data), wide(gradient)
        inverse = moments.inverse(self.epsilon)
        weight = self.weight if self.weight is not None else torch.ones_like(moments.mean)
        scaled, of_weight, of_bias = _aten.native_batch_norm_backward.default(
            gradient, data, weight, moments.mean, moments.variance, moments.mean, inverse, False, self.epsilon,
            [True, True, True],
        )  # fmt: skip
        return scaled, torch.cat([of_weight, of_bias])

    @torch.no_grad()
    def backward(
        self, data: torch.Tensor, scaled: torch.Tensor, sums: torch.Tensor, rows: list[torch.Tensor], moments: Moments
    ) -> torch.Tensor:
        """Return the gradient of the input; those of the weights are added to theirs."""
        channels = sums.numel() // 2
        for parameter, part in ((self.weight, sums[:channels]), (self.bias, sums[channels:])):
            if parameter is not None and parameter.requires_grad:
                parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)
        total = torch.stack(rows).sum(0)
        inverse = moments.inverse(self.epsilon)
        factor = inverse if self.weight is None else inverse * self.weight
        slope = -factor * inverse * total[:channels] / moments.count
        offset = -factor * total[channels:] / moments.count - slope * moments.mean
        shape = [1, -1, *(1 for _ in data.shape[2:])]
        made = scaled.addcmul_(wide(data), slope.view(shape)).add_(offset.view(shape))
        return made.to(data.dtype)


def _weight(argument: Any, weights: Weights) -> torch.Tensor | None:
    assert not isinstance(argument, Value), "a norm applies computed weights in operators of their own (rewriting.py)"
    return weights.tensors[argument.name] if isinstance(argument, Weight) else None

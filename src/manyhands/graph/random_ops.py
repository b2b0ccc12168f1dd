"""Random operators of a graph, drawn by counter (random.py) in training and at rest in evaluation.

At rest nothing is drawn: a random operator is its expectation. Dropouts do nothing, a coin of probability p is p,
`rand_like` is 0.5 and `randn_like` is 0. So a captured graph, which has only the training form of a module, evaluates
noise that is scaled back (stochastic depth: `noise.bernoulli_(p).div_(p)`) as the module does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.facts.boxes import Box
from manyhands.facts.network import TensorSpec
from manyhands.graph import gpu_draws, ops
from manyhands.graph.nodes import Argument, Node
from manyhands.graph.random import Draw, bits, keep_mask, keys_of, limit_of, normal, uniform

RandomCall = Callable[..., torch.Tensor]
_ALPHA = 1.7580993408473766  # SELU's negative saturation (Klambauer et al. 2017)


def _bits(
    node: Node, seed: int, step: int, first_sample: int, like: torch.Size, spec: TensorSpec, device: torch.device,
    stream: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return bits for a tensor of shape `like`, whose whole form is `spec`; its samples start at `first_sample`."""
    box = _box(spec, first_sample, like)
    return bits(Draw(seed, step, node.name, stream), box, spec.shape, spec.batch_axis, device)


def _box(spec: TensorSpec, first_sample: int, shape: torch.Size) -> Box:
    """Return the box of a tensor's samples in the mini-batch, the first of which is `first_sample`."""
    intervals = [(0, extent) for extent in shape]
    if spec.batch_axis is not None:
        start = first_sample * spec.rows_per_sample
        intervals[spec.batch_axis] = (start, start + shape[spec.batch_axis])
    return Box(tuple(intervals))


def dropped(
    node: Node, seed: int, step: int, box: Box, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what a dropout multiplies the elements in `box` by, and what it adds; `box` counts rows of the
    mini-batch."""
    p, spec = float(node.arguments[1]), node.outputs[0]
    if p >= 1:
        return torch.zeros((), dtype=dtype, device=device), None
    shape = spec.shape
    if "feature" in node.target:  # whole channels at once: one draw per sample and channel
        shape, box = (*shape[:2], *(1 for _ in shape[2:])), Box((*box.intervals[:2], *((0, 1) for _ in shape[2:])))
    mask = keep_mask(bits(Draw(seed, step, node.name), box, shape, spec.batch_axis, device), 1 - p, dtype)
    if "alpha" not in node.target:
        return mask.div_(1 - p), None
    a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    return mask * a, (mask - 1) * (_ALPHA * a) + _ALPHA * a * p


def _dropout(node: Node, seed: int, step: int, first_sample: int, x: torch.Tensor, p: float) -> torch.Tensor:
    spec = node.outputs[0]
    box = _box(spec, first_sample, x.shape)
    if x.is_cuda and node.target == "aten.dropout.default" and p < 1:
        at_once = _dropped_at_once(x, Draw(seed, step, node.name), box, spec, p)
        if at_once is not None:
            return at_once
    factor, offset = dropped(node, seed, step, box, x.dtype, x.device)
    return x * factor if offset is None else x * factor + offset


def _dropped_at_once(x: torch.Tensor, draw: Draw, box: Box, spec: TensorSpec, p: float) -> torch.Tensor | None:
    """Return a dropout of a tensor on a GPU, by one kernel; None where there is none for it."""
    factor = torch.ones((), dtype=x.dtype).div_(1 - p)  # rounded as `dropped` rounds it
    return gpu_draws.dropout(x, keys_of(draw), box, spec.shape, spec.batch_axis, limit_of(1 - p), float(factor))


def _bernoulli(
    node: Node, seed: int, step: int, first_sample: int, x: torch.Tensor, p: float | None = None
) -> torch.Tensor:
    drawn = _bits(node, seed, step, first_sample, x.shape, node.outputs[0], x.device)
    if node.target in _COINS:
        return keep_mask(drawn, 0.5 if p is None else float(p), x.dtype)
    return (uniform(drawn, torch.float64) < x).to(x.dtype)


def _rand_like(node: Node, seed: int, step: int, first_sample: int, x: torch.Tensor) -> torch.Tensor:
    return uniform(_bits(node, seed, step, first_sample, x.shape, node.outputs[0], x.device), _dtype(node))


def _randn_like(node: Node, seed: int, step: int, first_sample: int, x: torch.Tensor) -> torch.Tensor:
    first, second = (
        _bits(node, seed, step, first_sample, x.shape, node.outputs[0], x.device, stream) for stream in (0, 1)
    )
    return normal(first, second, _dtype(node))


def _dtype(node: Node) -> torch.dtype:
    return getattr(torch, node.outputs[0].dtype)  # type: ignore[no-any-return]


def _attention(
    node: Node, seed: int, step: int, first_sample: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None = None, p: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return attention with dropout, written out so that the mask can be drawn by counter."""
    scale = node.options.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    if node.options.get("enable_gqa"):  # several heads of the query share one of key and value
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:  # a row with everything masked is 0, as torch's own attention makes it, not nan
        weights = torch.ops.aten._safe_softmax.default(scores, -1)
    spec = node.outputs[0]
    whole = TensorSpec(spec.name, (*spec.shape[:-1], scores.shape[-1]), spec.dtype, spec.batch_axis)
    if weights.is_cuda:
        box = _box(whole, first_sample, weights.shape)
        at_once = _dropped_at_once(weights, Draw(seed, step, node.name), box, whole, p)
        if at_once is not None:
            return at_once @ value
    drawn = _bits(node, seed, step, first_sample, weights.shape, whole, query.device)
    return (weights * keep_mask(drawn, 1 - p, weights.dtype).div_(1 - p)) @ value


def _identity(x: torch.Tensor, **_: Any) -> torch.Tensor:
    return x


def _always(node: Node, number: float) -> Callable[..., torch.Tensor]:
    def constant(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full_like(x, number, dtype=_dtype(node))

    return constant


@dataclass(frozen=True)
class RandomOperator:
    """The way one random target is drawn, and its value when nothing is drawn."""

    call: RandomCall
    takes: int
    """The number of leading arguments that the call takes."""
    probability: int | None = None
    """The place of the argument that is the probability of dropping; with probability 0 nothing is drawn."""
    expectation: float | None = None
    """The expectation where that does not depend on the input; a coin's is its second argument."""

    def draws(self, node: Node, training: bool) -> bool:
        if self.probability is not None:
            probability = node.arguments[self.probability] if len(node.arguments) > self.probability else 0.0
            if not probability:
                return False
            if self.takes == 2 and len(node.arguments) > 2 and node.arguments[2] is False:
                return False  # captured in evaluation mode: F.dropout(x, p, training=False)
        return training

    def arguments(self, node: Node) -> tuple[Argument, ...]:
        return node.arguments[: self.takes]

    def at_rest(self, node: Node) -> tuple[Callable[..., Any], tuple[Argument, ...]]:
        """Return the call where nothing is drawn, which gives the expectation, and its arguments."""
        if node.target == "aten.scaled_dot_product_attention.default":
            arguments = list(node.arguments)
            if len(arguments) > 4:
                arguments[4] = 0.0
            return ops.resolve(node.target), tuple(arguments)
        if self.expectation is not None:
            return _always(node, self.expectation), node.arguments[:1]
        if node.target in _COINS:
            return _always(node, _probability(node.arguments)), node.arguments[:1]
        return _identity, node.arguments[:1]


_COINS = frozenset({"aten.bernoulli_.float", "aten.bernoulli.p"})

RANDOM_CALLS: dict[str, RandomOperator] = {
    "aten.dropout.default": RandomOperator(_dropout, 2, probability=1),
    "aten.feature_dropout.default": RandomOperator(_dropout, 2, probability=1),
    "aten.alpha_dropout.default": RandomOperator(_dropout, 2, probability=1),
    "aten.bernoulli_.float": RandomOperator(_bernoulli, 2),
    "aten.bernoulli.default": RandomOperator(_bernoulli, 1),
    "aten.bernoulli.p": RandomOperator(_bernoulli, 2),
    "aten.rand_like.default": RandomOperator(_rand_like, 1, expectation=0.5),
    "aten.randn_like.default": RandomOperator(_randn_like, 1, expectation=0.0),
    "aten.scaled_dot_product_attention.default": RandomOperator(_attention, 6, probability=4),
}


def draw_like(node: Node, call: str, arguments: tuple[Any, ...]) -> torch.Tensor | None:
    """Return what `node` draws in step 0 of seed 0, where torch's own kernel of it makes `call` (a coin for every
    element of a dropout's mask, say); None if that is no call of this node."""
    spec = node.outputs[0]
    like = arguments[0] if isinstance(arguments[0], torch.Tensor) else torch.empty(arguments[0], dtype=_dtype(node))
    rank_fits = spec.batch_axis is None or spec.batch_axis < like.dim()
    if not rank_fits or call not in _DRAWN_BY.get(node.target, _COIN):
        return None
    shape = tuple(spec.shape[axis] if axis == spec.batch_axis else size for axis, size in enumerate(like.shape))
    whole = TensorSpec(spec.name, shape, spec.dtype, spec.batch_axis)
    first, second = (_bits(node, 0, 0, 0, like.shape, whole, like.device, stream) for stream in (0, 1))
    if node.target == "aten.bernoulli.p" and call != node.target:  # floor(p + number) gives the coin that is drawn
        p = float(node.arguments[1])
        return keep_mask(first, p, like.dtype) * (1 - p / 2)
    if call in ("aten.rand_like.default", "aten.rand.default"):
        return uniform(first, like.dtype)
    if call in ("aten.randn_like.default", "aten.randn.default"):
        return normal(first, second, like.dtype)
    if call == "aten.bernoulli.default":
        coins: torch.Tensor = (uniform(first, torch.float64) < like).to(like.dtype)
        return coins
    return keep_mask(first, _probability(arguments), like.dtype)


def _probability(arguments: tuple[Any, ...]) -> float:
    """Return the probability that a node draws with; torch leaves out its default."""
    return float(arguments[1]) if len(arguments) > 1 else 0.5


_COIN = frozenset({"aten.bernoulli_.float"})
"""The operator by which torch draws the mask of a dropout, inside an attention too."""
_DRAWN_BY = {
    "aten.bernoulli.default": frozenset({"aten.bernoulli.default"}),
    "aten.bernoulli.p": frozenset({"aten.bernoulli.p", "aten.rand.default", "aten.rand_like.default"}),
    "aten.rand_like.default": frozenset({"aten.rand_like.default", "aten.rand.default"}),
    "aten.randn_like.default": frozenset({"aten.randn_like.default", "aten.randn.default"}),
}

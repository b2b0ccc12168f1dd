"""The ways to run an operator on some of its channels (axis 1), and how its weights are cut for each.

"free"      as it stands, on whatever its read rules say a part of the output needs
"shaped"    the same, but its arguments name a shape: they become the part's
"grouped"   a convolution in groups: by whole groups, or inside of one
"shuffle"   channels dealt out among groups: on the parts of every group that make the part of the output
"dense"     every output channel reads all input channels: own outputs from all inputs, or partial sums from own inputs
""          on the whole tensor only
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.facts.network import ChannelWeight, TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.nodes import Node, Value, Weight, values_of, weights_of

Specs = Mapping[str, TensorSpec]
WeightSpecs = Mapping[str, WeightSpec]

_FREE = frozenset({
    "cat", "concat", "transpose", "swapaxes", "permute", "mean", "sum", "amax", "amin", "pixel_shuffle",
    "pixel_unshuffle", "dropout", "feature_dropout", "alpha_dropout",
})  # fmt: skip
_SHAPED = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})


def channels_of(node: Node, specs: Specs, weights: WeightSpecs) -> tuple[str, tuple[ChannelWeight, ...]]:
    """Return which of the kinds above an operator is, and for each weight the axes along which channels lie."""
    name = node.target.split(".")[1]
    if node.several or node.updates or not values_of(node) or len(node.outputs[0].shape) < 2:
        return "", ()
    tensors = [node.outputs[0], *(specs[name] for name in values_of(node))]
    if any(spec.batch_axis != 0 or spec.pairs_samples for spec in tensors):
        return "", ()
    if node.target in ops.CONVOLUTION:
        return _convolution(node)
    if name == "linear" and len(node.outputs[0].shape) == 2 and _has_own_weights(node):
        return "dense", _named(node, (0, 1), (0, None))
    if name == "batch_norm":
        return "free", tuple(ChannelWeight(name, 0, None) for name in weights_of(node) if weights[name].shape)
    if name == "channel_shuffle":
        return "shuffle", ()
    if name in _SHAPED and len(values_of(node)) == 1 and not weights_of(node):
        return "shaped", ()
    if node.target not in ops.POINTWISE | ops.POOLING | ops.RESAMPLING and name not in _FREE:
        return "", ()
    return "free", tuple(_spread(node, weights[name]) for name in weights_of(node))


def _has_own_weights(node: Node) -> bool:
    """Return whether an operator multiplies by a weight, not by what another operator made."""
    operands = node.arguments[1:3]
    return isinstance(node.arguments[0], Value) and all(
        argument is None or isinstance(argument, Weight) for argument in operands
    )


def _named(node: Node, *axes: tuple[int | None, int | None]) -> tuple[ChannelWeight, ...]:
    named_weights = [argument for argument in node.arguments[1:3] if isinstance(argument, Weight)]
    return tuple(ChannelWeight(weight.name, *places) for weight, places in zip(named_weights, axes))


def _convolution(node: Node) -> tuple[str, tuple[ChannelWeight, ...]]:
    """Return the kind and weights of a convolution: (out, in / groups, ...), transposed (in, out / groups, ...)."""
    if not _has_own_weights(node):
        return "", ()
    groups = node.arguments[6] if len(node.arguments) > 6 else 1
    is_dense, is_transposed = groups == 1, "transpose" in node.target
    axes = ((1, 0) if is_dense else (None, 0)) if is_transposed else ((0, 1) if is_dense else (0, None))
    return "dense" if is_dense else "grouped", _named(node, axes, (0, None))


def _spread(node: Node, weight: WeightSpec) -> ChannelWeight:
    """Return the axes of a weight that is broadcast: its channels lie where the output's do, if it has more than
    one."""
    rank = len(node.outputs[0].shape)
    axis = 0 if "prelu" in node.target else len(weight.shape) - rank + 1
    is_cut = 0 <= axis < len(weight.shape) and weight.shape[axis] > 1
    return ChannelWeight(weight.name, axis if is_cut else None, None)

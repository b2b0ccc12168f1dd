"""The way a tiled stage computes each operator, what its gradient reads, and which sums tiles exchange for it.

These are facts of an operator as if its inputs were maps: (sample, channel, row, column), split by rows and columns.
Maps of five axes, whose channels are in groups, are only put together and taken apart. On tensors that every tile has
whole, any operator will do.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.nodes import Node, Value, Weight, values_of, weights_of

Specs = Mapping[str, TensorSpec]
WeightSpecs = Mapping[str, WeightSpec]

_LOCAL = frozenset({
    "aten.conv2d.default", "aten.conv2d.padding", "aten.conv_transpose2d.input", "aten.max_pool2d.default",
    "aten.avg_pool2d.default", "aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default",
    "aten.upsample_bilinear2d.vec", "aten.upsample_bilinear2d.default", "aten.pixel_shuffle.default",
    "aten.pixel_unshuffle.default", "aten.channel_shuffle.default", "aten.dropout.default",
    "aten.feature_dropout.default", "aten.alpha_dropout.default",
})  # fmt: skip
# They move channels, if they leave rows and columns as they are.
_REGROUPING = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "swapaxes", "permute"})
# Their result is a tensor of another shape; the input only gives its device and type.
_SHAPED = frozenset(f"aten.new_{kind}.default" for kind in ("empty", "zeros", "ones", "full"))

_FROM_NOTHING = frozenset({
    "conv2d", "conv_transpose2d", "add", "sub", "rsub", "cat", "concat", "avg_pool2d", "adaptive_avg_pool2d",
    "upsample_nearest2d", "upsample_bilinear2d", "pad", "constant_pad_nd", "slice", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "mean", "sum", "neg", "clone", "contiguous", "alias", "detach", "to",
    "_to_copy", "type_as", "dropout", "feature_dropout", "alpha_dropout", "bernoulli", "bernoulli_", "new_empty",
    "new_zeros", "new_ones", "new_full",
}) | _REGROUPING  # fmt: skip
_FROM_OUTPUT = frozenset({"relu", "sigmoid", "tanh", "hardtanh", "relu6"})


def tiling_of(node: Node, specs: Specs, weights: WeightSpecs) -> str:
    """Return "local", "norm", "pool" or "" (Op.tiling)."""
    if node.several or node.updates or not values_of(node):
        return ""
    output, source = node.outputs[0], specs[values_of(node)[0]]
    if _is_pool(node, source) or (node.target in _SHAPED and _is_map(source)):
        return "pool"
    if not _is_map(output) or not any(_is_map(specs[name]) for name in values_of(node)):
        return ""
    if any(len(spec.shape) == 5 for spec in (output, source)):
        return "local" if _regroups(node, source, output) else ""
    if node.target == "aten.batch_norm.default":
        return "norm" if node.arguments[5] else "local"
    if node.target == "aten.group_norm.default":
        return "norm"
    if node.target == "aten.instance_norm.default":
        return "norm" if node.arguments[3] is None else ""
    return "local" if _is_local(node, source, specs, weights) else ""


def _is_local(node: Node, source: TensorSpec, specs: Specs, weights: WeightSpecs) -> bool:
    name, output = node.target.split(".")[1], node.outputs[0]
    if node.target in _LOCAL:
        return len(values_of(node)) == 1
    if node.target in ops.POINTWISE:
        spread = all(_is_spread(weights[w].shape) for w in weights_of(node)) or name == "prelu"
        return spread and all(_is_map(specs[v]) or _is_spread(specs[v].shape) for v in values_of(node))
    if name in ("cat", "concat"):
        parts = node.arguments[0]
        distinct = len(values_of(node)) == len(parts)
        return distinct and (node.arguments[1] if len(node.arguments) > 1 else 0) % 4 == 1
    if name == "slice":
        axis, step = ((*node.arguments[1:], None, None, None)[i] for i in (0, 3))
        return step in (None, 1) and ((axis or 0) % 4 > 0 or source.shape == output.shape)
    if name in ("pad", "constant_pad_nd"):
        constant = (
            name == "constant_pad_nd" or (node.arguments[2] if len(node.arguments) > 2 else "constant") == "constant"
        )
        return constant and len(node.arguments[1]) <= 4
    return name == "adaptive_avg_pool2d" and 1 not in output.shape[2:]


def _regroups(node: Node, source: TensorSpec, output: TensorSpec) -> bool:
    """Return whether an operator on channels in groups leaves samples, rows and columns in place."""
    name, rank = node.target.split(".")[1], len(source.shape)
    if name in ("cat", "concat"):
        axis = (node.arguments[1] if len(node.arguments) > 1 else 0) % rank
        return len(values_of(node)) == len(node.arguments[0]) and axis in (1, 2)
    if name in ("transpose", "swapaxes"):
        return {axis % rank for axis in node.arguments[1:3]} == {1, 2}
    if name == "permute":
        order = [axis % rank for axis in node.arguments[1]]
        return (order[0], *order[-2:]) == (0, rank - 2, rank - 1)
    is_in_place = (source.shape[0], *source.shape[-2:]) == (output.shape[0], *output.shape[-2:])
    return name in _REGROUPING and is_in_place and len(values_of(node)) == 1


def _is_map(spec: TensorSpec) -> bool:
    return len(spec.shape) in (4, 5) and spec.batch_axis == 0 and spec.shape[0] == 1 and not spec.pairs_samples


def _is_spread(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the same for all rows and columns of the map it is combined with."""
    return all(extent == 1 for extent in shape[-2:])


def _is_pool(node: Node, source: TensorSpec) -> bool:
    """Return whether an operator is the mean or sum of every whole map."""
    if not _is_map(source) or len(source.shape) != 4:
        return False
    if node.target == "aten.adaptive_avg_pool2d.default":
        return node.outputs[0].shape[2:] == (1, 1)
    if node.target not in ("aten.mean.dim", "aten.sum.dim_IntList") or node.options:
        return False
    axes = node.arguments[1]
    return isinstance(axes, (list, tuple)) and sorted(axis % 4 for axis in axes) == [2, 3]


def derives_from(node: Node, specs: Specs) -> tuple[str, ...]:
    """Return the activations whose values the gradients of the node's inputs read (Op.derives_from)."""
    inputs, output = values_of(node), tuple(spec.name for spec in node.outputs[:1])
    name = node.target.split(".")[1]
    if name in _FROM_NOTHING or node.updates or not any(specs[value].differentiable for value in inputs):
        return ()
    if name in _FROM_OUTPUT:
        return output
    if name == "leaky_relu":
        slope = node.arguments[1] if len(node.arguments) > 1 else 0.01
        return output if slope > 0 else inputs
    if name == "elu":
        positive = all(number > 0 for number in node.arguments[1:])
        return output if positive else inputs
    if name == "mul":
        return _other_factors(node, specs)
    if name == "div" and len(inputs) == 1 and not isinstance(node.arguments[1], (Value, Weight)):
        return ()
    return inputs


def _other_factors(node: Node, specs: Specs) -> tuple[str, ...]:
    """Return the factors of those through which a gradient flows."""
    first, second = node.arguments[:2]
    if isinstance(first, Value) and isinstance(second, Value):
        pairs = ((first.name, second.name), (second.name, first.name))
        return tuple(dict.fromkeys(factor for factor, other in pairs if specs[other].differentiable))
    return ()


def tile_sums(node: Node, tiling: str) -> int:
    """Return the numbers per sample that tiles add up for an operator (Op.tile_sums)."""
    if tiling == "pool":
        return 0 if node.target in _SHAPED else node.outputs[0].elements
    if tiling == "norm" and node.target == "aten.group_norm.default":
        return 2 * int(node.arguments[1])
    if tiling == "norm" and node.target == "aten.instance_norm.default":
        return 2 * node.outputs[0].shape[1]
    return 0

"""The way a tiled stage computes each operator, what its gradient reads, and which sums tiles exchange for it.

These are facts of an operator as if its inputs were maps: tensors with spatial axes (facts/spatial_axes.py), along
which a stage cuts them. An operator is computed on boxes if each part of what it makes, along these axes, is made of
parts of what it reads. On tensors that every tile has whole, any operator will do.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.facts.reads import Read, Window
from manyhands.facts.spatial_axes import SpatialAxes, keeps_axes
from manyhands.graph import ops
from manyhands.graph.nodes import Argument, Node, Value, Weight, values_of, weights_of
from manyhands.graph.read_rules import SPLITS, edge_padding

Specs = Mapping[str, TensorSpec]
WeightSpecs = Mapping[str, WeightSpec]
Axes = Mapping[str, SpatialAxes]

_LOCAL = frozenset({
    "aten.conv2d.default", "aten.conv2d.padding", "aten.conv_transpose2d.input", "aten.max_pool2d.default",
    "aten.avg_pool2d.default", "aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default",
    "aten.upsample_bilinear2d.vec", "aten.upsample_bilinear2d.default", "aten.pixel_shuffle.default",
    "aten.pixel_unshuffle.default", "aten.channel_shuffle.default", "aten.dropout.default",
    "aten.feature_dropout.default", "aten.alpha_dropout.default", "aten.adaptive_avg_pool2d.default",
    "aten.conv3d.default", "aten.conv3d.padding", "aten.conv_transpose3d.input", "aten.max_pool3d.default",
    "aten.avg_pool3d.default", "aten.adaptive_avg_pool3d.default", "aten.upsample_nearest3d.vec",
    "aten.upsample_nearest3d.default", "aten.upsample_trilinear3d.vec", "aten.upsample_trilinear3d.default",
})  # fmt: skip
# They work along axes that are not spatial, place by place.
_BESIDE = frozenset({"linear", "layer_norm", "rms_norm", "softmax", "log_softmax", "mean", "sum", "amax", "amin"})
# They put axes in another order, and join and split those that are not spatial.
_REGROUPING = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "swapaxes", "permute"})
# Their result is a tensor of another shape; the input only gives its device and type.
_SHAPED = frozenset(f"aten.new_{kind}.default" for kind in ("empty", "zeros", "ones", "full"))

_FROM_NOTHING = frozenset({
    "conv2d", "conv_transpose2d", "conv3d", "conv_transpose3d", "add", "sub", "rsub", "cat", "concat", "stack",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest2d",
    "upsample_bilinear2d", "upsample_nearest3d", "upsample_trilinear3d", "pad", "constant_pad_nd", "reflection_pad2d",
    "replication_pad2d", "slice", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "mean", "sum", "neg", "clone",
    "contiguous", "expand_as", "alias", "detach", "to", "_to_copy", "type_as", "dropout", "feature_dropout",
    "alpha_dropout", "bernoulli", "bernoulli_", "new_empty", "new_zeros", "new_ones", "new_full",
}) | _REGROUPING | SPLITS  # fmt: skip
_FROM_OUTPUT = frozenset({"relu", "sigmoid", "tanh", "hardtanh", "relu6"})


def tiling_of(node: Node, reads: tuple[Read, ...], axes: Axes, specs: Specs, weights: WeightSpecs) -> str:
    """Return "local", "norm", "pool" or "" (Op.tiling); `axes`: the spatial axes of tensors that have any."""
    if node.updates or not values_of(node):
        return ""
    output, source = node.outputs[0], specs[values_of(node)[0]]
    is_shaped = node.target in _SHAPED and _is_map(source, axes)
    if not node.several and (is_shaped or _is_pool(node, source, axes)):
        return "pool"
    if not _is_map(output, axes) or not any(_is_map(specs[name], axes) for name in values_of(node)):
        return ""
    made, operands = axes[output.name], _computed_operands(node, specs)
    placed = tuple(read for read in reads if read.tensor not in operands)
    kept = [
        _is_map(specs[r.tensor], axes) and keeps_axes(r, specs[r.tensor].shape, axes[r.tensor], made) for r in placed
    ]
    if not any(kept) or not all(is_kept or _serves_all(r, specs[r.tensor], made) for r, is_kept in zip(placed, kept)):
        return ""
    name = node.target.split(".")[1]
    if name in ("batch_norm", "group_norm", "instance_norm"):
        return _norm_tiling(node, name, made) if len(placed) == 1 else ""
    return "local" if _is_local(node, placed, made, specs, weights) else ""


def _computed_operands(node: Node, specs: Specs) -> frozenset[str]:
    """Return the kernel and the bias of a convolution that are computed, as one tensor for all samples: what is no map
    every tile has whole."""
    if node.target not in ops.CONVOLUTION:
        return frozenset()
    computed = [operand.name for operand in node.arguments[1:3] if isinstance(operand, Value)]
    return frozenset(name for name in computed if specs[name].batch_axis is None)


def _serves_all(read: Read, source: TensorSpec, made: SpatialAxes) -> bool:
    """Return whether an input is the same for all places of the map that is made."""
    return all(
        extent == 1 or (rule.axis is not None and rule.axis not in made)
        for rule, extent in zip(read.rules, source.shape, strict=True)
    )


def _norm_tiling(node: Node, name: str, spatial: SpatialAxes) -> str:
    if sorted(spatial) != list(range(2, len(node.outputs[0].shape))):
        return ""
    if name == "batch_norm":
        return "norm" if node.arguments[5] else "local"
    return "norm" if name == "group_norm" or node.arguments[3] is None else ""


def _is_local(node: Node, placed: tuple[Read, ...], spatial: SpatialAxes, specs: Specs, weights: WeightSpecs) -> bool:
    """Return whether an operator works on boxes of maps; `placed`: the way in which it reads maps, and what serves all
    places of them."""
    name, output, is_only = node.target.split(".")[1], node.outputs[0], len(placed) == 1
    rank = len(output.shape)
    if node.several:
        return name in SPLITS and _is_beside(node.arguments[2:], rank, spatial)
    if name in ("cat", "concat", "stack"):
        return len(placed) == len(node.arguments[0]) and _is_beside(node.arguments[1:], rank, spatial)
    if node.target in _LOCAL:
        return is_only and (name != "channel_shuffle" or 1 not in spatial)
    if node.target in ops.POINTWISE:
        return all(_has_no_places(name, weights[w].shape, rank, spatial) for w in weights_of(node))
    if name == "slice":
        axis = (node.arguments[1] if len(node.arguments) > 1 else 0) or 0
        return axis % rank > 0 or specs[placed[0].tensor].shape == output.shape
    if name == "expand_as":
        return len(placed) == 2
    if name in ("pad", "constant_pad_nd") or edge_padding(node) is not None:
        mode = node.arguments[2] if name == "pad" and len(node.arguments) > 2 else "constant"
        pads = edge_padding(node) is not None or mode == "constant"
        return pads and len(node.arguments[1]) <= 2 * (rank - 1)
    if name in _REGROUPING:
        rules = [rule for rule in placed[0].rules if rule.axis in spatial]
        return is_only and all(rule == Window(rule.axis) for rule in rules if rule.axis is not None)
    return name in _BESIDE and is_only


def _is_beside(arguments: tuple[Argument, ...], rank: int, spatial: SpatialAxes) -> bool:
    """Return whether the axis that comes first among some arguments is not cut, and not that of samples."""
    axis = (arguments[0] if arguments else 0) % rank
    return axis > 0 and axis not in spatial


def _has_no_places(name: str, shape: tuple[int, ...], rank: int, spatial: SpatialAxes) -> bool:
    """Return whether a weight is the same for all places of the map it is combined with."""
    if name == "prelu":
        return 1 not in spatial or shape in ((), (1,))
    offset = rank - len(shape)
    return all(axis < offset or shape[axis - offset] == 1 for axis in spatial)


def _is_map(spec: TensorSpec, axes: Axes) -> bool:
    return bool(axes.get(spec.name)) and spec.shape[0] == 1


def _is_pool(node: Node, source: TensorSpec, axes: Axes) -> bool:
    """Return whether an operator is the mean or sum of every whole map."""
    if not _is_map(source, axes):
        return False
    spatial, rank = axes[source.name], len(source.shape)
    name = node.target.split(".")[1]
    if name in ("adaptive_avg_pool2d", "adaptive_avg_pool3d"):
        pooled = range(rank - len(spatial), rank)
        return sorted(spatial) == [*pooled] and name.endswith(f"{len(spatial)}d") and all(
            node.outputs[0].shape[axis] == 1 for axis in pooled
        )  # fmt: skip
    if node.target not in ("aten.mean.dim", "aten.sum.dim_IntList") or node.options:
        return False
    reduced = node.arguments[1]
    return isinstance(reduced, (list, tuple)) and sorted(axis % rank for axis in reduced) == sorted(spatial)


def derives_from(node: Node, specs: Specs) -> tuple[str, ...]:
    """Return the activations whose values the gradients of the node's inputs read (Op.derives_from)."""
    inputs, output = values_of(node), tuple(spec.name for spec in node.outputs[:1])
    name = node.target.split(".")[1]
    if node.target in ops.CONVOLUTION and isinstance(node.arguments[1], Value):
        return _other_factors(node, specs)
    if name in _FROM_NOTHING or node.updates or not any(specs[value].differentiable for value in inputs):
        return ()
    if name == "linear" and len(inputs) == 1:
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

"""The operators of a tiled stage: which class computes which operator on boxes."""

from __future__ import annotations

from manyhands.executor.tile_base import TileOperator
from manyhands.executor.tile_convolution import Convolution, TransposedConvolution
from manyhands.executor.tile_linear import Linear
from manyhands.executor.tile_lower_precision import in_float32
from manyhands.executor.tile_moves import (
    Concatenation,
    Dropout,
    EdgePadding,
    Expansion,
    Padding,
    PixelShuffle,
    Regrouping,
    Slice,
    Split,
    TileChannelShuffle,
)
from manyhands.executor.tile_normalization import BatchNorm, GroupNorm, InstanceNorm
from manyhands.executor.tile_pointwise import pointwise
from manyhands.executor.tile_pooling import AdaptiveAveragePool, AveragePool, MaxPool
from manyhands.executor.tile_resampling import Resampling
from manyhands.executor.tile_statistics import FromShape, GlobalPool
from manyhands.facts.precision import SUMMED_IN
from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.graph import Graph
from manyhands.graph.read_rules import SPLITS, edge_padding
from manyhands.graph.weights import Weights

_BY_NAME: dict[str, type[TileOperator]] = {
    "conv2d": Convolution, "conv_transpose2d": TransposedConvolution, "max_pool2d": MaxPool,
    "avg_pool2d": AveragePool, "adaptive_avg_pool2d": AdaptiveAveragePool, "upsample_nearest2d": Resampling,
    "upsample_bilinear2d": Resampling, "pixel_shuffle": PixelShuffle, "pixel_unshuffle": PixelShuffle,
    "channel_shuffle": TileChannelShuffle, "dropout": Dropout, "feature_dropout": Dropout, "alpha_dropout": Dropout,
    "conv3d": Convolution, "conv_transpose3d": TransposedConvolution, "max_pool3d": MaxPool, "avg_pool3d": AveragePool,
    "adaptive_avg_pool3d": AdaptiveAveragePool, "upsample_nearest3d": Resampling, "upsample_trilinear3d": Resampling,
    "linear": Linear,
    "batch_norm": BatchNorm, "group_norm": GroupNorm, "instance_norm": InstanceNorm, "cat": Concatenation,
    "concat": Concatenation, "slice": Slice, "pad": Padding, "constant_pad_nd": Padding, "expand_as": Expansion,
    "reflection_pad2d": EdgePadding, "replication_pad2d": EdgePadding,
    **dict.fromkeys(SPLITS, Split), **dict.fromkeys(("stack", "mean", "sum", "amax", "amin"), TileOperator),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "swapaxes", "permute"),
                    Regrouping),
    **dict.fromkeys(("layer_norm", "rms_norm", "softmax", "log_softmax", "mean", "sum", "amax", "amin"), TileOperator),
}  # fmt: skip


def tile_operator(graph: Graph, index: int, weights: Weights, kernel: Kernel | None = None) -> TileOperator:
    """Return operator `index` of a graph on boxes, with these weights and, for a convolution, by this kernel."""
    node, op = graph.nodes[index], graph.network.ops[index]
    name = node.target.split(".")[1]
    kind: type[TileOperator] = TileOperator
    if op.tiling == "pool":
        kind = FromShape if name.startswith("new_") else GlobalPool
    elif op.tiling and node.target in ops.POINTWISE:
        tensors = graph.network.tensors
        kind = pointwise(node, {tensors[name].dtype for name in (*op.inputs, *op.outputs)})
    elif op.tiling:
        kind = EdgePadding if edge_padding(node) is not None else _BY_NAME[name]
    is_smaller = any(spec.dtype in SUMMED_IN for spec in node.outputs)
    return (in_float32(kind) if is_smaller else kind)(graph, index, weights, kernel)

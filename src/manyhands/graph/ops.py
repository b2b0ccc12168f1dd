"""The allow-list: every ATen operator a graph may name, and what kind of operator it is.

A target is written 'aten.conv2d.default'. A graph that names anything else is refused, when it is captured and again
when it is read from a file or the wire. Operators that write to files, load code, alias memory in surprising ways or
depend on data for their shape are not on the list.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# Element by element, with broadcasting: an output element reads the element of each input at the same place.
_POINTWISE = """
abs add.Scalar add.Tensor bitwise_and.Tensor bitwise_not bitwise_or.Tensor celu ceil clamp clamp.Tensor clamp_max
clamp_max.Tensor clamp_min clamp_min.Tensor clone contiguous cos detach div.Scalar div.Tensor div.Tensor_mode
elu eq.Scalar eq.Tensor erf exp expm1 floor floor_divide fmod.Scalar ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor
hardsigmoid hardswish hardtanh le.Scalar le.Tensor leaky_relu lerp.Scalar lerp.Tensor log log1p log2 log_sigmoid
logical_and logical_not logical_or lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor maximum minimum mish
mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg nan_to_num pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu reciprocal
relu relu6 remainder.Scalar round rsqrt rsub.Scalar rsub.Tensor selu sigmoid sign silu sin softplus softshrink sqrt
square sub.Scalar sub.Tensor tanh tan threshold to.dtype to.dtype_layout type_as where.self where.ScalarOther
where.ScalarSelf where.Scalar __and__.Tensor __or__.Tensor __xor__.Tensor logical_xor bitwise_xor.Tensor _to_copy alias
lift_fresh_copy addcmul addcdiv hardshrink acos acosh asin asinh atan atan2 atanh cosh sinh trunc isnan isinf log10 exp2
hypot fmod.Tensor remainder.Tensor erfc sgn fmax fmin frac
"""

_CONVOLUTION = """
conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_transpose1d conv_transpose2d.input
conv_transpose3d.input
"""
_POOLING = """
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d adaptive_max_pool2d
"""
_RESAMPLING = """
upsample_nearest1d.vec upsample_nearest2d.vec upsample_bilinear2d.vec upsample_nearest2d upsample_bilinear2d
upsample_nearest3d.vec upsample_trilinear3d.vec upsample_nearest3d upsample_trilinear3d
"""
_NORMALISATION = "batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm"
_PRODUCT = """
linear matmul bmm mm mv dot addmm baddbmm einsum scaled_dot_product_attention bilinear lstm.input gru.input
rnn_tanh.input rnn_relu.input
"""
_SHAPE = """
view reshape view_as reshape_as _unsafe_view flatten.using_ints unflatten.int permute transpose.int t unsqueeze squeeze
squeeze.dim squeeze.dims slice.Tensor select.int narrow cat concat stack chunk split.Tensor split_with_sizes split.sizes
expand expand_as repeat tile pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
unbind.int roll pixel_shuffle pixel_unshuffle channel_shuffle movedim.int movedim.intlist swapaxes flip index_select
gather index.Tensor take_along_dim tril triu repeat_interleave.self_int embedding one_hot numpy_T hstack vstack
broadcast_to broadcast_tensors scatter.value scatter.src scatter_add slice_scatter select_scatter diagonal
unfold index_put
"""
_REDUCTION = """
mean mean.dim sum sum.dim_IntList amax amin max min max.dim min.dim softmax.int log_softmax.int argmax argmin var.dim
var.correction var std.dim std.correction std norm.ScalarOpt_dim norm.Scalar linalg_vector_norm prod.dim_int cumsum
logsumexp cosine_similarity all any all.dim any.dim topk sort _softmax _log_softmax all.default prod cumprod kthvalue
var_mean.correction
"""
_CREATION = """
zeros ones full arange arange.start arange.start_step zeros_like ones_like full_like new_zeros new_ones new_full
scalar_tensor linspace eye meshgrid.indexing meshgrid empty.memory_format empty_like new_empty
"""
_LOSS = """
cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits kl_div margin_ranking_loss triplet_margin_loss cosine_embedding_loss
hinge_embedding_loss soft_margin_loss
"""
_RANDOM = """
dropout feature_dropout alpha_dropout bernoulli bernoulli.p bernoulli_.float rand_like randn_like
"""
_BUFFER_UPDATE = """
copy_ add_.Tensor add_.Scalar mul_.Tensor mul_.Scalar lerp_.Scalar lerp_.Tensor sub_.Tensor fill_.Scalar zero_
index_put_
"""


def _names(text: str) -> frozenset[str]:
    return frozenset("aten." + (name if "." in name else name + ".default") for name in text.split())


POINTWISE = _names(_POINTWISE)
CONVOLUTION = _names(_CONVOLUTION)
POOLING = _names(_POOLING)
RESAMPLING = _names(_RESAMPLING)
NORMALISATION = _names(_NORMALISATION)
PRODUCT = _names(_PRODUCT)
SHAPE = _names(_SHAPE)
REDUCTION = _names(_REDUCTION)
CREATION = _names(_CREATION)
LOSS = _names(_LOSS)
RANDOM = _names(_RANDOM)
BUFFER_UPDATE = _names(_BUFFER_UPDATE)

ALLOWED = (
    POINTWISE | CONVOLUTION | POOLING | RESAMPLING | NORMALISATION | PRODUCT
    | SHAPE | REDUCTION | CREATION | LOSS | RANDOM | BUFFER_UPDATE
)  # fmt: skip

HEAVY = CONVOLUTION | PRODUCT
"""Operators around which the others are merged into blocks."""

RECURRENT = _names("lstm.input gru.input rnn_tanh.input rnn_relu.input")

MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")


def functional(target: str) -> str | None:
    """Return the target without its in-place underscore, if on the list: 'aten.relu_.default' ->
    'aten.relu.default'."""
    _, name, overload = target.split(".", 2)
    if not name.endswith("_") or name.startswith("_"):
        return None
    plain = f"aten.{name[:-1]}.{overload}"
    return plain if plain in ALLOWED else None


@cache
def in_place(target: str) -> str | None:
    """Return the in-place form of a target, if ATen has one."""
    import torch

    _, name, overload = target.split(".", 2)
    packet = getattr(torch.ops.aten, name + "_", None)
    return f"aten.{name}_.{overload}" if packet is not None and overload in packet.overloads() else None


@cache
def resolve(target: str) -> Any:
    """Return the torch operator of a target on the allow-list, or None where this torch does not have it."""
    import torch

    base = target.replace("_.", ".", 1) if target not in ALLOWED else target
    assert target in ALLOWED or base in ALLOWED, target
    _, name, overload = target.split(".", 2)
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None)


RESHAPES = {
    "aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default",
    "aten.view_as.default": "aten.reshape_as.default",
}  # fmt: skip
"""View -> the operator that copies where a tensor has no such view: how a result lies in memory depends on the kernel
that made it, which is another one on a GPU, or in channels_last."""


def argument(node: Any, name: str) -> Any:
    """Return a node's value for an argument, by its name in the operator's schema; its default where it is not
    given."""
    for place, parameter in enumerate(resolve(node.target)._schema.arguments):
        if parameter.name == name:
            return (
                node.arguments[place]
                if place < len(node.arguments)
                else node.options.get(name, parameter.default_value)
            )
    return None

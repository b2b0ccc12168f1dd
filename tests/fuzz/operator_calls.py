"""A valid call of every operator on the allow-list: what is taken as it stands, and what hostile calls are made of.

A call is its arguments and options as a graph document writes them, with a `Tensor` where a tensor goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor that a call reads: an input of the graph, or a weight."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    batch_axis: int | None = 0
    """None: it is a weight."""
    is_buffer: bool = False


@dataclass(frozen=True)
class Call:
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()


def x(*shape: int, dtype: str = "float32", axis: int = 0) -> Tensor:
    """An input with so many elements for each sample; its batch axis comes on top of that."""
    return Tensor((*shape[:axis], 1, *shape[axis:]), dtype, axis)


def i(*shape: int) -> Tensor:
    return x(*shape, dtype="int64")


def b(*shape: int) -> Tensor:
    return x(*shape, dtype="bool")


def w(*shape: int) -> Tensor:
    return Tensor(shape, batch_axis=None)


def buffer(*shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(shape, dtype, None, is_buffer=True)


def call(*arguments: Any, **options: Any) -> Call:
    return Call(arguments, tuple(options.items()))


def enum(name: str) -> dict[str, str]:
    return {"is": "enum", "name": name}


def samples(factor: int = 1) -> dict[str, Any]:
    return {"is": "samples", "factor": factor}


def _recurrent(gates: int, layers: int = 1, directions: int = 1, *, projection: int = 0, biases: bool = True) -> Call:
    hidden, weights = projection or 3, []
    for layer in range(layers):
        for _ in range(directions):
            read = 2 if layer == 0 else hidden * directions
            weights += [w(gates * 3, read), w(gates * 3, hidden)]
            weights += [w(gates * 3), w(gates * 3)] if biases else []
            weights += [w(projection, 3)] if projection else []
    state = [x(layers * directions, size, axis=1) for size in (hidden, 3)]
    states = state if gates == 4 else state[0]
    return call(x(4, 2), states, weights, biases, layers, 0.0, True, directions == 2, True)


_UNARY = """
abs bitwise_not:i celu ceil clone contiguous cos detach elu erf exp expm1 floor gelu hardsigmoid hardswish hardtanh
leaky_relu log log1p log2 log_sigmoid logical_not mish neg nan_to_num reciprocal relu relu6 round rsqrt selu sigmoid
sign silu sin softplus softshrink sqrt square tanh tan _to_copy alias lift_fresh_copy hardshrink
mean sum max min argmax argmin var std all any all.default prod t numpy_T squeeze amax amin
zeros_like ones_like empty_like bernoulli rand_like randn_like acos acosh asin asinh atan atanh cosh sinh trunc isnan
isinf log10 exp2 erfc sgn frac
"""
_BINARY = """
add.Tensor bitwise_and.Tensor:i bitwise_or.Tensor:i bitwise_xor.Tensor:i clamp.Tensor clamp_max.Tensor clamp_min.Tensor
div.Tensor eq.Tensor ge.Tensor gt.Tensor le.Tensor logical_and logical_or logical_xor lt.Tensor maximum
minimum mul.Tensor ne.Tensor pow.Tensor_Tensor rsub.Tensor sub.Tensor type_as __and__.Tensor:i __or__.Tensor:i
__xor__.Tensor:i mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits kl_div view_as reshape_as
expand_as cosine_similarity hinge_embedding_loss atan2 hypot fmod.Tensor remainder.Tensor fmax fmin
"""
_SCALAR = """
add.Scalar clamp clamp_max clamp_min div.Scalar eq.Scalar fmod.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar
ne.Scalar pow.Tensor_Scalar remainder.Scalar rsub.Scalar sub.Scalar
"""
_ALONG = """
softmax.int log_softmax.int all.dim any.dim max.dim min.dim prod.dim_int cumsum cumprod sort squeeze.dim unsqueeze
unbind.int
"""
_WRITES = "copy_ add_.Tensor mul_.Tensor sub_.Tensor zero_"


def _table() -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}

    def put(name: str, *calls: Call) -> None:
        found.setdefault("aten." + (name if "." in name else name + ".default"), []).extend(calls)

    for word in _UNARY.split():
        name, _, kind = word.partition(":")
        two_axes = name in ("t", "numpy_T")
        put(name, call(i(3) if kind else x(4) if two_axes else x(3, 4)))
    for word in _BINARY.split():
        name, _, kind = word.partition(":")
        put(name, call(*((i(3), i(3)) if kind else (x(3, 4), x(3, 4)))))
    for name in _SCALAR.split():
        put(name, call(x(3, 4), 2.5))
    for name in _ALONG.split():
        put(name, call(x(3, 4), 1))
    _put_arithmetic(put)
    _put_layers(put)
    _put_shapes(put)
    _put_others(put)
    return found


def _put_arithmetic(put: Any) -> None:
    put("add.Tensor", call(x(3), w(3), alpha=2), call(x(3), 1))
    put("div.Tensor_mode", call(x(3), x(3), rounding_mode="floor"))
    put("lerp.Scalar", call(x(3), x(3), 0.5))
    put("lerp.Tensor", call(x(3), x(3), x(3)))
    put("masked_fill.Scalar", call(x(3), b(3), {"is": "float", "text": "-inf"}))
    put("masked_fill.Tensor", call(x(3), b(3), w()))
    put("pow.Scalar", call(2.0, x(3)))
    put("prelu", call(x(3, 4), w(3)))
    put("threshold", call(x(3), 0.5, 0.0))
    put("to.dtype", call(x(3), enum("float64")), call(x(3), enum("int64"), False, True))
    put("to.dtype_layout", call(x(3), dtype=enum("float16")))
    put("where.self", call(b(3), x(3), x(3)))
    put("where.ScalarOther", call(b(3), x(3), 1.0))
    put("where.ScalarSelf", call(b(3), 1.0, x(3)))
    put("where.Scalar", call(b(3), 1.0, 2.0))
    put("addcmul", call(x(3), x(3), x(3), value=0.5))
    put("addcdiv", call(x(3), x(3), x(3), value=0.5))
    put("sum", call(x(3), dtype=enum("float64")))
    put("softmax.int", call(x(3), -1, enum("float64")))
    put("clone", call(x(3, 4, 4), memory_format=enum("channels_last")))
    put("floor_divide", call(i(3), 2), call(i(3), i(3)))
    put("remainder.Scalar", call(i(3), 2))
    put("fmod.Scalar", call(i(3), 2))


def _put_layers(put: Any) -> None:
    for axes in (1, 2, 3):
        size, ones = (6,) * axes, [1] * axes
        put(f"conv{axes}d", call(x(2, *size), w(4, 2, *(3,) * axes), w(4), ones, [0] * axes, ones, 1),
            call(x(4, *size), w(4, 2, *(3,) * axes), None, [2] * axes, ones, ones, 2))  # fmt: skip
        put(f"conv{axes}d.padding", call(x(2, *size), w(4, 2, *(3,) * axes), w(4), ones, "same", ones, 1))
        put(f"conv_transpose{axes}d" + (".input" if axes > 1 else ""),
            call(x(2, *size), w(2, 4, *(3,) * axes), w(4), [2] * axes, ones, ones, 1, ones))  # fmt: skip
        put(f"max_pool{axes}d", call(x(2, *size), [2] * axes, [2] * axes, [0] * axes, ones, False))
        put(f"avg_pool{axes}d", call(x(2, *size), [2] * axes, [2] * axes, [0] * axes, False, True))
        put(f"adaptive_avg_pool{axes}d", call(x(2, *size), [3] * axes))
    put("avg_pool2d", call(x(2, 6, 6), [3, 3], [1, 1], [1, 1], True, False, 2))
    put("adaptive_max_pool2d", call(x(2, 6, 6), [3, 3]))
    put("upsample_nearest1d.vec", call(x(2, 4), None, [2.0]), call(x(2, 4), [7], None))
    put("upsample_nearest2d.vec", call(x(2, 4, 4), None, [2.0, 1.5]), call(x(2, 4, 4), [7, 3], None))
    put("upsample_bilinear2d.vec", call(x(2, 4, 4), None, False, [2.0, 2.0]), call(x(2, 4, 4), [7, 3], True, None))
    put("upsample_nearest2d", call(x(2, 4, 4), [8, 8], 2.0, 2.0), call(x(2, 4, 4), [8, 8]))
    put("upsample_bilinear2d", call(x(2, 4, 4), [8, 8], False, 2.0, 2.0), call(x(2, 4, 4), [8, 8], True))
    deep, sizes = x(2, 3, 4, 4), [6, 8, 8]
    put("upsample_nearest3d.vec", call(deep, None, [2.0, 1.5, 1.0]), call(deep, [5, 7, 3], None))
    put("upsample_trilinear3d.vec", call(deep, None, False, [2.0, 2.0, 2.0]), call(deep, [5, 7, 3], True, None))
    put("upsample_nearest3d", call(deep, sizes, 2.0, 2.0, 2.0), call(deep, sizes))
    put("upsample_trilinear3d", call(deep, sizes, False, 2.0, 2.0, 2.0), call(deep, sizes, True))
    put("batch_norm", call(x(2, 4, 4), w(2), w(2), buffer(2), buffer(2), True, 0.1, 1e-5, False),
        call(x(2), w(2), w(2), buffer(2), buffer(2), False, 0.1, 1e-5, False),
        call(x(2, 4), None, None, None, None, True, 0.1, 1e-5, True))  # fmt: skip
    put("instance_norm", call(x(2, 4, 4), w(2), w(2), buffer(2), buffer(2), True, 0.1, 1e-5, False))
    put("layer_norm", call(x(3, 4), [4], w(4), w(4), 1e-5))
    put("native_layer_norm", call(x(3, 4), [4], w(4), w(4), 1e-5))
    put("group_norm", call(x(4, 3), 2, w(4), w(4), 1e-5))
    put("rms_norm", call(x(3, 4), [4], w(4), 1e-5))
    put("linear", call(x(3, 4), w(5, 4), w(5)))
    put("matmul", call(x(3, 4), w(4, 5)), call(x(3, 4), x(4, 2)))
    put("bmm", call(x(3, 4), x(4, 5)))
    put("mm", call(x(4), w(4, 5)))
    put("mv", call(x(4), w(4)))
    put("dot", call(w(4), w(4)))
    put("addmm", call(w(5), x(4), w(4, 5), beta=1, alpha=2))
    put("baddbmm", call(x(3, 5), x(3, 4), x(4, 5)))
    put("einsum", call("bij,jk->bik", [x(3, 4), w(4, 5)]))
    put("scaled_dot_product_attention", call(x(2, 4, 8), x(2, 5, 8), x(2, 5, 8), None, 0.0, False),
        call(x(2, 4, 8), x(2, 4, 8), x(2, 4, 8), None, 0.5, True, scale=0.5),
        call(x(2, 4, 8), x(2, 4, 8), x(2, 4, 8), b(1, 4, 4)))  # fmt: skip
    put("bilinear", call(x(3), x(4), w(5, 3, 4), w(5)))
    put("lstm.input", _recurrent(4), _recurrent(4, 2, 2), _recurrent(4, 2, projection=2), _recurrent(4, biases=False))
    for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        put(f"{name}.input", _recurrent(gates), _recurrent(gates, 2, 2))
    put("embedding", call(w(7, 3), i(4)), call(w(7, 3), i(4), 1, True, False))


def _put_shapes(put: Any) -> None:
    put("view", call(x(3, 4), [samples(3), 4]), call(x(3, 4), [-1, 12]))
    put("reshape", call(x(3, 4), [samples(), 12]))
    put("_unsafe_view", call(x(3, 4), [samples(), 12]))
    put("flatten.using_ints", call(x(3, 4), 1, -1))
    put("unflatten.int", call(x(12), 1, [3, 4]))
    put("permute", call(x(3, 4), [0, 2, 1]))
    put("transpose.int", call(x(3, 4), 1, 2))
    put("swapaxes", call(x(3, 4), 1, 2))
    put("squeeze.dims", call(x(1, 4), [1]))
    put("slice.Tensor", call(x(3, 4), 2, 1, 2**63 - 1, 2))
    put("select.int", call(x(3, 4), 1, -1))
    put("narrow", call(x(3, 4), 2, 1, 2))
    for name in ("cat", "concat", "stack"):
        put(name, call([x(3, 4), x(3, 4)], 1))
    put("hstack", call([x(3), x(4)]))
    put("vstack", call([x(3), x(3)]))
    put("chunk", call(x(3, 4), 2, 2))
    put("split.Tensor", call(x(3, 4), 2, 2))
    put("split_with_sizes", call(x(3, 4), [1, 3], 2))
    put("split.sizes", call(x(3, 4), [1, 3], 2))
    put("expand", call(x(1, 4), [samples(), 3, 4], implicit=False))
    put("broadcast_to", call(x(1, 4), [samples(), 3, 4]))
    put("broadcast_tensors", call([x(3, 1), x(1, 4)]))
    put("repeat", call(x(3, 4), [1, 2, 1]))
    put("tile", call(x(3, 4), [1, 2, 1]))
    put("pad", call(x(3, 4), [1, 1], "constant", 0.5), call(x(3, 4), [1, 1], "reflect", None))
    put("constant_pad_nd", call(x(3, 4), [1, -1], 0.5))
    for kind in ("reflection", "replication"):
        put(f"{kind}_pad1d", call(x(3, 4), [1, 2]))
        put(f"{kind}_pad2d", call(x(3, 4, 4), [1, 2, 0, 1]))
    put("roll", call(x(3, 4), [1], [2]))
    put("pixel_shuffle", call(x(4, 3, 3), 2))
    put("pixel_unshuffle", call(x(1, 4, 4), 2))
    put("channel_shuffle", call(x(4, 3, 3), 2))
    put("movedim.int", call(x(3, 4), 1, 2))
    put("movedim.intlist", call(x(3, 4), [1], [2]))
    put("flip", call(x(3, 4), [1]))
    put("index_select", call(x(3, 4), 1, buffer(2, dtype="int64")))
    put("gather", call(x(3, 4), 1, i(2, 4)))
    put("index.Tensor", call(x(3, 4), [None, buffer(2, dtype="int64")]))
    put("take_along_dim", call(x(3, 4), i(2, 4), 1))
    put("tril", call(x(3, 4), 0))
    put("triu", call(x(3, 4), 1))
    put("repeat_interleave.self_int", call(x(3, 4), 2, 1))
    put("one_hot", call(i(4), 5))
    put("scatter.value", call(x(3, 4), 1, i(2, 4), 1.0))
    put("scatter.src", call(x(3, 4), 1, i(2, 4), x(2, 4)))
    put("scatter_add", call(x(3, 4), 1, i(2, 4), x(2, 4)))
    put("slice_scatter", call(x(3, 4), x(3, 2), 2, 1, 3, 1))
    put("select_scatter", call(x(3, 4), x(4), 1, -1))
    put("diagonal", call(x(3, 3), 0, 1, 2))
    put("unfold", call(x(3, 6), 2, 3, 1))
    put("index_put", call(x(3, 4), [None, buffer(2, dtype="int64")], x(2, 4), True))


def _put_others(put: Any) -> None:
    for name in ("mean.dim", "sum.dim_IntList", "var.dim", "std.dim", "logsumexp", "amax", "amin"):
        put(name, call(x(3, 4), [1, 2]))
    put("var.correction", call(x(3, 4), [1], correction=1, keepdim=True))
    put("std.correction", call(x(3, 4), [1], correction=0))
    put("norm.ScalarOpt_dim", call(x(3, 4), 2, [1], True))
    put("norm.Scalar", call(x(3, 4), 2))
    put("linalg_vector_norm", call(x(3, 4), 2, [1], False))
    put("kthvalue", call(x(3, 4), 2, 1, False))
    put("var_mean.correction", call(x(3, 4), [1], correction=1, keepdim=True))
    put("topk", call(x(3, 4), 2, 2, True, True))
    put("_softmax", call(x(3, 4), 1, False))
    put("_log_softmax", call(x(3, 4), 1, False))
    for name in ("zeros", "ones", "empty.memory_format"):
        put(name, call([samples(), 3], dtype=enum("float32")))
    put("full", call([samples(), 3], 1.5))
    put("arange", call(5))
    put("arange.start", call(1, 5))
    put("arange.start_step", call(1, 7, 2))
    put("full_like", call(x(3), 1.5))
    put("new_zeros", call(x(3), [samples(), 2]))
    put("new_ones", call(x(3), [samples(), 2]))
    put("new_empty", call(x(3), [samples(), 2]))
    put("new_full", call(x(3), [samples(), 2], 1.5))
    put("scalar_tensor", call(1.5))
    put("linspace", call(0, 1, 5))
    put("eye", call(4))
    put("meshgrid", call([w(3), w(4)]))
    put("meshgrid.indexing", call([w(3), w(4)], indexing="xy"))
    put("cross_entropy_loss", call(x(5), i(), None, 1, -100, 0.1), call(x(5, 3), i(3), buffer(5), 0))
    put("nll_loss", call(x(5), i(), None, 1, -100))
    put("nll_loss_nd", call(x(5), i(), buffer(5), 1, -100))
    put("nll_loss2d", call(x(5, 3, 3), i(3, 3), None, 1, -100))
    put("binary_cross_entropy", call(x(3), x(3), None, 1))
    put("margin_ranking_loss", call(x(), x(), x(), 0.5, 1))
    put("soft_margin_loss", call(x(3), buffer(3)))
    put("triplet_margin_loss", call(x(4), x(4), x(4)))
    put("cosine_embedding_loss", call(x(4), x(4), x()))
    for name in ("dropout", "alpha_dropout"):
        put(name, call(x(3, 4), 0.5, True))
    put("feature_dropout", call(x(3, 4, 4), 0.5, True))
    put("bernoulli.p", call(x(3, 4), 0.5))
    put("bernoulli_.float", call(x(3, 4), 0.5))
    for name in _WRITES.split():
        put(name, call(buffer(3), *([] if name == "zero_" else [w(3)])))
    put("add_.Tensor", call(buffer(dtype="int64"), 1))
    put("add_.Scalar", call(buffer(3), 1))
    put("mul_.Scalar", call(buffer(3), 2))
    put("lerp_.Scalar", call(buffer(3), w(3), 0.5))
    put("lerp_.Tensor", call(buffer(3), w(3), w(3)))
    put("fill_.Scalar", call(buffer(3), 2))
    put("index_put_", call(buffer(4, 3), [buffer(2, dtype="int64")], w(2, 3)))


CALLS = _table()
"""Target -> valid calls of it."""

"""Read rules (facts/reads.py): which part of its inputs each operator reads, from its target and arguments.

Where nothing better is known an operator needs its inputs whole, sample by sample: correct, never too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.facts.reads import (
    Adaptive,
    Blocks,
    Dealt,
    Mirrored,
    Read,
    Resampled,
    Rule,
    Shifted,
    Spread,
    Whole,
    Window,
)
from manyhands.graph import ops
from manyhands.graph.nodes import Argument, Node, Value, Weight, values_of
from manyhands.graph.sample_mixing import axes_of

Specs = Mapping[str, TensorSpec]
WeightSpecs = Mapping[str, WeightSpec]


def reads_of(node: Node, specs: Specs, weights: WeightSpecs) -> tuple[Read, ...]:
    """Return one Read per activation from which the node's first output is made."""
    return tuple(Read(name, _rules(node, specs[name], specs, weights)) for name in values_of(node))


def _rules(node: Node, source: TensorSpec, specs: Specs, weights: WeightSpecs) -> tuple[Rule, ...]:
    output = node.outputs[0]
    name = node.target.split(".")[1]
    rank = len(source.shape)
    if source.pairs_samples or output.pairs_samples:
        return tuple(Whole() for _ in range(rank))
    first = node.arguments[0] if node.arguments else None
    is_main = isinstance(first, Value) and first.name == source.name
    if node.target in ops.POINTWISE or (node.target in ops.RANDOM and is_main):
        return _aligned(source, output)
    if node.target in ops.CONVOLUTION and is_main:
        return _convolution(node, source, output, specs, weights)
    if node.target in ops.POOLING and "adaptive" not in name:
        return _pooling(node, source)
    if "adaptive" in name:
        return _adaptive_pooling(name, source, output)
    if node.target in ops.RESAMPLING:
        return _resampling(node, source, output)
    if name in ("pixel_shuffle", "pixel_unshuffle"):
        return _shuffle(node, rank)
    if name == "channel_shuffle":
        return tuple(Dealt(a, node.arguments[1]) if a == 1 else Window(a) for a in range(rank))
    if name == "batch_norm" and is_main:
        return tuple(Window(a) for a in range(rank))
    if name in ("group_norm", "instance_norm") and is_main:
        return _group_normalisation(name, rank)
    if name in ("layer_norm", "rms_norm") and is_main:
        normalised = len(node.arguments[1])
        return tuple(Window(a) if a < rank - normalised else Whole() for a in range(rank))
    if name in ("cat", "concat"):
        return _concatenation(node, source, specs)
    if name == "linear" and is_main:
        return (*(Window(a) for a in range(rank - 1)), Whole())
    if name in ("softmax", "log_softmax", "_softmax", "_log_softmax"):
        axis = axes_of(node.arguments[1], rank)
        return tuple(Whole() if a in axis else Window(a) for a in range(rank))
    if name in ("mean", "sum", "amax", "amin") and len(node.arguments) > 1:
        return _reduction(node, rank)
    if name in ("transpose", "swapaxes"):
        a, b = node.arguments[1] % rank, node.arguments[2] % rank
        return tuple(Window(b if axis == a else a if axis == b else axis) for axis in range(rank))
    if name == "permute":
        order = [axis % rank for axis in node.arguments[1]]
        return tuple(Window(order.index(axis)) for axis in range(rank))
    if name == "slice":
        return _slice(node, source)
    if name in SPLITS:
        divided = _argument(node, 2, 0) % rank
        return (
            tuple(Whole() if a == divided else Window(a) for a in range(rank)) if divided else _unknown(source, output)
        )
    if name == "stack" and len(values_of(node)) == len(node.arguments[0]):
        added = _argument(node, 1, 0) % (rank + 1)
        return tuple(Window(a + (a >= added)) for a in range(rank)) if added else _unknown(source, output)
    if name == "expand_as":
        return _aligned(source, output)
    if name == "embedding":
        return tuple(Window(a) for a in range(rank))
    if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten") and _keeps_rows(source, output):
        return _reshaping(source.shape, output.shape)
    if name == "constant_pad_nd" or (name == "pad" and _argument(node, 2, "constant") == "constant"):
        before = dict(zip(range(rank - 1, -1, -1), node.arguments[1][::2]))
        return tuple(Shifted(a, before[a]) if before.get(a) else Window(a) for a in range(rank))
    if (mode := edge_padding(node)) is not None:
        amounts = dict(zip(range(rank - 1, -1, -1), zip(node.arguments[1][::2], node.arguments[1][1::2])))
        repeats = mode == "replicate"
        return tuple(Mirrored(a, *amounts[a], repeats) if any(amounts.get(a, ())) else Window(a) for a in range(rank))
    return _unknown(source, output)


SPLITS = frozenset({"split", "split_with_sizes", "chunk"})
"""Operators with several outputs, which are parts of their input along an axis: each is read as the whole of it."""


def edge_padding(node: Node) -> str | None:
    """Return "reflect" or "replicate" where a node pads by elements of its input; None for others, and where it cuts
    some."""
    kinds = {"reflection_pad1d": "reflect", "reflection_pad2d": "reflect", "replication_pad1d": "replicate",
             "replication_pad2d": "replicate"}  # fmt: skip
    name = node.target.split(".")[1]
    mode = _argument(node, 2, "constant") if name == "pad" else kinds.get(name)
    pads = mode in ("reflect", "replicate") and min(node.arguments[1], default=0) >= 0
    return str(mode) if pads else None


def _unknown(source: TensorSpec, output: TensorSpec) -> tuple[Rule, ...]:
    """Return rules that read the whole input, but for the batch and leading axes that input and output share."""
    rules: list[Rule] = [Whole() for _ in source.shape]
    if source.batch_axis is None or output.batch_axis is None:
        return tuple(rules)
    rows_in, rows_out = source.rows_per_sample, output.rows_per_sample
    same = rows_in == rows_out
    rules[source.batch_axis] = Window(output.batch_axis) if same else Blocks(output.batch_axis, rows_in, rows_out)
    return tuple(rules)


def _keeps_rows(source: TensorSpec, output: TensorSpec) -> bool:
    rows = source.rows_per_sample == output.rows_per_sample
    return source.batch_axis == output.batch_axis == 0 and rows and 0 not in source.shape


def _reshaping(source: tuple[int, ...], output: tuple[int, ...]) -> tuple[Rule, ...]:
    """Return rules for axes that stay, are split, or are joined; where several become several others, any may need
    all."""
    rules: list[Rule] = []
    place = 0
    while len(rules) < len(source):
        first, last, begin = len(rules), len(rules) + 1, place
        before, after = source[first], output[place] if place < len(output) else 1
        place += 1
        while before != after:
            if before < after:
                before, last = before * source[last], last + 1
            else:
                after, place = after * output[place], place + 1
        while last < len(source) and place < len(output) and (source[last] == 1) != (output[place] == 1):
            last, place = last + (source[last] == 1), place + (output[place] == 1)  # goes with what is before it
        joined, split = last - first, place - begin
        if joined == 1 and split == 1 and begin < len(output):
            rules.append(Window(begin))
        elif joined == 1 and begin < len(output):
            size = before // output[begin]
            rules.append(Blocks(begin, size, 1) if size > 1 else Window(begin))
        elif split == 1 and begin < len(output):
            size = before // source[first]
            rules.append(Blocks(begin, 1, size) if size > 1 else Window(begin))
            rules.extend(Whole() for _ in range(joined - 1))
        else:
            rules.extend(Whole() for _ in range(joined))
    return tuple(rules)


def _aligned(source: TensorSpec, output: TensorSpec) -> tuple[Rule, ...]:
    """Return rules for broadcasting, which aligns axes from the right; an axis of one element serves all."""
    offset = len(output.shape) - len(source.shape)
    rules: list[Rule] = []
    for axis, extent in enumerate(source.shape):
        follows = axis + offset
        spreads = extent == 1 and axis != source.batch_axis and (
            output.shape[follows] != 1 or output.batch_axis == follows
        )  # fmt: skip
        rules.append(Whole() if spreads else Window(follows))
    return tuple(rules)


def _pair(values: Argument, count: int, default: int) -> list[Any]:
    if values is None or values == ():
        return [default] * count
    if isinstance(values, int):
        return [values] * count
    return list(values) if len(values) == count else [values[0]] * count


def _argument(node: Node, position: int, default: Argument) -> Argument:
    return node.arguments[position] if len(node.arguments) > position else default


def _convolution(
    node: Node, source: TensorSpec, output: TensorSpec, specs: Specs, weights: WeightSpecs
) -> tuple[Rule, ...]:
    spatial = len(source.shape) - 2
    transposed = "transpose" in node.target
    groups_at, dilation_at = (6, 7) if transposed else (6, 5)
    stride = _pair(_argument(node, 3, None), spatial, 1)
    dilation = _pair(_argument(node, dilation_at, None), spatial, 1)
    groups = _argument(node, groups_at, 1)
    weight = node.arguments[1]
    kernel = (weights if isinstance(weight, Weight) else specs)[weight.name].shape[2:]
    padding_argument = _argument(node, 4, 0)
    if padding_argument == "same":
        padding = [dilation[a] * (kernel[a] - 1) // 2 for a in range(spatial)]
    else:
        padding = _pair(0 if padding_argument == "valid" else padding_argument, spatial, 0)
    channels: Rule = Whole() if groups == 1 else Blocks(1, source.shape[1] // groups, output.shape[1] // groups)
    kind = Spread if transposed else Window
    windows = [kind(a + 2, kernel[a], stride[a], padding[a], dilation[a]) for a in range(spatial)]
    return (Window(0), channels, *windows)


def _pooling(node: Node, source: TensorSpec) -> tuple[Rule, ...]:
    spatial = 2 if "2d" in node.target else 1 if "1d" in node.target else 3
    lead = len(source.shape) - spatial
    kernel = _pair(node.arguments[1], spatial, 1)
    stride = _pair(_argument(node, 2, None), spatial, 0)
    stride = [s or k for s, k in zip(stride, kernel)]
    padding = _pair(_argument(node, 3, 0), spatial, 0)
    dilation = _pair(_argument(node, 4, 1), spatial, 1) if "max" in node.target else [1] * spatial
    windows = [Window(a + lead, kernel[a], stride[a], padding[a], dilation[a]) for a in range(spatial)]
    return (*(Window(a) for a in range(lead)), *windows)


def _adaptive_pooling(name: str, source: TensorSpec, output: TensorSpec) -> tuple[Rule, ...]:
    lead = len(source.shape) - (2 if "2d" in name else 1 if "1d" in name else 3)
    rules: list[Rule] = []
    for axis, (before, after) in enumerate(zip(source.shape, output.shape)):
        if axis < lead or before == after:
            rules.append(Window(axis))
        else:
            rules.append(Whole() if after == 1 else Adaptive(axis, before, after))
    return tuple(rules)


def _group_normalisation(name: str, rank: int) -> tuple[Rule, ...]:
    """Return the rules of a group norm. On maps, spatial axes are read element by element: what is summed over them
    travels apart (Op.tiling, "norm")."""
    inner = [Window(a) if rank in (4, 5) else Whole() for a in range(2, rank)]
    return (Window(0), Window(1) if name == "instance_norm" else Whole(), *inner)


def _shuffle(node: Node, rank: int) -> tuple[Rule, ...]:
    factor = node.arguments[1]
    lead = rank - 3
    channels, *inner = [(factor**2, 1), (1, factor), (1, factor)]
    if "unshuffle" in node.target:
        channels, *inner = [(1, factor**2), (factor, 1), (factor, 1)]
    blocks = [Blocks(lead + number, *sizes) for number, sizes in enumerate((channels, *inner))]
    return (*(Window(a) for a in range(lead)), *blocks)


def _resampling(node: Node, source: TensorSpec, output: TensorSpec) -> tuple[Rule, ...]:
    spatial = len(source.shape) - 2
    scales = resampling_scales(node, source.shape[2:], output.shape[2:])
    is_linear = "linear" in node.target
    aligned = is_linear and bool(node.arguments[2])
    rules: list[Rule] = [Window(0), Window(1)]
    for axis, scale in zip(range(2, 2 + spatial), scales, strict=True):
        before, after = source.shape[axis], output.shape[axis]
        if before == after:
            rules.append(Window(axis) if scale == 1 else Whole())
        elif not aligned and after % before == 0 and is_exact_factor(after // before, scale, after):
            rules.append(Blocks(axis, 1, after // before, int(is_linear)))
        else:
            rules.append(Resampled(axis, before, scale, 0.5 if is_linear and not aligned else 0.0, int(is_linear)))
    return tuple(rules)


def resampling_factors(node: Node, axes: int) -> list[float | None]:
    """Return the factors that a node has for the axes, if any."""
    factors = node.arguments[3 if "linear" in node.target else 2 :]
    if node.target.endswith(".vec"):
        factors = (factors[0] if factors else None) or ()
    return [factors[axis] if axis < len(factors) else None for axis in range(axes)]


def resampling_scales(node: Node, before: tuple[int, ...], after: tuple[int, ...]) -> list[float]:
    """Return the input elements per output element on each axis, as torch computes them."""
    if "linear" in node.target and node.arguments[2]:
        return [(a - 1) / (b - 1) if b > 1 else 0.0 for a, b in zip(before, after, strict=True)]
    factors = resampling_factors(node, len(before))
    return [1 / f if f else a / b for a, b, f in zip(before, after, factors, strict=True)]


def is_exact_factor(factor: int, scale: float, extent: int) -> bool:
    """Return whether every element is copied `factor` times, also in the rounded arithmetic of both kinds of floats."""
    if abs(scale * factor - 1) > 1e-12:
        return False
    places = torch.arange(extent)
    return all(
        bool((torch.floor(places.to(dtype) * torch.tensor(scale, dtype=dtype)) == places // factor).all())
        for dtype in (torch.float32, torch.float64)
    )


def _concatenation(node: Node, source: TensorSpec, specs: Specs) -> tuple[Rule, ...]:
    parts = [specs[part.name] for part in node.arguments[0] if isinstance(part, Value)]
    rank = len(source.shape)
    axis = _argument(node, 1, 0) % rank
    if len(parts) != len(node.arguments[0]) or sum(part.name == source.name for part in parts) != 1:
        return _unknown(source, node.outputs[0])
    offset = 0
    for part in parts:
        if part.name == source.name:
            break
        offset += part.shape[axis]
    return tuple(Shifted(a, offset) if a == axis else Window(a) for a in range(rank))


def _reduction(node: Node, rank: int) -> tuple[Rule, ...]:
    reduced = axes_of(node.arguments[1], rank)
    keeps = bool(_argument(node, 2, False))
    rules: list[Rule] = []
    follows = 0
    for axis in range(rank):
        if axis in reduced:
            rules.append(Whole())
            follows += keeps
        else:
            rules.append(Window(follows))
            follows += 1
    return tuple(rules)


def _slice(node: Node, source: TensorSpec) -> tuple[Rule, ...]:
    axis = _argument(node, 1, 0) % len(source.shape)
    start = _argument(node, 2, 0) or 0
    if not isinstance(start, int):
        return _unknown(source, node.outputs[0])
    if start < 0:
        start = max(0, start + source.shape[axis])
    step = _argument(node, 4, 1)
    rule = Window(axis, 1, step, -start) if step > 1 else Shifted(axis, -start) if start else Window(axis)
    return tuple(rule if a == axis else Window(a) for a in range(len(source.shape)))

"""Whether an operator mixes samples: whether one sample's output depends on other samples, or on its place among them.

What does not mix them can be computed by any share of the samples, each device for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from manyhands.facts.network import TensorSpec
from manyhands.graph import ops
from manyhands.graph.nodes import Argument, Node, SampleCount, Value, records_of, values_of
from manyhands.graph.sample_numbers import looks_own_rows_up

Specs = Mapping[str, TensorSpec]


def mixes_samples(
    node: Node, specs: Specs, outers: Mapping[str, int | None] | None = None, numbers: Set[str] = frozenset()
) -> bool:
    """Return whether one sample's output depends on other samples, or on its place among them (batch statistics apart).

    `outers` (rows.py) names the tensors whose samples are interleaved. An operator that works row by row leaves each
    row with its sample, however rows are ordered; where rows of different orders meet, or samples are torn apart, no
    share of the samples could compute its part. `numbers`: tensors that number samples (sample_numbers.py).
    """
    outers = outers or {}
    if any(specs[name].pairs_samples for name in values_of(node)) or any(spec.pairs_samples for spec in node.outputs):
        return True
    if node.outputs[0].name in numbers:
        return False
    if numbers & set(values_of(node)):
        return not looks_own_rows_up(node, specs, numbers)
    if any(spec.batch_axis is not None and outers.get(spec.name, 1) is None for spec in node.outputs):
        return True
    rowwise = [specs[name] for name in values_of(node) if specs[name].rows_per_sample > 1]
    if len({outers.get(spec.name, 1) for spec in rowwise}) > 1:
        return True
    if _counts_samples(node):
        return True
    if node.target == "aten.instance_norm.default" and node.arguments[3] is not None and node.arguments[5]:
        return True  # its running statistics are means over the samples
    batched = [specs[name] for name in values_of(node) if specs[name].batch_axis is not None]
    if not batched or node.updates:
        return False
    if any(spec.batch_axis is None for spec in node.outputs):
        return node.target not in ops.CREATION  # new_zeros reads the type of its source, and no element
    return batched[0].batch_axis in _axes_along(node, batched[0])


def _counts_samples(node: Node) -> bool:
    """Return whether the number of samples enters as a value (x / x.shape[0]) or numbers them (arange), not as a mere
    size."""
    counts = any(isinstance(record, SampleCount) for record in records_of(node))
    if "full" in node.target:
        value = node.arguments[2 if "new_full" in node.target else 1]
        return isinstance(value, SampleCount)
    if node.target in ops.CREATION:
        return counts and node.target.split(".")[1] in ("arange", "linspace", "eye", "scalar_tensor")
    return counts and node.target not in ops.SHAPE


def argument_at(node: Node, position: int, name: str, default: Argument = None) -> Argument:
    return node.arguments[position] if len(node.arguments) > position else node.options.get(name, default)


# Operators that work along axes: the place of the argument that says so, its name, and its meaning where it is absent.
_ALONG: dict[str, tuple[int, str, Argument]] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "prod", "logsumexp",
                     "all", "any"), (1, "dim", None)),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod",
                     "var_mean", "unfold"), (1, "dim", None)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), (2, "dim", None)),
    **dict.fromkeys(("slice_scatter", "select_scatter"), (2, "dim", 0)), "kthvalue": (2, "dim", -1),
    "sort": (1, "dim", -1), "topk": (2, "dim", -1), "cosine_similarity": (2, "dim", 1), "flip": (1, "dims", None),
    "roll": (2, "dims", None), "index_select": (1, "dim", 0), "gather": (1, "dim", 0), "scatter": (1, "dim", 0),
    "scatter_add": (1, "dim", 0), "take_along_dim": (2, "dim", None), "cat": (1, "dim", 0), "concat": (1, "dim", 0),
}  # fmt: skip


_LOOKS_UP = frozenset({"index", "index_select", "gather", "take_along_dim"})


def _axes_along(node: Node, source: TensorSpec) -> set[int]:
    """Return the axes of a node's first batched input along which it moves or combines elements."""
    rank = len(source.shape)
    name = node.target.split(".")[1]
    if name in _LOOKS_UP and node.arguments[0] != Value(source.name):
        return set()  # samples look something up in a table they share
    if name in _ALONG:
        position, key, default = _ALONG[name]
        if name in ("var", "std", "max", "min", "all", "any") and isinstance(
            argument_at(node, position, key), (bool, Value)
        ):
            return set(range(rank))  # var(unbiased), max(other)
        return axes_of(argument_at(node, position, key, default), rank)
    if name == "diagonal":
        return axes_of((argument_at(node, 2, "dim1", 0), argument_at(node, 3, "dim2", 1)), rank)
    if name in ("index", "index_put"):
        return {axis for axis, index in enumerate(node.arguments[1][:rank]) if index is not None}
    if name in ("chunk", "split", "split_with_sizes", "narrow", "slice"):
        same = all(spec.rows_per_sample == source.rows_per_sample for spec in node.outputs)
        position = 1 if name in ("narrow", "slice") else 2
        return set() if same else axes_of(argument_at(node, position, "dim", 0), rank)
    if name in ("repeat", "tile"):
        counts = node.arguments[1]
        lead = len(counts) - rank
        return {axis for axis in range(rank) if axis + lead >= 0 and counts[axis + lead] != 1}
    if name in ("vstack", "hstack"):
        return {1} if name == "hstack" and rank > 1 else {0}
    if name in ("tril", "triu"):
        return {rank - 2, rank - 1}
    if name in ("layer_norm", "rms_norm", "native_layer_norm"):
        return set(range(rank - len(node.arguments[1]), rank))
    if name == "channel_shuffle":
        return {1}
    if name in ("group_norm", "instance_norm") or (node.target in ops.CONVOLUTION | ops.RESAMPLING):
        return set(range(1, rank))
    if node.target in ops.POOLING:
        return set(range(rank - (3 if "3d" in name else 2 if "2d" in name else 1), rank))
    if node.target in ops.RECURRENT:
        return {2, 1 if argument_at(node, 8, "batch_first", False) else 0} if rank == 3 else {0, 1}
    if name == "scaled_dot_product_attention":
        return {rank - 2, rank - 1}
    return set()


def axes_of(axes_argument: Argument, rank: int) -> set[int]:
    if axes_argument is None or isinstance(axes_argument, bool):
        return set(range(rank))
    if isinstance(axes_argument, int):
        return {axes_argument % rank} if rank else set()
    if not isinstance(axes_argument, (list, tuple)):
        return set(range(rank))
    return {axis % rank for axis in axes_argument} if axes_argument else set(range(rank))

"""Lets a convolution at rest also do what follows it: an addition and an activation, while its result is in the cache.

    conv ── relu             one call
    conv ── add ── relu      one call, where what is added existed before: written over it where nothing else reads it

The numbers stay the same: they are added up and cut off as before. Only packed convolutions are fused (see `kernels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
import torch

from manyhands.facts.network import TensorSpec
from manyhands.graph import ops
from manyhands.graph.nodes import Node, Value, values_of
from manyhands.graph.packed_convolution import PackedConvolution

Call = Callable[..., Any]
_ADD, _RELU = "aten.add.Tensor", "aten.relu.default"
_POST_OPERATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    _RELU: ("relu", ()),
    "aten.relu6.default": ("hardtanh", (0.0, 6.0)),
    "aten.hardtanh.default": ("hardtanh", (-1.0, 1.0)),
    "aten.leaky_relu.default": ("leaky_relu", (0.01,)),
}
"""Activation -> its name in oneDNN, and its numbers where none are given. Only piecewise linear ones: oneDNN does not
approximate these."""
_MAKES_ITS_OWN = ops.CONVOLUTION | ops.POOLING | _POST_OPERATIONS.keys() | {_ADD}
"""Operators whose result is never a view of what they read."""


class Fused:
    """A call of a packed convolution that also adds something to its result and applies an activation."""

    def __init__(self, packed: PackedConvolution, activation: Node | None, *, overwrites: bool) -> None:
        """Create the call; with `overwrites` the result takes the place of what is added."""
        self._packed, self._overwrites = packed, overwrites
        self._post, self._numbers = _post_operation(activation) if activation is not None else ("none", [])
        self._activation = ops.resolve(activation.target) if activation is not None else None
        self._rest = activation.arguments[1:] if activation is not None else ()

    def __call__(
        self, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        packed = self._packed
        if packed.is_laid_out_for(data, weight):
            if other is None:
                return packed.convolved(data, weight, bias, self._post, self._numbers)
            if other.is_contiguous(memory_format=torch.channels_last):
                post = self._post if self._activation is not None else None
                return packed.added(data, weight, bias, other, post, overwrites=self._overwrites)
        made = packed(data, weight, bias)
        if other is not None:
            made = made + other
        return made if self._activation is None else cast(torch.Tensor, self._activation(made, *self._rest))


@dataclass(frozen=True)
class _Join:
    """A node that stands for several: it has the convolution's name, the last one's result, and as arguments input,
    weight, bias and what is added."""

    node: Node
    packed: PackedConvolution
    activation: Node | None
    other: str
    """The tensor that is added, if any."""


def fused(
    nodes: Sequence[Node], kernels: Mapping[str, Call], leaving: Collection[str], specs: Mapping[str, TensorSpec]
) -> tuple[tuple[Node, ...], dict[str, Call]]:
    """Return fewer nodes that compute the same, and the calls of those that stand for several.

    `leaving` names the values that leave the piece.
    """
    if not any(isinstance(call, PackedConvolution) for call in kernels.values()) or not _can_fuse():
        return tuple(nodes), {}
    joins, removed = _joins(nodes, kernels, leaving, specs)
    remaining = tuple(
        joins[node.name].node if node.name in joins else node for node in nodes if node.name not in removed
    )
    readers: dict[str, list[Node]] = {}
    for node in remaining:
        for name in values_of(node):
            readers.setdefault(name, []).append(node)
    made = {
        spec.name
        for node in remaining
        for spec in node.outputs
        if isinstance(kernels.get(node.name), PackedConvolution)
    }

    def is_done_with(name: str, at: Node) -> bool:
        """Return whether a result may be overwritten: it is a convolution's, this node only adds it, and nothing reads
        it, or a view of it, later."""
        reading = readers.get(name, [])
        return (
            name in made and name not in leaving and reading[-1] is at and at.arguments[0] != Value(name)
            and all(node.target in _MAKES_ITS_OWN for node in reading)
        )  # fmt: skip

    calls: dict[str, Call] = {
        name: Fused(join.packed, join.activation, overwrites=is_done_with(join.other, join.node))
        for name, join in joins.items()
    }
    return remaining, calls


def _joins(
    nodes: Sequence[Node], kernels: Mapping[str, Call], leaving: Collection[str], specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, _Join], set[str]]:
    """Return convolution -> the node that stands in its place, and the nodes that need not be run any more."""
    counts = Counter(name for node in nodes for name in values_of(node))
    reader = {name: node for node in nodes for name in values_of(node)}
    made_at = {spec.name: index for index, node in enumerate(nodes) for spec in node.outputs}
    joins: dict[str, _Join] = {}
    removed: set[str] = set()

    def only_reader(made: TensorSpec) -> Node | None:
        return reader[made.name] if counts[made.name] == 1 and made.name not in leaving else None

    for index, node in enumerate(nodes):
        packed = kernels.get(node.name)
        if not isinstance(packed, PackedConvolution):
            continue
        last, other, activation = node, "", None
        following = only_reader(node.outputs[0])
        if following is not None and (other := _added(following, node.outputs[0], specs)):
            if made_at.get(other, -1) > index:
                continue  # if a convolution makes it, that one adds this one's result
            last, following = following, only_reader(following.outputs[0])
        if following is not None and _is_line(following) and (not other or following.target == _RELU):
            last = activation = following
        if last is node:
            continue
        removed |= {reading.name for reading in (reader.get(node.outputs[0].name), activation) if reading is not None}
        bias = node.arguments[2] if len(node.arguments) > 2 else None
        arguments = (*node.arguments[:2], bias, *([Value(other)] if other else []))
        joined = msgspec.structs.replace(node, arguments=arguments, outputs=last.outputs)
        joins[node.name] = _Join(joined, packed, activation, other)
    return joins, removed


@cache
@torch.no_grad()
def _can_fuse() -> bool:
    """Return whether this build of PyTorch has the functions that are called here; it need not have them on every
    processor."""
    weight = torch.full((2, 2, 1, 1), -1.0)
    data = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    ones, onednn = [1, 1], torch.ops.mkldnn
    try:
        packed = onednn._reorder_convolution_weight(weight, [0, 0], ones, ones, 1, [1, 2, 3, 3])
        arguments = (packed, None, [0, 0], ones, ones, 1)
        cut = onednn._convolution_pointwise.default(data, *arguments, "relu", [], "")
        beside = onednn._convolution_pointwise.binary(data, 4 * data, *arguments, "add", 1.0, "relu", [], "")
        over = onednn._convolution_pointwise_.binary(4 * data, data, *arguments, "add", 1.0, None, [], "")
        return bool((cut == 0).all() and (beside == 2).all() and (over == 2).all())
    except (AttributeError, RuntimeError):
        return False


def _added(node: Node, made: TensorSpec, specs: Mapping[str, TensorSpec]) -> str:
    """Return the name of what an operator adds to `made`, of the same shape and type; '' where it does something
    else."""
    if node.target != _ADD or node.options or len(node.arguments) != 2:
        return ""
    names = [argument.name for argument in node.arguments if isinstance(argument, Value)]
    others = [name for name in names if name != made.name]
    if len(names) != 2 or len(others) != 1:
        return ""
    other = specs[others[0]]
    return other.name if (other.form, other.dtype) == (made.form, made.dtype) else ""


def _is_line(node: Node) -> bool:
    return node.target in _POST_OPERATIONS and all(isinstance(number, (int, float)) for number in node.arguments[1:])


def _post_operation(activation: Node) -> tuple[str, list[float]]:
    name, numbers = _POST_OPERATIONS[activation.target]
    numbers_written = [float(number) for number in activation.arguments[1:]]
    return name, [*numbers_written, *numbers[len(numbers_written) :]]

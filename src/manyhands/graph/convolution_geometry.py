"""The arguments of a convolution in one form, whichever of PyTorch's operators it was written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.graph.nodes import Node, Value, Weight

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


def convolution_rank(graph: Graph, node: Node) -> int:
    """Return the rank of a convolution's input and weight; 0 where they differ, or the weight is computed."""
    data, weight = node.arguments[0], node.arguments[1]
    if not isinstance(data, Value) or not isinstance(weight, Weight):
        return 0
    rank = len(graph.network.weights[weight.name].shape)
    return rank if len(graph.network.tensors[data.name].shape) == rank else 0


@dataclass(frozen=True)
class ConvolutionGeometry:
    """The arguments of aten.convolution after input, weight and bias."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    extra_padding: tuple[int, ...] = ()
    """For padding='same' with an uneven sum: zeros to add first, as F.pad takes them."""


def weight_name(node: Node) -> str:
    weight = node.arguments[1]
    assert isinstance(weight, Weight)
    return weight.name


def geometry_of(node: Node, weight_shape: Sequence[int]) -> ConvolutionGeometry:
    """Return one form for conv2d, conv2d.padding and conv_transpose2d, whose arguments differ in order and defaults."""
    axes = len(weight_shape) - 2
    arguments = [*node.arguments, *([None] * 9)]
    stride = _each(arguments[3], 1, axes)
    if "transpose" in node.target:
        return ConvolutionGeometry(
            stride=stride, padding=_each(arguments[4], 0, axes), dilation=_each(arguments[7], 1, axes), transposed=True,
            output_padding=_each(arguments[5], 0, axes), groups=arguments[6] or 1,
        )  # fmt: skip
    dilation, groups = _each(arguments[5], 1, axes), arguments[6] or 1
    padding = arguments[4]
    extra: tuple[int, ...] = ()
    if padding == "valid":
        padding = 0
    elif padding == "same":
        padding, extra = _same_padding(weight_shape[2:], dilation)
    return ConvolutionGeometry(stride, _each(padding, 0, axes), dilation, False, [0] * axes, groups, extra)


def _each(value: Any, default: int, axes: int) -> list[int]:
    """Return one number for each axis."""
    if value is None or value in ([], ()):
        return [default] * axes
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * axes if len(values) == 1 else values


def _same_padding(extents: Sequence[int], dilation: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Return the padding by the convolution itself, even on both sides, and, where the sum is odd, one more zero at the
    far end."""
    totals = [step * (extent - 1) for extent, step in zip(extents, dilation, strict=True)]
    extra = tuple(number for total in reversed(totals) for number in (0, total % 2))
    return [total // 2 for total in totals], extra if any(extra) else ()

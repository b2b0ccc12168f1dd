"""Multiply-accumulates of one operator, for one sample. Operators that only move or compare data count none."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.nodes import Argument, Node, Value, Weight

Shapes = Mapping[str, TensorSpec | WeightSpec]


def _shape(argument: Argument, shapes: Shapes) -> tuple[int, ...]:
    assert isinstance(argument, (Value, Weight))
    return shapes[("weight " if isinstance(argument, Weight) else "") + argument.name].shape


def macs(node: Node, shapes: Shapes) -> int:
    """Return an operator's multiply-accumulates for one sample; `shapes` names activations plainly and weights as
    'weight NAME'."""
    output = prod(node.outputs[0].shape)
    name = node.target.split(".")[1]
    arguments = node.arguments
    if name.startswith("conv_transpose"):
        weight = _shape(arguments[1], shapes)  # (in, out / groups, *kernel)
        return prod(_shape(arguments[0], shapes)) * prod(weight[1:])
    if node.target in ops.CONVOLUTION:
        return output * prod(_shape(arguments[1], shapes)[1:])  # (out, in / groups, *kernel)
    if name in ("linear", "matmul", "bmm", "mm", "mv", "dot"):
        return output * _shape(arguments[0], shapes)[-1]
    if name in ("addmm", "baddbmm"):
        return output * _shape(arguments[1], shapes)[-1]
    if name == "bilinear":
        return output * prod(_shape(arguments[2], shapes)[1:])
    if name == "scaled_dot_product_attention":
        query, key = _shape(arguments[0], shapes), _shape(arguments[1], shapes)
        return prod(query[:-1]) * key[-2] * (query[-1] + output // prod(query[:-1]))
    if name == "einsum":
        return _einsum(node, shapes)
    if node.target in ops.RECURRENT:
        steps = prod(_shape(arguments[0], shapes)[:-1])
        parts = arguments[2]
        return steps * sum(prod(_shape(part, shapes)) for part in parts if len(_shape(part, shapes)) == 2)
    return 0


def _einsum(node: Node, shapes: Shapes) -> int:
    """Return the product of every index's extent. Axes under '...' are counted from the right, as they broadcast."""
    equation = node.arguments[0].replace(" ", "")
    extents: dict[str, int] = {}
    for letters, operand in zip(equation.split("->")[0].split(","), node.arguments[1]):
        shape = _shape(operand, shapes)
        before, dots, after = letters.partition("...")
        hidden = len(shape) - len(before) - len(after) if dots else 0
        names = [*before, *(f"...{axis}" for axis in range(hidden, 0, -1)), *after]
        for name, extent in zip(names, shape, strict=True):
            extents[name] = max(extent, extents.get(name, 1))
    return prod(extents.values())

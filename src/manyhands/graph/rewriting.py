"""Writes a few operators of a captured graph as others that compute the same: those for which tiles have rules.

view to six axes, permute, view    pixel_unshuffle or pixel_shuffle, and a channel_shuffle for other orders
norm(x, w, b), w or b computed     norm(x) · w + b: the weights of a norm over samples are weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from manyhands.facts.network import TensorSpec, WeightSpec
from manyhands.graph.nodes import Argument, Enum, Node, Value, Weight

_AFFINE = {"aten.batch_norm.default": 1, "aten.instance_norm.default": 1, "aten.group_norm.default": 2}
"""Norm -> the place of its weight among the arguments; its bias is the next."""
_VIEWS = frozenset({"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"})
_COPIES = frozenset({"aten.clone.default", "aten.contiguous.default"})


def rewritten(nodes: Sequence[Node], inputs: Sequence[TensorSpec], weights: Sequence[WeightSpec]) -> list[Node]:
    """Return nodes that compute the same; what they no longer read is still among them."""
    specs: dict[str, TensorSpec | WeightSpec] = {spec.name: spec for spec in inputs}
    specs.update({spec.name: spec for node in nodes for spec in node.outputs})
    shapes = {**specs, **{"weight " + spec.name: spec for spec in weights}}
    makers = {node.name: node for node in nodes if not node.several and not node.updates}
    made: list[Node] = []
    for node in nodes:
        if node.target in _AFFINE and _is_computed(node, shapes):
            made += _applied(node, shapes)
        elif node.target in _VIEWS:
            made += _shuffled(node, makers, specs)
        else:
            made.append(node)
    return made


# A norm with a computed weight


def _is_computed(node: Node, shapes: Mapping[str, TensorSpec | WeightSpec]) -> bool:
    """Return whether a norm over samples has a weight or bias that was computed, as one tensor for all of them."""
    data = shapes[node.arguments[0].name] if isinstance(node.arguments[0], Value) else None
    if not isinstance(data, TensorSpec) or data.batch_axis is None:
        return False
    affine = node.arguments[_AFFINE[node.target] :][:2]
    computed = [shapes[argument.name] for argument in affine if isinstance(argument, Value)]
    return bool(computed) and all(isinstance(spec, TensorSpec) and spec.batch_axis is None for spec in computed)


def _applied(node: Node, shapes: Mapping[str, TensorSpec | WeightSpec]) -> Iterator[Node]:
    """Yield a norm without weight and bias, and these applied to its result."""
    place, (output,) = _AFFINE[node.target], node.outputs
    steps = [
        (target, argument)
        for target, argument in zip(("aten.mul.Tensor", "aten.add.Tensor"), node.arguments[place : place + 2])
        if argument is not None
    ]
    bare = (*node.arguments[:place], None, None, *node.arguments[place + 2 :])
    made = msgspec.structs.replace(output, name=f"{output.name} plain")
    yield msgspec.structs.replace(node, name=made.name, arguments=bare, outputs=(made,))
    for number, (target, argument) in enumerate(steps):
        operand: Argument = argument
        spec = shapes[("weight " if isinstance(argument, Weight) else "") + argument.name]
        spread = TensorSpec(
            f"{output.name} factor {number}", (*spec.shape, *(1,) * (len(output.shape) - 2)), spec.dtype
        )
        yield _replaced(node, "aten.view.default", (operand, spread.shape), spread)
        if spec.dtype != output.dtype:
            cast = msgspec.structs.replace(spread, name=f"{spread.name} cast", dtype=output.dtype)
            yield _replaced(node, "aten.to.dtype", (Value(spread.name), Enum(output.dtype)), cast)
            spread = cast
        is_last = number == len(steps) - 1
        after = output if is_last else msgspec.structs.replace(output, name=f"{output.name} part {number}")
        yield _replaced(node, target, (Value(made.name), Value(spread.name)), after)
        made = after


# Space to depth, and back


def _shuffled(node: Node, makers: Mapping[str, Node], specs: Mapping[str, TensorSpec | WeightSpec]) -> list[Node]:
    """Return what moves places to channels, or channels to places, as that; other views as they are."""
    copied = _maker(node, makers)
    permuted = _maker(copied, makers) if copied is not None and copied.target in _COPIES else copied
    viewed = _maker(permuted, makers) if permuted is not None else None
    if permuted is None or viewed is None or permuted.target != "aten.permute.default" or viewed.target not in _VIEWS:
        return [node]
    data = viewed.arguments[0]
    if not isinstance(data, Value):
        return [node]
    source, (middle,), (output,) = specs[data.name], viewed.outputs, node.outputs
    ranks = len(source.shape), len(middle.shape), len(output.shape)
    is_alike = all(
        isinstance(spec, TensorSpec) and spec.batch_axis == 0 and not spec.pairs_samples
        for spec in (source, middle, output)
    )
    if ranks != (4, 6, 4) or not is_alike or {source.shape[0], middle.shape[0], output.shape[0]} != {1}:
        return [node]
    order = [axis % 6 for axis in permuted.arguments[1]]
    return _to_depth(node, source, middle.shape, order) or _to_space(node, source, middle.shape, order) or [node]


def _to_depth(node: Node, source: TensorSpec | WeightSpec, middle: tuple[int, ...], order: list[int]) -> list[Node]:
    """Return the nodes that move each block of places to channels; none where that is not what is done.

    (C, H, W) ──▶ (C, h, i, w, j) ──▶ (any order of C, i and j; h, w)
    """
    _, channels, *_ = source.shape
    _, kept, rows, factor, columns, other = middle
    is_split = (kept, rows * factor, columns * other) == source.shape[1:] and factor == other
    outer, (output,) = order[1:4], node.outputs
    groups = {(1, 3, 5): 0, (3, 5, 1): channels, (5, 1, 3): channels * factor}.get((outer[0], outer[1], outer[2]))
    if not is_split or order[0] != 0 or order[4:] != [2, 4] or groups is None:
        return []
    if output.shape[1:] != (channels * factor**2, rows, columns):
        return []
    if not groups:
        return [_replaced(node, "aten.pixel_unshuffle.default", (Value(source.name), factor), output)]
    between = msgspec.structs.replace(output, name=f"{output.name} unshuffled")
    return [
        _replaced(node, "aten.pixel_unshuffle.default", (Value(source.name), factor), between),
        _replaced(node, "aten.channel_shuffle.default", (Value(between.name), groups), output),
    ]


def _to_space(node: Node, source: TensorSpec | WeightSpec, middle: tuple[int, ...], order: list[int]) -> list[Node]:
    """Return the nodes that move channels to blocks of places; none where that is not what is done.

    (any order of C, i and j; h, w) ──▶ (C, h, i, w, j) ──▶ (C, H, W)
    """
    channel, row, column = order[1], order[3], order[5]
    if (order[0], order[2], order[4]) != (0, 4, 5) or sorted((channel, row, column)) != [1, 2, 3]:
        return []
    (output,), factor, rows, columns = node.outputs, middle[row], *middle[4:]
    is_split = middle[1] * middle[2] * middle[3] == source.shape[1] and (rows, columns) == source.shape[2:]
    groups = {(1, 2, 3): 0, (3, 1, 2): factor**2, (2, 3, 1): factor}.get((channel, row, column))
    if not is_split or factor != middle[column] or groups is None:
        return []
    if output.shape[1:] != (middle[channel], rows * factor, columns * factor):
        return []
    if not groups:
        return [_replaced(node, "aten.pixel_shuffle.default", (Value(source.name), factor), output)]
    between = TensorSpec(f"{output.name} shuffled", source.shape, output.dtype, 0)
    return [
        _replaced(node, "aten.channel_shuffle.default", (Value(source.name), groups), between),
        _replaced(node, "aten.pixel_shuffle.default", (Value(between.name), factor), output),
    ]


def _maker(node: Node, makers: Mapping[str, Node]) -> Node | None:
    """Return the node that made what another reads first."""
    first = node.arguments[0]
    return makers.get(first.name) if isinstance(first, Value) else None


def _replaced(node: Node, target: str, arguments: tuple[Argument, ...], output: TensorSpec) -> Node:
    return msgspec.structs.replace(
        node, name=output.name, target=target, arguments=arguments, options={}, outputs=(output,), in_place=False
    )

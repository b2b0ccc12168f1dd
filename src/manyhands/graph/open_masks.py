"""Leaves out the mask of an attention that lets every place through, whatever the data and its length are.

Encoders of transformers ask for each pair of places whether their numbers are at least 0. In a module's own run a look
at the values finds that all are, and attention gets no mask; torch.export cannot look, so the mask stays in the graph,
and with it passes over all scores forward and backward.

    arange(n) ── + 0 ── unsqueeze ── ≥ 0 ── expand ── attention          attention without a mask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from manyhands.graph.nodes import Argument, Node, Value

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASK = 3
"""The place of the mask among an attention's arguments."""
_SAME_ELEMENTS = frozenset({
    "aten.alias.default", "aten.clone.default", "aten.contiguous.default", "aten.expand.default",
    "aten.permute.default", "aten.reshape.default", "aten.select.int", "aten.slice.Tensor", "aten.squeeze.dim",
    "aten.transpose.int", "aten.unsqueeze.default", "aten.view.default",
})  # fmt: skip
"""Operators whose elements are all elements of their first argument."""
_BOTH = frozenset({"aten.bitwise_and.Tensor", "aten.logical_and.default", "aten.__and__.Tensor"})


def without_open_masks(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes that compute the same; what makes a mask that is left out is still among them."""
    makers = {spec.name: node for node in nodes for spec in node.outputs}
    return [_without_mask(node) if _has_open_mask(node, makers) else node for node in nodes]


def _has_open_mask(node: Node, makers: Mapping[str, Node]) -> bool:
    return node.target == _ATTENTION and len(node.arguments) > _MASK and _is_open(node.arguments[_MASK], makers)


def _without_mask(node: Node) -> Node:
    arguments = (*node.arguments[:_MASK], None, *node.arguments[_MASK + 1 :])
    return msgspec.structs.replace(node, arguments=arguments)


def _is_open(argument: Argument, makers: Mapping[str, Node]) -> bool:
    """Return whether every element of a mask is true."""
    node = makers.get(argument.name) if isinstance(argument, Value) else None
    if node is None or node.outputs[0].dtype != "bool":
        return False
    if node.target in _SAME_ELEMENTS:
        return _is_open(node.arguments[0], makers)
    if node.target in _BOTH:
        return all(_is_open(part, makers) for part in node.arguments[:2])
    if node.target == "aten.ge.Scalar":
        least, bound = _least_element(node.arguments[0], makers), node.arguments[1]
        return least is not None and isinstance(bound, (int, float)) and least >= bound
    return False


def _least_element(argument: Argument, makers: Mapping[str, Node]) -> int | None:
    """Return a number that no element of a tensor of whole numbers is below; None: that is not known without data."""
    node = makers.get(argument.name) if isinstance(argument, Value) else None
    if node is None or not node.outputs[0].dtype.startswith("int"):
        return None
    if node.target in _SAME_ELEMENTS:
        return _least_element(node.arguments[0], makers)
    if node.target == "aten.arange.default":
        return 0
    if node.target == "aten.arange.start":
        start = node.arguments[0]
        return start if isinstance(start, int) else None
    if node.target == "aten.add.Tensor" and not node.options and isinstance(node.arguments[1], int):
        least = _least_element(node.arguments[0], makers)
        return None if least is None else least + node.arguments[1]
    return None

"""Random tensors that a module asks for by size, as torch.rand(n, 1): a tensor of that size, and a draw like it.

So every random operator of a graph draws for the samples of a tensor, by counter (random_ops.py), on any device.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from manyhands.graph.conversion import Conversion, module_of
from manyhands.graph.nodes import Argument, Node, Value
from manyhands.graph.sizes import spec_of
from manyhands.graph.source_lines import place_of

DRAWN_BY_SIZE = {"aten.rand.default": "aten.rand_like.default", "aten.randn.default": "aten.randn_like.default"}


def drawn_like(
    name: str, target: str, arguments: tuple[Argument, ...], options: dict[str, Argument], value: Any, node: Any,
    state: Conversion,
) -> tuple[str, tuple[Argument, ...], dict[str, Argument]]:  # fmt: skip
    """Add a tensor of the size that is asked for, and return the random operator that draws like it."""
    where = place_of(node)
    spec = structs.replace(spec_of(name, value, where), name=f"{name}.size")
    state.add(
        Node(spec.name, "aten.zeros.default", (arguments[0],), dict(options), (spec,), module=module_of(node, state),
             where=where, without_gradient=state.without_gradient)
    )  # fmt: skip
    state.root[spec.name] = spec.name
    return DRAWN_BY_SIZE[target], (Value(spec.name),), dict(options)

"""Random tensors that a module asks for by size, as torch.rand(n, 1): a tensor of that size, and a draw like it.

So every random operator of a graph draws for the samples of a tensor, by counter (random_ops.py), on any device.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.conversion import Conversion, module_of
from manyhands.graph.nodes import Argument, Node, Value
from manyhands.graph.sizes import at, spec_of
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


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "ceil", "round", "trunc", "sign"})


def note_uniform(node: Node, state: Conversion) -> None:
    """Note a node that makes uniform random numbers, or adds a number to them."""
    name, first = node.outputs[0].name, node.arguments[0] if node.arguments else None
    if not isinstance(first, Value):
        return
    if node.target == "aten.rand_like.default":
        state.uniform[name] = (first.name, 0.0)
    elif node.target in ("aten.add.Tensor", "aten.add.Scalar") and first.name in state.uniform:
        like, offset = state.uniform[first.name]
        if isinstance(node.arguments[1], (int, float)) and not node.options:
            state.uniform[name] = (like, offset + node.arguments[1])


def coin(
    target: str, arguments: tuple[Argument, ...], where: str, state: Conversion
) -> tuple[str, tuple[Argument, ...]]:
    """Return `floor(p + uniform)`, as stochastic depth is often written, as the coin of probability p that it is.

    At rest a random operator is its expectation, and the expectation of a coin is p: that of a comparison of random
    numbers is not the comparison of their expectation, so any other is refused.
    """
    first = arguments[0] if arguments else None
    if not isinstance(first, Value) or first.name not in state.uniform:
        return target, arguments
    like, offset = state.uniform[first.name]
    name = target.split(".")[1]
    if name == "floor" and 0 < offset < 1:
        return "aten.bernoulli.p", (Value(like), float(offset))
    if name == "floor" or name in _COMPARISONS:
        raise CaptureFailed(
            f"{name} of uniform random numbers has no value at rest, where nothing is drawn.{at(where)}",
            hint="Draw coins: x.new_empty(shape).bernoulli_(p), or torch.floor(p + torch.rand(shape)).",
        )
    return target, arguments

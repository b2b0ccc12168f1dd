"""Random tensors that a module asks for by size, as torch.rand(n, 1): a tensor of that size, and a draw like it.

So every random operator of a graph draws for the samples of a tensor, by counter (random_ops.py), on any device.
"""

from __future__ import annotations

import math
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


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "ceil", "floor", "round", "trunc", "sign"})
_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "neg"})


def note_uniform(node: Node, state: Conversion) -> None:
    """Note a node that makes uniform random numbers, or computes with them: what was added, or not a number."""
    name, first = node.outputs[0].name, node.arguments[0] if node.arguments else None
    if node.target == "aten.rand_like.default" and isinstance(first, Value):
        state.uniform[name] = (first.name, 0.0)
    elif node.target.split(".")[1] in _ARITHMETIC and (drawn := _drawn(node.arguments, state)):
        like, offset = state.uniform[drawn]
        is_sum = node.target in ("aten.add.Tensor", "aten.add.Scalar") and first == Value(drawn) and not node.options
        number = node.arguments[1] if is_sum else None
        state.uniform[name] = (like, offset + number if isinstance(number, (int, float)) else math.nan)


def coin(
    target: str, arguments: tuple[Argument, ...], where: str, state: Conversion
) -> tuple[str, tuple[Argument, ...]]:
    """Return `floor(p + uniform)`, as stochastic depth is often written, as the coin of probability p that it is.

    At rest a random operator is its expectation, and the expectation of a coin is p: that of a comparison of random
    numbers is not the comparison of their expectation, so any other is refused.
    """
    name = target.split(".")[1]
    drawn = _drawn(arguments, state) if name in _COMPARISONS else ""
    if not drawn:
        return target, arguments
    like, offset = state.uniform[drawn]
    if name == "floor" and 0 < offset < 1:
        return "aten.bernoulli.p", (Value(like), float(offset))
    raise CaptureFailed(
        f"{name} of uniform random numbers has no value at rest, where nothing is drawn.{at(where)}",
        hint="Draw coins: x.new_empty(shape).bernoulli_(p), or torch.floor(p + torch.rand(shape)).",
    )


def _drawn(arguments: tuple[Argument, ...], state: Conversion) -> str:
    """Return the first argument that holds uniform random numbers, or what was computed with them; else ""."""
    return next((value.name for value in arguments if isinstance(value, Value) and value.name in state.uniform), "")

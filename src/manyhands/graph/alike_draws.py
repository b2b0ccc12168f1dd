"""A module made to draw the random numbers that its captured graph draws, so that the two can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node
from manyhands.graph.random_ops import RANDOM_CALLS, draw_like


class OtherDraws(Exception):
    """The module drew random numbers which no node of the graph draws next."""


class AlikeDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random operators give what the graph's nodes draw, one after another."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = [node for node in reversed(graph.nodes) if _draws(node)]
        """The nodes that draw, the next one last."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags or _drops_nothing(function, arguments, options):
            return function(*arguments, **(options or {}))
        if _is_one_number(function, arguments) and not self._draws_next(tuple(arguments[0])):
            return function(*arguments, **(options or {}))
        node = self._left.pop() if self._left else None
        drawn = draw_like(node, str(function), arguments) if node is not None else None
        if drawn is None:
            raise OtherDraws
        return arguments[0].copy_(drawn) if function._schema.name.endswith("_") else drawn

    def _draws_next(self, shape: tuple[int, ...]) -> bool:
        return bool(self._left) and self._left[-1].outputs[0].shape == shape

    def check_all_drawn(self) -> None:
        if self._left:
            raise OtherDraws


def _is_one_number(function: Any, arguments: Any) -> bool:
    """Return whether an operator draws one number, of which the graph has no node if all that it does is to be compared
    where every number decides alike (drawn_numbers.py)."""
    return str(function) == "aten.rand.default" and tuple(arguments[0]) in ((), (1,))


def _drops_nothing(function: Any, arguments: Any, options: Any) -> bool:
    """Return whether an operator draws only for its dropout, and that is 0: attention."""
    place = next((i for i, a in enumerate(function._schema.arguments) if a.name == "dropout_p"), None)
    if place is None:
        return False
    usual = function._schema.arguments[place].default_value
    return bool((arguments[place] if place < len(arguments) else (options or {}).get("dropout_p", usual)) == 0)


def _draws(node: Node) -> bool:
    """Return whether torch draws random numbers at a node: not for a dropout of everything."""
    random = RANDOM_CALLS.get(node.target)
    if random is None or not random.draws(node, training=True):
        return False
    return random.probability is None or float(node.arguments[random.probability]) < 1

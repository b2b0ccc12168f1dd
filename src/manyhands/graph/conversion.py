"""The conversion of an exported program while it is under way: its input, and what it has made so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manyhands.facts.network import TensorSpec
from manyhands.graph.nodes import Argument, Node, values_of, weights_of
from manyhands.graph.rows import outer_of

WEIGHT_MARK = "weight "  # before a weight's name, where it is the memory that a value shares


@dataclass(frozen=True)
class Exported:
    """The exported program and the facts of its module that the conversion needs."""

    program: Any
    name: str
    input_names: list[str]
    input_tree: Any
    output_tree: Any
    granularity: str
    wrappers: tuple[str, ...] = ("inner.",)
    """Prefixes before the names of the module's own weights and children; the first that fits is removed."""
    assigned: tuple[str, ...] = ()
    """Buffers that forward assigned anew; the program's last outputs are their new values."""


@dataclass
class Conversion:
    """The state of a conversion under way."""

    nodes: list[Node] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    """Name in the exported program -> what stands for it in the Graph."""
    root: dict[str, str] = field(default_factory=dict)
    """Value -> the value, or 'weight NAME', whose memory it may share."""
    views: dict[str, tuple[str, Node]] = field(default_factory=dict)
    """View -> the value that it shows, and the node that made it."""
    latest: dict[str, str | None] = field(default_factory=dict)
    """Value whose memory was written -> the value that now has its content; None: to be made anew (view_writes.py)."""
    uniform: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Value -> the tensor that it draws a uniform number like, and what was added to that (random_nodes.py)."""
    numbers: int = 0
    prefix: str = ""
    """The prefix of names inside a sub-graph, which has its own."""
    buffers: set[str] = field(default_factory=set)
    weight_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    wrappers: tuple[str, ...] = ()
    without_gradient: bool = False
    autocast: Any = None
    """The lower precision of the region under torch.autocast; None: not in one."""
    casts: dict[tuple[str, str], str] = field(default_factory=dict)
    """(weight, type) -> its cast in this region."""
    with_gradient: set[str] = field(default_factory=set)
    """Values, and 'weight NAME', through which gradients may flow."""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    outers: dict[str, int] = field(default_factory=dict)
    """The outer factor (rows.py) of values whose samples are interleaved."""

    def count(self) -> int:
        """Return a number that no other node was given."""
        self.numbers += 1
        return self.numbers

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        if node.updates:
            return
        self.specs.update({spec.name: spec for spec in node.outputs})
        reads = {*values_of(node), *(WEIGHT_MARK + name for name in weights_of(node))}
        if not self.without_gradient and node.target != "aten.detach.default" and reads & self.with_gradient:
            self.with_gradient.update(spec.name for spec in node.outputs)
        outer = outer_of(node, self.specs, self.outers)
        if outer != 1:
            self.outers.update((spec.name, outer or spec.rows_per_sample) for spec in node.outputs)


def own_name(name: str, wrappers: tuple[str, ...]) -> str:
    """Return a name in the wrapper module without the wrapper's prefix."""
    return next((name.removeprefix(prefix) for prefix in wrappers if name.startswith(prefix)), name)


def module_of(node: Any, state: Conversion) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return own_name(list(stack.values())[-1][0] + ".", state.wrappers).rstrip(".") if stack else ""

"""Reads a document into a Graph without weights. Input is assumed to be hostile.

Sizes, names, records and the types of arguments are checked here, before anything is allocated or run; shapes are
checked by check.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec

from manyhands.facts.decode import converted
from manyhands.facts.errors import BadGraph
from manyhands.facts.network import DTYPE_BYTES, LossCombination, TensorSpec, WeightSpec
from manyhands.graph import ops
from manyhands.graph.argument_types import check_types
from manyhands.graph.chain import GRANULARITIES
from manyhands.graph.cumulative_norms import MOMENTUM
from manyhands.graph.graph import Graph
from manyhands.graph.limits import (
    DEEPEST_NESTING,
    LARGEST_LIST,
    LARGEST_NODES,
    LARGEST_WEIGHT_BYTES,
    LARGEST_WEIGHTS,
    check_count,
    check_integer,
    check_name,
    check_tensor,
    check_text,
    refuse,
)
from manyhands.graph.nodes import Argument, Enum, Node, SampleCount, Special, Value, Weight, values_of, weights_of
from manyhands.graph.trees import tree_leaves

VERSION = 1
LOSS_PREFIX = "__loss__/"
"""The prefix of the names of the loss's own weights, where they lie beside the network's."""
_RECORDS: dict[str, type[Value] | type[Weight] | type[SampleCount] | type[Enum] | type[Special]] = {
    "value": Value, "weight": Weight, "samples": SampleCount, "enum": Enum, "float": Special,
}  # fmt: skip
_ENUMS = frozenset(DTYPE_BYTES) | frozenset(ops.MEMORY_FORMATS)
# Where a tensor lives is decided where the graph is run; 'out' and 'generator' would reach around it.
_REFUSED_OPTIONS = frozenset({"device", "pin_memory", "layout", "out", "generator"})


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    target: str
    arguments: list[Any]
    options: dict[str, Any]
    outputs: list[TensorSpec]
    several: bool
    in_place: bool
    updates: str
    module: str
    where: str
    without_gradient: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    name: str
    granularity: str
    inputs: list[TensorSpec]
    input_tree: list[Any]
    output_tree: Any
    nodes: list[_Node]
    weights: list[WeightSpec]
    aliases: dict[str, str]
    loss: dict[str, Any] | None
    loss_combination: str = ""
    penalties: list[str] = []
    carried: list[str] = []


def weights_in(graph: Graph) -> dict[str, WeightSpec]:
    """Return every weight of the graph and its loss under the name it is stored by."""
    specs = {spec.name: spec for spec in graph.weights}
    if graph.loss is not None:
        for spec in graph.loss.weights:
            key = LOSS_PREFIX + spec.name
            if key in specs:
                raise BadGraph(f"Weight {key!r:.120} is named like a weight of the loss.")
            specs[key] = spec
    return specs


def read_document(document: object) -> Graph:
    """Return the graph without weights: sizes, names, records and types of arguments are checked, shapes are not
    yet."""
    try:
        graph = _graph(document, is_loss=False)
    except (ValueError, RecursionError, OverflowError) as error:  # e.g. numbers too long to be printed
        refuse("document", f"{error}"[:200])
    total = sum(spec.bytes for spec in weights_in(graph).values())
    if total > LARGEST_WEIGHT_BYTES:
        refuse("weights", f"{total} bytes; at most {LARGEST_WEIGHT_BYTES} are taken")
    return graph


def _graph(document: object, *, is_loss: bool) -> Graph:
    try:
        raw = converted(document, _Document)
    except (msgspec.ValidationError, RecursionError, TypeError, ValueError, OverflowError) as error:
        refuse("document", f"{error}"[:400])
    if raw.version != VERSION:
        refuse("version", f"{raw.version}; this manyhands reads version {VERSION}")
    check_text(raw.name, "name")
    if raw.granularity not in GRANULARITIES:
        refuse("granularity", f"{raw.granularity!r:.80} is none of {', '.join(GRANULARITIES)}")
    check_count(len(raw.nodes), LARGEST_NODES, "nodes")
    check_count(len(raw.weights), LARGEST_WEIGHTS, "weights")
    check_count(len(raw.aliases), LARGEST_WEIGHTS, "aliases")
    weights = _weights(raw.weights)
    for alias, name in raw.aliases.items():
        check_name(alias, f"alias {alias!r:.80}")
        if alias in weights or name not in weights:
            refuse(f"alias {alias!r:.80}", f"stands for {name!r:.80}; it must be a new name for a known weight")
    tensors = _inputs(raw, weights, is_loss)
    nodes = _nodes(raw.nodes, tensors, weights)
    for place, leaves in (("output_tree", _leaves(raw.output_tree, "output_tree")), ("penalties", raw.penalties)):
        for leaf in leaves:
            if leaf not in tensors:
                refuse(place, f"{leaf!r:.80} is no tensor of the graph")
    written = {node.updates for node in nodes if node.updates}
    for name in raw.carried:
        if name not in written or raw.carried.count(name) > 1:
            refuse("carried", f"{name!r:.80} must be a buffer that a node writes, named once")
    if raw.loss is not None and is_loss:
        refuse("loss", "a loss has no loss of its own")
    return Graph(
        name=raw.name,
        inputs=tuple(raw.inputs),
        input_tree=raw.input_tree,
        output_tree=raw.output_tree,
        nodes=nodes,
        weights=tuple(raw.weights),
        aliases=raw.aliases,
        state={},
        granularity=raw.granularity,
        loss=None if raw.loss is None else _graph(raw.loss, is_loss=True),
        loss_combination=_loss_combination(raw),
        penalties=tuple(raw.penalties),
        carried=tuple(raw.carried),
    )


def _loss_combination(raw: _Document) -> LossCombination | Literal[""]:
    """Return how the loss combines over samples; where a document does not say so, its samples may not be shared
    out."""
    if raw.loss is None:
        if raw.loss_combination:
            refuse("loss_combination", f"{raw.loss_combination!r:.80} of a graph without a loss")
        return ""
    choices: tuple[LossCombination, ...] = get_args(LossCombination)
    for choice in choices:
        if raw.loss_combination == choice:
            return choice
    if raw.loss_combination:
        refuse("loss_combination", f"{raw.loss_combination!r:.80} is none of {', '.join(choices)}")
    return "whole"


def _weights(specs: list[WeightSpec]) -> dict[str, WeightSpec]:
    by_name: dict[str, WeightSpec] = {}
    for spec in specs:
        place = f"weight {spec.name!r:.80}"
        check_name(spec.name, place)
        if spec.name in by_name:
            refuse(place, "is named twice")
        check_tensor(spec, place)
        if spec.trainable and (spec.buffer or not spec.dtype.startswith(("float", "bfloat", "complex"))):
            refuse(place, f"cannot be trained (buffer={spec.buffer}, dtype={spec.dtype})")
        by_name[spec.name] = spec
    return by_name


def _inputs(raw: _Document, weights: Mapping[str, WeightSpec], is_loss: bool) -> dict[str, TensorSpec]:
    """Return the graph's inputs by name; they must be the leaves of the input tree."""
    tensors: dict[str, TensorSpec] = {}
    check_count(len(raw.inputs), LARGEST_LIST, "inputs")
    for spec in raw.inputs:
        place = f"input {spec.name!r:.80}"
        _check_output(spec, tensors, place)
        if spec.batch_axis is not None and spec.rows_per_sample != 1:
            refuse(place, f"has {spec.rows_per_sample} rows per sample; an input has 1")
        if spec.pairs_samples and not is_loss:
            refuse(place, f"has a second_batch_axis, {spec.second_batch_axis}; what is fed has one axis of samples")
    if not any(spec.batch_axis is not None for spec in raw.inputs):
        refuse("inputs", "none has a batch axis")
    tree = raw.input_tree
    if len(tree) != 2 or not isinstance(tree[0], list) or not isinstance(tree[1], dict):
        refuse("input_tree", "must be a list of positional inputs and a dict of keyword inputs")
    leaves = _leaves(tree, "input_tree")
    if sorted(leaves) != sorted(tensors):
        refuse("input_tree", f"its leaves {leaves!r:.160} are not the inputs {list(tensors)!r:.160}, each once")
    return tensors


def _nodes(raw: list[_Node], tensors: dict[str, TensorSpec], weights: Mapping[str, WeightSpec]) -> tuple[Node, ...]:
    """Return the nodes in order, and add what they make to `tensors`."""
    nodes: list[Node] = []
    names: set[str] = set()
    for raw_node in raw:
        place = f"node {raw_node.name!r:.80}"
        check_name(raw_node.name, place)
        if raw_node.name in names:
            refuse(place, "is named twice")
        names.add(raw_node.name)
        node = _node(raw_node, place)
        for name in values_of(node):
            if name not in tensors:
                refuse(place, f"reads {name!r:.80}, which no node before it makes")
        for name in weights_of(node):
            if name not in weights:
                refuse(place, f"reads weight {name!r:.80}, which the graph does not have")
        _check_writes(node, weights, place)
        target = {} if node.updates else tensors  # what a buffer's update returns is not there in evaluation
        for spec in node.outputs:
            if spec.name in tensors:
                refuse(place, f"makes {spec.name!r:.80}, which is already made")
            _check_output(spec, target, place)
        nodes.append(node)
    return tuple(nodes)


def _node(raw: _Node, place: str) -> Node:
    if not raw.target.isascii() or raw.target not in ops.ALLOWED or ops.resolve(raw.target) is None:
        refuse(place, f"operator {raw.target!r:.80} is not on the list of operators manyhands runs")
    for text, field in ((raw.module, "module"), (raw.where, "where"), (raw.updates, "updates")):
        check_text(text, f"{place}, {field}")
    refused = _REFUSED_OPTIONS.intersection(raw.options)
    if refused:
        refuse(place, f"option {sorted(refused)[0]!r} is not taken")
    schema = ops.resolve(raw.target)._schema
    returns = schema.returns
    is_list = len(returns) > 1 or str(returns[0].type) != "Tensor"
    check_count(len(raw.outputs), LARGEST_LIST, f"{place}, outputs")
    count = len(returns) if len(returns) > 1 else len(raw.outputs) if is_list else 1
    if raw.several != is_list or len(raw.outputs) != count or not raw.outputs:
        refuse(place, f"says {len(raw.outputs)} outputs (several={raw.several}); {raw.target} returns "
                f"{count or 'some'} (several={is_list})")  # fmt: skip
    room = [LARGEST_LIST]
    arguments = tuple(_argument(item, room, 0, raw.target, place) for item in raw.arguments)
    options = {key: _argument(item, room, 0, raw.target, place) for key, item in raw.options.items()}
    node = Node(raw.name, raw.target, arguments, options, tuple(raw.outputs), is_list, raw.in_place, raw.updates,
                raw.module, raw.where, raw.without_gradient)  # fmt: skip
    check_types(node, place)
    return node


def _argument(raw: Any, room: list[int], depth: int, target: str, place: str) -> Argument:
    """Return a literal, a list or a record; `room` counts down the items a node may still have."""
    room[0] -= 1
    if room[0] < 0 or depth > DEEPEST_NESTING:
        limit = f"{LARGEST_LIST} items" if room[0] < 0 else f"{DEEPEST_NESTING} lists inside each other"
        refuse(place, f"its arguments hold more than {limit}")
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, int):
        check_integer(raw, target, place)
        return raw
    if isinstance(raw, float):
        if not math.isfinite(raw):
            refuse(place, f"{raw} must be written as a record")
        return raw
    if isinstance(raw, str):
        check_text(raw, place)
        return raw
    if isinstance(raw, (list, tuple)):
        return tuple(_argument(item, room, depth + 1, target, place) for item in raw)
    if isinstance(raw, dict):
        return _record(raw, target, place)
    refuse(place, f"an argument is a {type(raw).__name__}")


def _record(raw: dict[Any, Any], target: str, place: str) -> Argument:
    tag = raw.get("is")
    kind = _RECORDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        refuse(place, f"a record is {tag!r:.80}; known: {', '.join(_RECORDS)}")
    if len(raw) != 2:
        refuse(place, f"a {tag} record has {len(raw)} fields, not 2")
    try:
        record = converted(raw, kind)
    except (msgspec.ValidationError, RecursionError, TypeError, ValueError, OverflowError) as error:
        refuse(place, f"a {tag} record: {error}"[:300])
    if isinstance(record, SampleCount):
        check_integer(record.factor, target, place)
    elif isinstance(record, Enum):
        if record.name not in _ENUMS:
            refuse(place, f"constant {record.name!r:.80} is no dtype or memory format")
    elif isinstance(record, Special) and record.text not in ("inf", "-inf", "nan"):
        refuse(place, f"number {record.text!r:.80} is none of inf, -inf, nan")
    return record


def _check_writes(node: Node, weights: Mapping[str, WeightSpec], place: str) -> None:
    first = node.arguments[0] if node.arguments else None
    if bool(node.updates) != (node.target in ops.BUFFER_UPDATE):
        refuse(place, f"{node.target} with updates={node.updates!r:.80}; exactly the writing operators update")
    if node.updates and (first != Weight(node.updates) or not weights[node.updates].buffer):
        refuse(place, f"updates {node.updates!r:.80}, which must be its first argument and a buffer")
    if node.in_place and not isinstance(first, Value):
        refuse(place, "is said to write in place, but its first argument is no tensor of the graph")
    if node.target not in ("aten.batch_norm.default", "aten.instance_norm.default"):
        return
    if len(node.arguments) != 9 or node.options:
        refuse(place, f"{node.target.split('.')[1]} has {len(node.arguments)} arguments, not 9")
    for statistic in node.arguments[3:5]:
        if statistic is not None and not (isinstance(statistic, Weight) and weights[statistic.name].buffer):
            refuse(place, "the running statistics of a normalisation must be buffers")
    momentum = node.arguments[MOMENTUM]
    if isinstance(momentum, Weight):
        counter = weights[momentum.name]
        if not counter.buffer or counter.shape or counter.dtype != "int64":
            refuse(place, "what counts the batches of a normalisation must be a buffer of one whole number")


def _check_output(spec: TensorSpec, tensors: dict[str, TensorSpec], place: str) -> None:
    check_name(spec.name, place)
    if spec.name in tensors:
        refuse(place, f"{spec.name!r:.80} is named twice")
    check_tensor(spec, place)
    if spec.batch_axis is not None and not 0 <= spec.batch_axis < len(spec.shape):
        refuse(place, f"batch_axis {spec.batch_axis} of a tensor with {len(spec.shape)} axes")
    second = spec.second_batch_axis
    if second is not None and (spec.batch_axis is None or not spec.batch_axis < second < len(spec.shape)):
        axes = f"batch_axis {spec.batch_axis}, of a tensor with {len(spec.shape)} axes"
        refuse(place, f"second_batch_axis {second} beside {axes}")
    tensors[spec.name] = spec


def _leaves(tree: Any, place: str) -> list[str]:
    room = [LARGEST_LIST]

    def visit(item: Any, depth: int) -> None:
        room[0] -= 1
        if room[0] < 0 or depth > DEEPEST_NESTING:
            limit = f"{LARGEST_LIST} items" if room[0] < 0 else f"{DEEPEST_NESTING} levels"
            refuse(place, f"holds more than {limit}")
        if isinstance(item, (list, dict)):
            parts: Iterable[Any] = item.values() if isinstance(item, dict) else item
            for key in item if isinstance(item, dict) else ():
                if not isinstance(key, str):
                    refuse(place, f"a key is a {type(key).__name__}")
                check_text(key, place)
            for part in parts:
                visit(part, depth + 1)
        elif not isinstance(item, str):
            refuse(place, f"a leaf is a {type(item).__name__}")

    visit(tree, 0)
    leaves = list(tree_leaves(tree))
    if not leaves:
        refuse(place, "holds no tensor")
    return leaves

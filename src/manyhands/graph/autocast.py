"""The casts that torch.autocast makes, as operators of the graph.

torch.export keeps a region under autocast as a sub-graph whose operators have the types that autocast gave them, but
not the casts. An operator ran as it is, with its floating-point tensors in the lower precision, or with them in
float32: the first of these that gives the type of its result is what autocast did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from manyhands.facts.precision import SUMMED_IN
from manyhands.graph import ops
from manyhands.graph.conversion import Conversion, module_of
from manyhands.graph.decompose import may_be_cast, typed
from manyhands.graph.nodes import Argument, Enum, Node, Value, Weight, values_of
from manyhands.graph.precision import left
from manyhands.graph.sizes import dtype_name, spec_of
from manyhands.graph.source_lines import place_of

CAST = "aten.to.dtype"


def with_casts(node: Any, arguments: tuple[Argument, ...], state: Conversion) -> tuple[Argument, ...]:
    """Return the arguments of an operator under autocast, cast by nodes of their own where autocast casts them."""
    dtype = cast_type(node, state)
    if dtype is None:
        return arguments
    leaves, tree = tree_flatten(node.args)
    records, records_tree = tree_flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, (Value, Weight)))
    assert len(leaves) == len(records), (tree, records_tree)
    cast = [with_cast(leaf, record, dtype, node, state) for leaf, record in zip(leaves, records)]
    return tuple(tree_unflatten(cast, records_tree))


def with_cast(leaf: Any, record: Argument, dtype: torch.dtype, node: Any, state: Conversion) -> Argument:
    """Return one argument of an operator, cast by a node of its own where autocast casts it to a type."""
    return _cast(record, leaf.meta["val"], dtype, node, state) if _is_cast(leaf, dtype) else record


def early_casts(nodes: list[Node], outputs: Collection[str]) -> list[Node]:
    """Return the nodes with each cast to fewer bytes right after what it casts, where nothing else reads that: what
    travels between two devices is then the smaller tensor."""
    readers = Counter(name for node in nodes for name in values_of(node))
    makers = {spec.name: node.name for node in nodes for spec in node.outputs if not node.updates}
    after: dict[str, list[Node]] = {}
    for node in nodes:
        if _is_early(node, readers, outputs) and node.arguments[0].name in makers:
            after.setdefault(makers[node.arguments[0].name], []).append(node)
    early = {node.name for moved in after.values() for node in moved}
    return [each for node in nodes if node.name not in early for each in (node, *_followers(node, after))]


def _followers(node: Node, after: Mapping[str, list[Node]]) -> Iterator[Node]:
    for cast in after.get(node.name, ()):
        yield cast
        yield from _followers(cast, after)


def _is_early(node: Node, readers: Mapping[str, int], outputs: Collection[str]) -> bool:
    """Return whether a node is a cast to fewer bytes of a tensor of samples that nothing else reads."""
    if node.target != CAST or not isinstance(node.arguments[0], Value):
        return False
    name, made = node.arguments[0].name, node.outputs[0]
    return made.dtype in SUMMED_IN and made.batch_axis is not None and readers[name] == 1 and name not in outputs


def early_places(nodes: Sequence[Node], outputs: Collection[str]) -> frozenset[int]:
    """Return the places of the casts that `early_casts` has put after what they cast: no cut comes between."""
    readers = Counter(name for node in nodes for name in values_of(node))
    made: set[str] = set()
    places = set[int]()
    for place, node in enumerate(nodes):
        is_next = _is_early(node, readers, outputs) and node.arguments[0].name in made
        places.update([place] if is_next else ())
        made = {*(made if is_next else ()), *(spec.name for spec in node.outputs)}
    return frozenset(places)


def cast_type(node: Any, state: Conversion) -> torch.dtype | None:
    """Return the type to which autocast casts an operator's tensors; None: it does not, or there is no autocast."""
    lower = state.autocast
    if lower is None:
        return None
    expected = _dtypes(node.meta["val"])
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:  # tensors of plain sizes: to try an operator on symbols would fix them
        args, kwargs = tree_map(_sized, (node.args, node.kwargs))
    types = {leaf.dtype for leaf in tree_flatten((args, kwargs))[0] if may_be_cast(leaf)}
    is_mixed = len(types) > 1 and str(node.target) not in ops.NORMALISATION
    for dtype in (lower, None, torch.float32) if is_mixed else (None, lower, torch.float32):
        try:
            with mode, torch.no_grad(), left():
                result = node.target(*tree_map(partial(typed, dtype=dtype), args), **kwargs)
        except Exception:  # tensors of several types, which this operator does not take
            continue
        if _dtypes(result) == expected:
            return dtype
    return None


def _sized(leaf: Any) -> Any:
    """Return a node's value with the sizes that the module was exported with, in place of symbols."""
    value = leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf
    if isinstance(value, torch.Tensor):
        return torch.empty([_number(size) for size in value.shape], dtype=value.dtype, device=value.device)
    return _number(value) if isinstance(value, torch.SymInt) else value


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_cast(leaf: Any, dtype: torch.dtype) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else None
    return value is not None and may_be_cast(value) and value.dtype != dtype


def _cast(record: Argument, value: Any, dtype: torch.dtype, node: Any, state: Conversion) -> Argument:
    where = place_of(node)
    text = dtype_name(dtype, where)
    kept = state.casts.get((record.name, text)) if isinstance(record, Weight) else None
    if kept is not None:
        return Value(kept)
    name = f"{state.prefix}{node.name}.cast.{state.count()}"
    spec = structs.replace(spec_of(name, value, where), dtype=text)
    state.add(
        Node(name, CAST, (record, Enum(text)), {}, (spec,), module=module_of(node, state), where=where,
             without_gradient=state.without_gradient)
    )  # fmt: skip
    state.root[name] = name
    if isinstance(record, Weight):  # autocast casts a weight once, so its gradients add up in the lower precision
        state.casts[record.name, text] = name
    return Value(name)

"""The casts that torch.autocast makes, as operators of the graph.

torch.export keeps a region under autocast as a sub-graph whose operators have the types that autocast gave them, but
not the casts. An operator ran as it is, with its floating-point tensors in the lower precision, or with them in
float32: the first of these that gives the type of its result is what autocast did.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from manyhands.graph.conversion import Conversion, module_of
from manyhands.graph.nodes import Argument, Enum, Node, Value, Weight
from manyhands.graph.sizes import dtype_name, spec_of
from manyhands.graph.source_lines import place_of


def with_casts(node: Any, arguments: tuple[Argument, ...], state: Conversion) -> tuple[Argument, ...]:
    """Return the arguments of an operator under autocast, cast by nodes of their own where autocast casts them."""
    dtype = _cast_to(node, state.autocast)
    if dtype is None:
        return arguments
    leaves, tree = tree_flatten(node.args)
    records, records_tree = tree_flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, (Value, Weight)))
    assert len(leaves) == len(records), (tree, records_tree)
    cast = [
        _cast(record, leaf.meta["val"], dtype, node, state) if _is_cast(leaf, dtype) else record
        for leaf, record in zip(leaves, records)
    ]
    return tuple(tree_unflatten(cast, records_tree))


def _cast_to(node: Any, lower: torch.dtype) -> torch.dtype | None:
    """Return the type to which autocast casts an operator's tensors; None: it does not."""
    expected = _dtypes(node.meta["val"])
    args, kwargs = tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf,
                            (node.args, node.kwargs))  # fmt: skip
    modes = [leaf.fake_mode for leaf in tree_flatten(args)[0] if isinstance(leaf, FakeTensor)]
    if not modes:
        return None
    for dtype in (None, lower, torch.float32):
        try:
            with modes[0], torch.no_grad(), torch.autocast("cpu", enabled=False):
                result = node.target(*tree_map(partial(_typed, dtype=dtype), args), **kwargs)
        except Exception:  # tensors of several types, which this operator does not take
            continue
        if _dtypes(result) == expected:
            return dtype
    return None


def _typed(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_cast else leaf


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_cast(leaf: Any, dtype: torch.dtype) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype


def _cast(record: Argument, value: Any, dtype: torch.dtype, node: Any, state: Conversion) -> Argument:
    where = place_of(node)
    text = dtype_name(dtype, where)
    kept = state.casts.get((record.name, text)) if isinstance(record, Weight) else None
    if kept is not None:
        return Value(kept)
    name = f"{state.prefix}{node.name}.cast.{state.count()}"
    spec = structs.replace(spec_of(name, value, where), dtype=text)
    state.add(
        Node(name, "aten.to.dtype", (record, Enum(text)), {}, (spec,), module=module_of(node, state), where=where,
             without_gradient=state.without_gradient)
    )  # fmt: skip
    state.root[name] = name
    if isinstance(record, Weight):  # autocast casts a weight once, so its gradients add up in the lower precision
        state.casts[record.name, text] = name
    return Value(name)

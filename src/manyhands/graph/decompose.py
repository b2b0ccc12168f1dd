"""Decomposition of operators that manyhands does not run whole into those that it does: core ATen, mostly.

PyTorch knows for most operators how others compute the same (torch._decomp, and the composite operators themselves).
An operator that is not on the allow-list is traced through that on fake tensors, with the batch still a symbol, and the
nodes of the trace take its place. What is on the list stays whole: it is faster so, or has a rule for tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from manyhands.graph import ops

_MORE = ("glu", "im2col", "col2im", "upsample_bicubic2d", "logit", "addmv", "special_entr", "rot90", "take",
         "index_copy", "index_add", "masked_scatter", "fill", "diag_embed", "block_diag", "celu", "unfold", "frac",
         "var_mean", "std_mean", "logaddexp", "xlogy", "nan_to_num", "renorm", "roll", "heaviside")  # fmt: skip
_PRESERVED_META = ("stack_trace", "nn_module_stack")


def decomposed(node: Any, dtype: torch.dtype | None = None) -> torch.fx.Graph | None:
    """Return a graph that computes the same as a node of an exported program from the node's tensors, in their order;
    `dtype`: the type to which autocast casts them.

    None: PyTorch has no decomposition of the operator.
    """
    leaves, tree = tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    values = [leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves]
    tensor_places = [place for place in places if isinstance(values[place], torch.Tensor)]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes:
        return None

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(values)
        for place, tensor in zip(tensor_places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, tree)
        return node.target(*args, **kwargs)

    try:
        with modes[0], enable_python_dispatcher(), torch.no_grad():
            trace = make_fx(call, decomposition_table=_table(), _allow_non_fake_inputs=True)
            traced = trace(*(typed(values[place], dtype) for place in tensor_places))
    except Exception:  # PyTorch's own reasons: the operator stays refused, by its name and the user's line
        return None
    graph: torch.fx.Graph = traced.graph
    graph.eliminate_dead_code()
    calls = [inner for inner in graph.nodes if inner.op == "call_function"]
    if any(inner.target is node.target for inner in calls) or any(inner.op == "get_attr" for inner in graph.nodes):
        return None
    for inner in calls:
        inner.meta.update({key: node.meta[key] for key in _PRESERVED_META if key in node.meta})
    return graph


def typed(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a value as autocast casts it to a type: tensors of floating-point numbers, but not of float64."""
    return value.to(dtype) if dtype is not None and may_be_cast(value) else value


def may_be_cast(value: Any) -> bool:
    """Return whether autocast casts a value."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def tensor_arguments(node: Any) -> list[Any]:
    """Return the nodes whose tensors `decomposed` takes, in the order of its inputs."""
    leaves, _ = tree_flatten((node.args, node.kwargs))
    return [
        leaf for leaf in leaves if isinstance(leaf, torch.fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    ]


@cache
def _table() -> dict[Any, Any]:
    """Return the decompositions of all operators that are not on the allow-list."""
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in _MORE if hasattr(aten, name)]
    table = {**core_aten_decompositions(), **get_decompositions(packets)}
    return {operator: rule for operator, rule in table.items() if str(operator) not in ops.ALLOWED}

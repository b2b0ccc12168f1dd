"""The order in which a merged axis holds its samples.

An axis that grows with the batch may hold several rows per sample. `outer` says how: the axis counts as
[outer][samples][rows / outer]. 1 is batch first, each sample's rows together; anything else interleaves the samples,
and rows [a, b) of it are then not some samples' rows.

    (B, T, D).reshape(B*T, D)    outer 1
    (T, B, D).reshape(T*B, D)    outer T
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from manyhands.facts.network import TensorSpec
from manyhands.graph.nodes import Node, Value, records_of, values_of

_RESHAPES = frozenset({"view", "reshape", "view_as", "reshape_as", "_unsafe_view", "flatten", "unflatten"})
_JOINS = frozenset({"cat", "concat", "vstack", "hstack"})


def outer_of(node: Node, specs: Mapping[str, TensorSpec], outers: Mapping[str, int | None]) -> int | None:
    """Return the outer factor of what a node makes; None where no such factor exists, since samples are torn apart.

    `specs` and `outers` must hold the node's inputs.
    """
    output = node.outputs[0]
    batched = [name for name in values_of(node) if specs[name].batch_axis is not None]
    if output.batch_axis is None or not batched:
        return 1
    name = node.target.split(".")[1]
    first = next((r.name for r in records_of(node) if isinstance(r, Value)), "")
    source, rows = specs[first], output.rows_per_sample
    if name in _RESHAPES and source.batch_axis is not None:
        before = math.prod(source.shape[: source.batch_axis]) * (outers.get(first, 1) or 1)
        whole, remainder = divmod(before, math.prod(output.shape[: output.batch_axis]) or 1)
        return whole if not remainder and whole and rows % whole == 0 else None
    if name in _JOINS and rows > specs[batched[0]].rows_per_sample:
        return rows // specs[batched[0]].rows_per_sample * max(outers.get(name, 1) or 1 for name in batched)
    if name in ("repeat", "tile") and source.batch_axis is not None and rows > source.rows_per_sample:
        return rows // source.rows_per_sample * (outers.get(first, 1) or 1)
    return max(outers.get(name, 1) or 1 for name in batched) if rows > 1 else 1

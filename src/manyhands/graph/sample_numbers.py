"""Numbers of samples: arange(batch), which masks of transformers look their own sample up with.

    rows = torch.arange(x.shape[0])[:, None]        0, 1, 2, ... one for each sample
    mask[rows, columns]                             each sample's own row of the mask

A device that has some of the samples numbers its own from 0, and looks the same rows up. So making such numbers mixes
no samples as long as they only look up rows along the axis of samples, and stay on the device that made them: no cut
between layers may lie where one is still needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from manyhands.facts.network import TensorSpec
from manyhands.graph.nodes import Node, SampleCount, Value, values_of

_ARANGES = {
    "aten.arange.default": (SampleCount(1),), "aten.arange.start": (0, SampleCount(1)),
    "aten.arange.start_step": (0, SampleCount(1), 1),
}  # fmt: skip
_VIEWS = frozenset({"unsqueeze", "view", "reshape", "expand", "alias", "clone", "contiguous", "to", "_to_copy",
                    "detach", "slice", "squeeze", "expand_as"})  # fmt: skip


def numbers_of_samples(nodes: Iterable[Node], specs: Mapping[str, TensorSpec], outputs: Set[str]) -> frozenset[str]:
    """Return the tensors that hold a number for each sample, if all that they do is to look up that sample's rows."""
    nodes = list(nodes)
    numbers: set[str] = set()
    for node in nodes:
        output = node.outputs[0]
        is_made = node.arguments == _ARANGES.get(node.target)
        is_view = node.target.split(".")[1] in _VIEWS and _first(node) in numbers and len(values_of(node)) == 1
        if (is_made or is_view) and _numbers_rows(output):
            numbers.add(output.name)
    for node in nodes:
        reads = numbers & set(values_of(node))
        is_number = node.outputs[0].name in numbers
        if reads and not is_number and not looks_own_rows_up(node, specs, numbers):
            return frozenset()
    return frozenset() if numbers & outputs else frozenset(numbers)


def looks_own_rows_up(node: Node, specs: Mapping[str, TensorSpec], numbers: Set[str]) -> bool:
    """Return whether a node takes for each sample rows of that sample, by the sample's number."""
    if node.target != "aten.index.Tensor" or node.options:
        return False
    source, indices = node.arguments
    if not isinstance(source, Value) or source.name in numbers:
        return False
    axis, output = specs[source.name].batch_axis, node.outputs[0]
    if axis is None or specs[source.name].rows_per_sample != 1 or axis >= len(indices) or output.batch_axis is None:
        return False
    if any(index is None for index in indices[: axis + 1]):  # the looked-up axes come where the first of them was
        return False
    looked_up = max(len(specs[index.name].shape) for index in indices if isinstance(index, Value))
    for place, index in enumerate(indices):
        if index is None:
            continue
        if not isinstance(index, Value) or (index.name in numbers) != (place == axis):
            return False
        spec = specs[index.name]
        if spec.batch_axis is not None:
            in_output = looked_up - (len(spec.shape) - spec.batch_axis)
            if spec.rows_per_sample != 1 or in_output != output.batch_axis:
                return False
    return True


def _first(node: Node) -> str:
    return node.arguments[0].name if node.arguments and isinstance(node.arguments[0], Value) else ""


def _numbers_rows(spec: TensorSpec) -> bool:
    return spec.batch_axis is not None and spec.rows_per_sample == 1 and spec.dtype in ("int64", "int32")

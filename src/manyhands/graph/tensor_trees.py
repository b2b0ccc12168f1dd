"""Example inputs, targets and outputs: nested tensors taken apart into leaves, and with another number of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.trees import Fields, tree_leaves, tree_map


def flattened(value: Any, leaves: list[torch.Tensor], where: str) -> Any:
    """Return `value` with every tensor replaced by its number in `leaves`, as '#3'. A dataclass becomes its fields that
    are not None."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return f"#{len(leaves) - 1}"
    if isinstance(value, Fields):
        return value.filled({key: flattened(item, leaves, f"{where}.{key}") for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        trees = {key: flattened(item, leaves, f"{where}.{key}") for key, item in fields.items() if item is not None}
        return Fields(trees, type(value))
    if isinstance(value, dict):
        return {str(key): flattened(item, leaves, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flattened(item, leaves, f"{where}[{i}]") for i, item in enumerate(value)]
    raise CaptureFailed(
        f"{where} is a {type(value).__name__}; inputs and outputs must be tensors, or tuples, lists, dicts and "
        "dataclasses of them.",
        hint="Do not return it, or turn it off: config.use_cache = False for the cache of a Hugging Face model.",
    )


def without_none(output: Any) -> Any:
    """Return an output without entries of dicts that are None; fields of dataclasses are left out by `flattened`."""
    if type(output) is dict:
        return {key: without_none(item) for key, item in output.items() if item is not None}
    return output


def tensors_alone(output: Any) -> Any:
    """Return an output without everything that is no tensor, such as a cache of keys and values."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        return Fields(_with_tensors(fields), type(output))
    if isinstance(output, dict):
        return _with_tensors(output)
    if isinstance(output, (list, tuple)):
        return [tensors_alone(item) for item in output if _may_hold_tensors(item)]
    return output


def _with_tensors(items: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): tensors_alone(item) for key, item in items.items() if _may_hold_tensors(item)}


def _may_hold_tensors(value: Any) -> bool:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, (torch.Tensor, dict, list, tuple))


def batch_of(leaves: list[torch.Tensor]) -> int:
    sizes = [leaf.shape[0] for leaf in leaves if leaf.dim()]
    hint = "Pass e.g. torch.randn(4, 3, 32, 32)."
    if not sizes:
        raise CaptureFailed("The example batch holds no tensor with a batch axis.", hint=hint)
    if not sizes[0]:
        raise CaptureFailed("The example batch is empty: its first axis has no samples.", hint=hint)
    return sizes[0]


def exported_samples(batch: int) -> int:
    return 3 if batch < 2 else batch


def as_many(target: Any, example_batch: Any) -> Any:
    """Return the example target with as many samples as the module was exported with."""
    inputs: list[torch.Tensor] = []
    flattened(example_batch, inputs, "the input")
    batch = batch_of(inputs)
    leaves: list[torch.Tensor] = []
    tree = flattened(target, leaves, "the target")
    is_batched = [leaf.dim() > 0 and leaf.shape[0] == batch for leaf in leaves]
    sized = [resized(leaf, exported_samples(batch)) if o else leaf for leaf, o in zip(leaves, is_batched)]
    return tree_map(lambda leaf: sized[int(leaf[1:])], tree)


def resized(leaf: torch.Tensor, samples: int) -> torch.Tensor:
    if leaf.shape[0] == samples:
        return leaf
    return leaf[:1].expand(samples, *leaf.shape[1:]).contiguous()


def example_outputs(program: Any, tree: Any, extra: int) -> Any:
    """Return zero tensors shaped as the module's outputs, for capturing the loss."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    nodes = output.args[0][: len(output.args[0]) - extra]
    metas = [node.meta["val"] for node in nodes][-len(list(tree_leaves(tree))) :]
    examples = [torch.zeros([int(_hint(s)) for s in meta.shape], dtype=meta.dtype) for meta in metas]
    return tree_map(lambda leaf: examples[int(leaf[1:])], tree)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)

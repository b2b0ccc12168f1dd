"""Names the tensors of a batch, and runs one piece backwards.

Each piece sees detached inputs, as if they had come over a wire, and hands back gradients for them: what the profiler
measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.graph.graph import Graph
from manyhands.graph.trees import tree_map


def bind_inputs(graph: Graph, batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch, in the form in which the module takes it, by the names of the graph's inputs."""
    positional, keywords = graph.input_tree
    if isinstance(batch, (tuple, list)):
        parts: tuple[list[Any], dict[str, Any]] = (list(batch), {})
    elif isinstance(batch, dict) and keywords:
        parts = ([], batch)
    else:
        parts = ([batch], {})
    return bind_tree(positional, parts[0]) | bind_tree(keywords, parts[1])


def bind_tree(tree: Any, value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of `value` by the names that stand in the same places of `tree`."""
    bound: dict[str, torch.Tensor] = {}

    def visit(tree: Any, value: Any) -> None:
        if isinstance(tree, str):
            bound[tree] = value
        elif isinstance(tree, dict):
            for key, item in tree.items():
                visit(item, getattr(value, key) if dataclasses.is_dataclass(value) else value[key])
        else:
            for item, part in zip(tree, value, strict=True):
                visit(item, part)

    visit(tree, value)
    return bound


def backward_piece(
    entered: Mapping[str, torch.Tensor], returned: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    """Run one piece backwards: `gradients` holds those of what left it, and receives those of what entered it."""
    roots = [
        (tensor, gradients[name]) for name, tensor in returned.items() if tensor.requires_grad and name in gradients
    ]
    if roots:
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
    for name, tensor in entered.items():
        if tensor.grad is not None:
            gradients[name] = gradients[name] + tensor.grad if name in gradients else tensor.grad


def outputs_of(graph: Graph, values: Mapping[str, torch.Tensor]) -> Any:
    """Return the network's outputs in the structure in which the module returns them."""
    return tree_map(values.__getitem__, graph.output_tree)

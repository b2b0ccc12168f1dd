"""Compares what a captured graph returns with what its module does, on a batch of another size than was captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands.graph.alike_draws import AlikeDraws, OtherDraws
from manyhands.graph.arguments import bound_arguments
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.tensor_trees import flattened
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights


@torch.no_grad()
def forward_difference(graph: Graph, module: nn.Module, batch: Any) -> float:
    """Return the largest difference between what the graph and the module return, over the largest element of that
    output; infinity where one of them is not a number and the other is.

    Both run in training, where the module draws the random numbers of the graph's nodes. A module that draws in an
    order of its own is compared in evaluation instead. The module's buffers may be written.
    """
    try:
        values = _run(graph, module, batch, is_training=True)
        with AlikeDraws(graph) as draws:
            output = _returned(module.train(), batch)
        draws.check_all_drawn()
    except OtherDraws:
        values = _run(graph, module, batch, is_training=False)
        output = _returned(module.eval(), batch)
    names = list(tree_leaves(graph.output_tree))
    assert len(names) == len(output), f"the graph returns {len(names)} tensors, the module {len(output)}"
    return max((relative(values[name], tensor) for name, tensor in zip(names, output)), default=0.0)


def _run(graph: Graph, module: nn.Module, batch: Any, *, is_training: bool) -> dict[str, torch.Tensor]:
    piece = Piece(graph, Weights.shared(graph, module))
    inputs = bind_inputs(graph, batch)
    samples = next((len(inputs[spec.name]) for spec in graph.inputs if spec.batch_axis == 0), 0)
    values = piece(inputs, Context(training=is_training, moves_buffers=False, samples=samples))
    return {**inputs, **values}


def _returned(module: nn.Module, batch: Any) -> list[torch.Tensor]:
    positional, keywords = bound_arguments(module, batch)
    leaves: list[torch.Tensor] = []
    flattened(module(*positional, **keywords), leaves, "the output")
    return leaves


def relative(value: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest difference of two tensors over the largest element of the second, or over `least`."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return float("inf")
    if torch.equal(value, expected):
        return 0.0
    if not value.is_floating_point():
        return float("inf")
    if not bool((torch.isfinite(value) == torch.isfinite(expected)).all()):
        return float("inf")
    value, expected = value.nan_to_num(0.0, 0.0, 0.0), expected.nan_to_num(0.0, 0.0, 0.0)
    size = max(float(expected.abs().max()), least)
    apart = float((value - expected).abs().max())
    return apart / size if size else (float("inf") if apart else 0.0)

"""A captured network as plain data: nodes that name ATen operators (nodes.py), and the weights beside them.

There is no code in a graph: what a node does is looked up by its target in the allow-list (ops.py).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from manyhands.facts.network import Layer, LossCombination, Network, TensorSpec, WeightSpec
from manyhands.facts.summary import Summarized
from manyhands.graph.nodes import Node
from manyhands.graph.trees import tree_leaves

if TYPE_CHECKING:
    import torch


class Graph(Summarized, msgspec.Struct, frozen=True, dict=True):
    """A captured network: nodes in topological order, with inputs, outputs and weights. `state` holds the weights and
    is stored apart (store.py)."""

    name: str
    inputs: tuple[TensorSpec, ...]
    input_tree: Any
    """The structure of the inputs: a list of positional trees and a dict of keyword trees; leaves are input names."""
    output_tree: Any
    """The structure that the module returns: a leaf name, a list, or a dict."""
    nodes: tuple[Node, ...]
    weights: tuple[WeightSpec, ...]
    aliases: dict[str, str]
    """Tied weights: a name in the module -> the name under which the tensor is kept."""
    state: dict[str, torch.Tensor]
    granularity: str = "blocks"
    loss: Graph | None = None
    loss_combination: LossCombination | Literal[""] = ""
    """The way in which the loss combines over samples (loss.py); "" where there is no loss."""
    penalties: tuple[str, ...] = ()
    """Tensors made from weights alone that only the loss reads (penalties.py)."""
    carried: tuple[str, ...] = ()
    """Buffers that every pass writes and the next one reads, at rest too, like a cache of keys and values. They begin
    as zeros wherever a run begins, and never travel."""

    def __hash__(self) -> int:
        return id(self)

    def summary(self) -> dict[str, str]:
        weights = sum(prod(weight.shape) for weight in self.weights)
        loss = self.loss_combination or "none"
        return {"name": self.name, "operators": f"{len(self.nodes):,}", "weights": f"{weights:,}", "loss": loss}

    @cached_property
    def network(self) -> Network:
        """The chain of layers with shapes, multiply-accumulates and bytes, at this graph's granularity."""
        from manyhands.graph.describe import describe

        return describe(self)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.network.layers

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors the module returns, in order, each once; then those of the penalties."""
        return tuple(dict.fromkeys(tree_leaves(self.loss_tree)))

    @property
    def loss_tree(self) -> Any:
        """The first argument of the loss: what the module returns, with the penalties if there are any."""
        return [self.output_tree, list(self.penalties)] if self.penalties else self.output_tree

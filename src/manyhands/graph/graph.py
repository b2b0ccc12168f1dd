"""A captured network as plain data: nodes that name ATen operators, and the weights beside them.

An argument of a node is a literal, a list, or one of the small records below. There is no code in a graph: what a
node does is looked up by its target in the allow-list (ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from manyhands.facts.network import Layer, LossCombination, Network, TensorSpec, WeightSpec

if TYPE_CHECKING:
    import torch


class Value(msgspec.Struct, frozen=True, tag="value", tag_field="is"):
    """A tensor another node made, or a graph input."""

    name: str


class Weight(msgspec.Struct, frozen=True, tag="weight", tag_field="is"):
    """A parameter, buffer or constant, by its name in the module."""

    name: str


class Samples(msgspec.Struct, frozen=True, tag="samples", tag_field="is"):
    """An integer that grows with the batch: `factor` times the number of samples at hand."""

    factor: int


class Enum(msgspec.Struct, frozen=True, tag="enum", tag_field="is"):
    """A torch constant: a dtype ('float32') or a memory format ('channels_last')."""

    name: str


class Special(msgspec.Struct, frozen=True, tag="float", tag_field="is"):
    """A float that JSON cannot write: 'inf', '-inf', 'nan'."""

    text: str


Record: TypeAlias = Value | Weight | Samples | Enum | Special
# A nested list of records and literals; msgspec cannot express the recursion, so the reader checks it by hand.
Argument: TypeAlias = Any


class Node(msgspec.Struct, frozen=True):
    """One operator call. `outputs` names what it makes; a node with several outputs returns a list."""

    name: str
    target: str
    arguments: tuple[Argument, ...]
    options: dict[str, Argument]
    outputs: tuple[TensorSpec, ...]
    several: bool = False
    in_place: bool = False
    """The user wrote the in-place form; it is run in place only where nobody can tell."""
    updates: str = ""
    """The buffer this node writes, in training only."""
    module: str = ""
    where: str = ""
    without_gradient: bool = False
    """Written under torch.no_grad(): autograd does not record it."""


class Graph(msgspec.Struct, frozen=True, dict=True):
    """Nodes in topological order. `state` holds the weights and is stored apart (store.py)."""

    name: str
    inputs: tuple[TensorSpec, ...]
    input_tree: Any
    """How the user passes inputs: a list of positional trees and a dict of keyword trees; leaves are input names."""
    output_tree: Any
    """What the module returns: a leaf name, a list, or a dict."""
    nodes: tuple[Node, ...]
    weights: tuple[WeightSpec, ...]
    aliases: dict[str, str]
    """Tied weights: a name in the module -> the name under which the tensor is kept."""
    state: dict[str, torch.Tensor]
    granularity: str = "blocks"
    loss: Graph | None = None
    loss_combination: LossCombination | Literal[""] = ""
    """How the loss combines over samples (loss.py); "" where there is no loss."""
    penalties: tuple[str, ...] = ()
    """Tensors made from weights alone that only the loss reads (penalties.py)."""

    def __hash__(self) -> int:
        return id(self)

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
        """What the loss takes as its first argument: what the module returns, with the penalties if there are any."""
        return [self.output_tree, list(self.penalties)] if self.penalties else self.output_tree


def tree_leaves(tree: Any) -> Iterator[str]:
    """The leaf names of an input or output tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tree_leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tree_leaves(item)


def tree_map(change: Callable[[str], Any], tree: Any) -> Any:
    """The same tree with every leaf name changed."""
    if isinstance(tree, str):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return [tree_map(change, item) for item in tree]
    if isinstance(tree, dict):
        return {key: tree_map(change, item) for key, item in tree.items()}
    return tree


def records(argument: Argument) -> Iterator[Record]:
    """Every record inside an argument, in order."""
    if isinstance(argument, (Value, Weight, Samples, Enum, Special)):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from records(item)


def records_of(node: Node) -> Iterator[Record]:
    for argument in node.arguments:
        yield from records(argument)
    for argument in node.options.values():
        yield from records(argument)


def values_of(node: Node) -> tuple[str, ...]:
    """Names of the activations a node reads, each once."""
    return tuple(dict.fromkeys(record.name for record in records_of(node) if isinstance(record, Value)))


def weights_of(node: Node) -> tuple[str, ...]:
    """Names of the weights a node reads, each once."""
    return tuple(dict.fromkeys(record.name for record in records_of(node) if isinstance(record, Weight)))

"""One operator call of a captured network as plain data, and what its arguments are made of.

An argument of a node is a literal, a list, or one of the small records below. There is no code in a node: its target is
looked up in the allow-list (ops.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

import msgspec

from manyhands.facts.network import TensorSpec


class Value(msgspec.Struct, frozen=True, tag="value", tag_field="is"):
    """A tensor that another node made, or a graph input."""

    name: str


class Weight(msgspec.Struct, frozen=True, tag="weight", tag_field="is"):
    """A parameter, buffer or constant, by its name in the module."""

    name: str


class SampleCount(msgspec.Struct, frozen=True, tag="samples", tag_field="is"):
    """An integer that grows with the batch: `factor` times the current number of samples."""

    factor: int


class Enum(msgspec.Struct, frozen=True, tag="enum", tag_field="is"):
    """A torch constant: a dtype ('float32') or a memory format ('channels_last')."""

    name: str


class Special(msgspec.Struct, frozen=True, tag="float", tag_field="is"):
    """A float that JSON cannot write: 'inf', '-inf', 'nan'."""

    text: str


Record: TypeAlias = Value | Weight | SampleCount | Enum | Special
# A nested list of records and literals; msgspec cannot express the recursion, so the reader checks it by hand.
Argument: TypeAlias = Any


class Node(msgspec.Struct, frozen=True, dict=True):
    """A call of one operator. `outputs` names what it makes; a node with several outputs returns a list."""

    name: str
    target: str
    arguments: tuple[Argument, ...]
    options: dict[str, Argument]
    outputs: tuple[TensorSpec, ...]
    several: bool = False
    in_place: bool = False
    """Whether the user wrote the in-place form; it is run in place only where that makes no difference."""
    updates: str = ""
    """The buffer this node writes, in training only."""
    module: str = ""
    where: str = ""
    without_gradient: bool = False
    """Whether the node was written under torch.no_grad(), so that autograd does not record it."""

    @cached_property
    def values(self) -> tuple[str, ...]:
        """The names of the activations it reads, each once. Found once: pieces of a graph look at all nodes."""
        return tuple(dict.fromkeys(record.name for record in records_of(self) if isinstance(record, Value)))

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights it reads, each once."""
        return tuple(dict.fromkeys(record.name for record in records_of(self) if isinstance(record, Weight)))


def records(argument: Argument) -> Iterator[Record]:
    """Yield every record inside an argument, in order."""
    if isinstance(argument, (Value, Weight, SampleCount, Enum, Special)):
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
    """Return the names of the activations a node reads, each once."""
    return node.values


def weights_of(node: Node) -> tuple[str, ...]:
    """Return the names of the weights a node reads, each once."""
    return node.weights

"""The layouts of tensors, and the errors for a network that cannot be decoupled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from manyhands.decoupling.tracing import place
from manyhands.facts.errors import CaptureFailed

# Reasons why a width stays as it is.
PICTURE, OUTPUT, FLATTENED = "the network's input", "the network's output", "flattened before a linear layer"
CLASSIFIER, BROADCAST, COMPARED = "part of the classifier", "one channel serves all", "compared by a softmax"
FROM_LINEAR = "made by a linear layer"


@dataclass(frozen=True)
class Form:
    """The layout of a tensor: a map (sample, channel, places), or flat (sample, channel times places)."""

    width: int
    is_flat: bool = False
    places: int = 1
    """The numbers per channel in a flat tensor."""
    is_pooled: bool = False
    """Whether it was made of means over whole maps alone."""


@dataclass
class WeightedLayer:
    """A layer with weights: the widths it reads and makes, over all the places where it is called."""

    module: nn.Module
    reads: int
    makes: int
    places: int = 1
    calls: list[fx.Node] = field(default_factory=list)


def refused(node: fx.Node, why: str, hint: str = "") -> CaptureFailed:
    """Return the error for a layer or operator that stands in the way."""
    return CaptureFailed(
        f"This network cannot be decoupled: {place(node)} {why}.",
        hint=hint or "Replace that layer, or cut the network before it and decouple the part with the convolutions.",
    )


def given(node: fx.Node, position: int, name: str) -> Any:
    """Return an argument by place or by name; None where it is not given."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)

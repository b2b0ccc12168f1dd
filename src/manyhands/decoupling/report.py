"""The report on a decoupled network: totals before and after, where the shuffles are, what stays dense."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx, nn

from manyhands.decoupling.tracing import CONVOLUTIONS, operator_name, shape_of
from manyhands.decoupling.weights import TRANSPOSED


@dataclass(frozen=True)
class Totals:
    """The sizes of a network, for one sample."""

    parameters: int
    weight_bytes: int
    activation_bytes: int
    """The bytes of its input and of the outputs of convolutions, linear layers and poolings; the others can be written
    in place."""
    macs: int
    """Multiply-accumulates of convolutions and linear layers."""


@dataclass(frozen=True)
class ShuffleReport:
    """The report of one channel shuffle."""

    name: str
    before: str
    """The convolution that reads the shuffled tensor."""
    shape: tuple[int, ...]
    bytes: int
    depth: int
    """The number of convolutions before it."""


@dataclass(frozen=True)
class Noted:
    """A remark on a layer, or on an operator at its place."""

    name: str
    why: str


@dataclass(frozen=True)
class DecoupleReport:
    """The report of what `mh.decouple` did. `shuffles` may be fewer than were requested, where a network has no room
    for more."""

    network: str
    input: tuple[int, ...]
    groups: int
    widen: float
    shuffles_wanted: int | str
    weights: str
    before: Totals
    after: Totals
    convolutions: int
    grouped: int
    """Convolutions that are divided among the groups, depthwise ones included."""
    shuffles: tuple[ShuffleReport, ...]
    dense: tuple[Noted, ...]
    """Layers that are not grouped, and operators that read all channels."""
    kept: tuple[Noted, ...]
    """Convolutions whose outputs are as many as before."""
    concats: tuple[str, ...]
    """Concatenations that are done in every group separately."""

    def moved_bytes(self, devices: int) -> int:
        """Return the bytes that the shuffles of one sample send between equal devices: all but each one's own part."""
        return sum(shuffle.bytes for shuffle in self.shuffles) * (devices - 1) // devices

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def totals(module: fx.GraphModule) -> Totals:
    """Return the costs of a graph whose shapes are known."""
    parameters = list(module.parameters())
    macs = elements = size = 0
    for node in module.graph.nodes:
        shape = shape_of(node)
        if shape is None:
            continue
        made = math.prod(shape[1:])
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = type(layer).__name__.lower() if layer is not None else operator_name(node)
        if isinstance(layer, CONVOLUTIONS):
            moved = math.prod((shape_of(node.all_input_nodes[0]) or ())[1:]) if isinstance(layer, TRANSPOSED) else made
            macs += moved * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            macs += made * layer.in_features
        if node.op == "placeholder" or isinstance(layer, (*CONVOLUTIONS, nn.Linear)) or "pool" in kind:
            elements += made
            size = node.meta["made"][1].itemsize
    return Totals(
        parameters=sum(weight.numel() for weight in parameters),
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in parameters),
        activation_bytes=elements * size,
        macs=macs,
    )

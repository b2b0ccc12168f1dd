"""Decides which convolutions become grouped and which stay dense, and where the shuffles go.

Shuffles are evenly spaced by depth, counted in convolutions, and avoid large tensors: around each of the evenly spaced
places the smallest tensor is taken. Inside a bottleneck that is the narrow one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from manyhands.decoupling import operators
from manyhands.decoupling.forms import WeightedLayer
from manyhands.decoupling.reading import Reading
from manyhands.decoupling.report import Noted
from manyhands.decoupling.tracing import CONVOLUTIONS, operator_name, shape_of
from manyhands.decoupling.widths import Widths

ALL = "all"
GATE = "gate (squeeze and excitation): one small reduction over all channels"


@dataclass(frozen=True)
class Grouped:
    """A convolution's new number of groups, and why it is dense where it is."""

    groups: int
    dense: str = ""


@dataclass(frozen=True)
class ShuffleCandidate:
    """A tensor that may be shuffled before a convolution reads it."""

    convolution: fx.Node
    depth: int
    elements: int


def group_layers(reading: Reading, widths: Widths) -> dict[str, Grouped]:
    """Return what becomes of every convolution."""
    grouped = {}
    for name, layer in reading.layers.items():
        if isinstance(layer.module, CONVOLUTIONS):
            grouped[name] = _grouped(name, layer, reading, widths)
    return grouped


def _grouped(name: str, layer: WeightedLayer, reading: Reading, widths: Widths) -> Grouped:
    module: nn.Conv2d = layer.module  # type: ignore[assignment]
    if module.groups > 1 and module.groups == module.in_channels:
        return Grouped(widths.width(layer.reads))  # depthwise, as before
    if widths.groups == 1:
        return Grouped(module.groups)
    groups = math.lcm(module.groups, widths.groups)
    dense = ""
    if reading.gates.intersection(layer.calls):
        dense = GATE
    elif name in reading.heads:
        dense = "makes the network's output"
    elif reading.forms[layer.calls[0]].is_pooled:
        dense = "part of the classifier"
    elif not widths.is_grouped(layer.reads):
        dense = f"reads {widths.why_pinned(layer.reads) or 'channels that cannot be divided'}"
        dense += f" ({widths.old(layer.reads)} channels)"
    elif widths.width(layer.makes) % groups or widths.width(layer.reads) % groups:
        dense = f"{widths.width(layer.makes)} outputs of {widths.width(layer.reads)} inputs do not divide"
    return Grouped(module.groups if dense else groups, dense)


def stays_dense(reading: Reading, grouped: dict[str, Grouped]) -> Iterator[Noted]:
    """Yield everything that reads all channels, and why."""
    for name, layer in reading.layers.items():
        if name in grouped and grouped[name].dense:
            yield Noted(name, grouped[name].dense)
        elif isinstance(layer.module, nn.Linear):
            yield Noted(name, GATE if reading.gates.intersection(layer.calls) else "linear layer")
    for name, reason in reading.mixing.items():
        yield Noted(name, reason)


def keeps_width(reading: Reading, grouped: dict[str, Grouped], widths: Widths) -> Iterator[Noted]:
    """Yield convolutions that make as many channels as before, whatever `widen` says, and why."""
    for name in grouped:
        reason = widths.why_pinned(reading.layers[name].makes)
        if reason:
            yield Noted(name, f"{widths.old(reading.layers[name].makes)} outputs: {reason}")


def candidates(reading: Reading, widths: Widths, grouped: dict[str, Grouped]) -> list[ShuffleCandidate]:
    """Return the inputs of grouped convolutions on which groups have worked alone since they were last mixed."""
    mixed: dict[fx.Node, bool] = {}
    candidates: list[ShuffleCandidate] = []
    depth = 0
    for node in reading.graph.nodes:
        if node not in reading.forms:
            continue
        sources = [source for source in node.all_input_nodes if source in reading.forms]
        mixed[node] = all(mixed[source] for source in sources)
        name = str(node.target)
        if node.op != "call_module" or name not in grouped:
            continue
        layer, module = grouped[name], reading.layers[name].module
        if layer.dense:
            mixed[node] = not reading.gates.intersection([node])
        elif layer.groups != module.in_channels or module.groups != layer.groups:
            form = reading.forms[sources[0]]
            if not mixed[sources[0]] and len(reading.layers[name].calls) == 1 and widths.can_shuffle(form.width):
                places = math.prod((shape_of(sources[0]) or ())[2:])
                candidates.append(ShuffleCandidate(node, depth, widths.width(form.width) * places))
            mixed[node] = False
        depth += 1
    return candidates


def choose(
    reading: Reading, shuffles: int | str, possible: list[ShuffleCandidate], convolutions: int
) -> list[ShuffleCandidate]:
    """Return the shuffles, in order of depth."""
    if shuffles == ALL:
        return _one_in_every_block(reading, possible)
    assert isinstance(shuffles, int)
    chosen: list[ShuffleCandidate] = []
    remaining = list(possible)
    spacing = convolutions / (shuffles + 1)
    for number in range(1, min(shuffles, len(possible)) + 1):
        target = number * spacing
        near = [candidate for candidate in remaining if abs(candidate.depth - target) <= spacing / 2] or [
            min(remaining, key=lambda candidate: (abs(candidate.depth - target), candidate.depth))
        ]
        best = min(near, key=lambda candidate: (candidate.elements, abs(candidate.depth - target), candidate.depth))
        chosen.append(best)
        remaining.remove(best)
    return sorted(chosen, key=lambda candidate: candidate.depth)


def _one_in_every_block(reading: Reading, possible: list[ShuffleCandidate]) -> list[ShuffleCandidate]:
    """Return the smallest tensor of every residual branch; elsewhere, that before every convolution."""
    blocks: dict[fx.Node, list[ShuffleCandidate]] = {}
    for candidate in possible:
        blocks.setdefault(_end_of_block(reading, candidate.convolution), []).append(candidate)
    best = [min(block, key=lambda candidate: (candidate.elements, candidate.depth)) for block in blocks.values()]
    return sorted(best, key=lambda candidate: candidate.depth)


def _end_of_block(reading: Reading, convolution: fx.Node) -> fx.Node:
    """Return the addition in which a convolution's branch ends, or the convolution itself where it is in no branch."""
    node = convolution
    while True:
        readers = [user for user in node.users if user in reading.forms and user not in reading.gates]
        if len(readers) != 1:
            return convolution
        node = readers[0]
        if node.op != "call_module" and operator_name(node) in operators.JOINING and _adds(node, reading):
            return node


def _adds(node: fx.Node, reading: Reading) -> bool:
    """Return whether maps are joined, rather than scaled by a gate or a number."""
    maps = [arg for arg in node.all_input_nodes if arg in reading.forms and not reading.forms[arg].is_pooled]
    return len(maps) > 1

"""Activation checkpointing: layers that keep only what enters them, and run forward again in the backward pass.

    recompute [2, 4) [4, 6)     of a stage of layers 0..7, drawn as operators = layers
    forward    0:2   2:4 ahead   4:6 ahead   6:8
    backward   6:8   4:6 again   4:6   2:4 again   2:4   0:2

Run again, a layer draws the same random numbers and writes no buffer, so the result is the same to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from manyhands.facts.network import Network
from manyhands.schedule.actions import Action, Backward, Forward
from manyhands.schedule.geometry import StageGeometry

Span = tuple[int, int]
"""Operators [first, last)."""


def recomputed_spans(geometry: StageGeometry) -> tuple[Span, ...]:
    """Return the operators of each run of layers that a resolved stage runs again, in order. Layers without a backward
    pass keep nothing for it, and are not run again."""
    spans = []
    layers = geometry.network.layers
    for first, last in geometry.stage.recompute:
        assert isinstance(first, int), "resolve the plan first"
        assert isinstance(last, int), "resolve the plan first"
        if layers[last - 1].last > geometry.backward_first:
            spans.append((layers[first].first, layers[last - 1].last))
    return tuple(spans)


def entering(network: Network, stage_first: int, spans: Sequence[Span]) -> dict[Span, tuple[str, ...]]:
    """Return what each span keeps until its backward pass: tensors made in its stage that it reads and that no span
    before it keeps already."""
    kept: dict[Span, tuple[str, ...]] = {}
    counted: set[str] = set()
    for first, last in spans:
        read = dict.fromkeys(name for op in network.ops[first:last] for name in op.inputs)
        names = [name for name in read if stage_first <= network.producer.get(name, -1) < first]
        kept[first, last] = tuple(name for name in names if name not in counted)
        counted.update(names)
    return kept


def forward_ahead(actions: Iterable[Action], spans: Sequence[Span]) -> list[Action]:
    """Return a stage's forward actions; those of the spans keep only what enters them."""
    result: list[Action] = []
    for action in actions:
        if not isinstance(action, Forward) or action.part:
            result.append(action)
            continue
        for first, last in _cut(action.first, action.last, spans):
            part = action.part if _span_of(first, spans) is None else "ahead"
            result.append(msgspec.structs.replace(action, first=first, last=last, part=part))
    return result


def backward_again(actions: Iterable[Action], spans: Sequence[Span]) -> list[Action]:
    """Return a stage's backward actions; before those of a span it is run forward again."""
    result: list[Action] = []
    begun: set[Span] = set()
    for action in actions:
        if not isinstance(action, Backward):
            result.append(action)
            continue
        for first, last in reversed(_cut(action.first, action.last, spans)):
            span = _span_of(first, spans)
            if span is not None and span not in begun:
                begun.add(span)
                result.append(Forward(action.stage, action.micro_batch, *span, "again"))
            result.append(msgspec.structs.replace(action, first=first, last=last))
    return result


def _span_of(op: int, spans: Sequence[Span]) -> Span | None:
    return next((span for span in spans if span[0] <= op < span[1]), None)


def _cut(first: int, last: int, spans: Sequence[Span]) -> list[Span]:
    """Return operators [first, last) as runs that are each inside a span, or outside of all."""
    ends = {first, last, *(end for span in spans for end in span if first < end < last)}
    ordered = sorted(ends)
    return list(zip(ordered, ordered[1:]))

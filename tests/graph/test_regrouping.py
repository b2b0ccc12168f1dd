"""Nodes in another order compute the same, and each group's come one after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.nodes import values_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.regrouping import regrouped
from manyhands.graph.weights import Weights

INPUTS = ("a", "b", "c")


class Woven(nn.Module):
    """Steps on two streams in turns, as drawn, with an input that both read."""

    def __init__(self, turns: list[bool]) -> None:
        super().__init__()
        self.turns = turns
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)) for _ in turns)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        streams = [a, b]
        for turn, layer in zip(self.turns, self.layers):
            streams[turn] = layer(streams[turn] + c.to(a.dtype) + 1)
        return streams[0] * streams[1]


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_the_same_in_another_order(turns: list[bool]) -> None:
    torch.manual_seed(0)
    batch = {"a": torch.randn(4, 3), "b": torch.randn(4, 3), "c": torch.ones(4, 3, dtype=torch.int64)}
    graph = capture(Woven(turns), batch)
    found = regrouped(graph, [("a", "c"), ("b", "c")])
    assert sorted(node.name for node in found.nodes) == sorted(node.name for node in graph.nodes)
    known = set(INPUTS)
    sources: dict[str, set[str]] = {name: {name} for name in INPUTS}
    kinds = []
    for node in found.nodes:
        read = values_of(node)
        assert set(read) <= known, "nothing is read before it is made"
        own = set().union(*(sources[name] for name in read)) & {"a", "b"}
        known.update(spec.name for spec in node.outputs)
        sources.update({spec.name: own for spec in node.outputs})
        if own:
            kinds.append("".join(sorted(own)))
    assert kinds == sorted(kinds, key=("a", "b", "ab").index)
    context = Context(True, 5, 2, 0, 4)
    one, other = (Piece(each, Weights.copied(each))(batch, context) for each in (graph, found))
    for name in graph.outputs:
        assert torch.equal(one[name], other[name])

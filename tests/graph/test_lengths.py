"""One network captured at several lengths: which graph a step runs, and modules that are another network at another."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from causal_network import every_word, tagger
from manyhands.facts.errors import BadPlan, CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs, check_one_network

SHORT, LONG = 5, 12


def captured(module: nn.Module) -> dict[int, Graph]:
    return {length: capture(module, torch.ones(4, length)) for length in (SHORT, LONG)}


@cache
def taggers() -> dict[int, Graph]:
    words = {length: torch.ones(4, length, dtype=torch.long) for length in (SHORT, LONG)}
    module = tagger()
    return {length: capture(module, x, loss=every_word, target=x) for length, x in words.items()}


@pytest.mark.slow
def test_each_step_has_its_graph() -> None:
    lengths = LengthGraphs(taggers(), 3, [SHORT, LONG, LONG, SHORT])
    assert [lengths.length(step) for step in range(2, 8)] == [None, SHORT, LONG, LONG, SHORT, None]
    assert lengths.places(3, 7) == b"\0\1\1\0"
    again = LengthGraphs.from_places(dict(reversed(taggers().items())), 4, lengths.places(4, 7))
    assert [again.length(step) for step in range(3, 8)] == [None, LONG, LONG, SHORT, None]
    assert [*again.graphs] == [SHORT, LONG]
    assert lengths.of_longest([0.1, 0.2, 0.3, 0.4]) == [0.2, 0.3]


def test_a_short_step_says_how_long_a_long_one_may_take() -> None:
    lengths = LengthGraphs(taggers(), 0, [SHORT, LONG])
    assert lengths.work_ratio(1) == 1
    assert lengths.work_ratio(0) == pytest.approx(LONG / SHORT)


def test_graphs_that_came_over_the_wire_are_checked() -> None:
    other = taggers() | {SHORT: captured(nn.Tanh())[SHORT]}
    with pytest.raises(BadPlan, match=f"of lengths {SHORT} and {LONG} are not one network: the weight '0.weight'"):
        LengthGraphs.from_places(other, 0, b"\0\1")
    with pytest.raises(BadPlan, match="steps of lengths for which it has no graph"):
        LengthGraphs.from_places(taggers(), 0, b"\0\2")


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x.shape[1] > SHORT else x.sin()


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.tensor(x.shape[1])


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


def test_a_module_that_is_another_network_at_another_length_is_refused() -> None:
    with pytest.raises(
        CaptureFailed, match=r"length 5 than of 12: '\w+' \(.*test_lengths.py:\d+\) is in one of"
    ) as caught:
        check_one_network(captured(Looks()))
    assert "lengths=(12,)" in caught.value.hint


def test_a_tensor_made_of_the_length_is_refused_and_a_number_is_not() -> None:
    """A tensor is a constant of the network, which has one value; a number is an argument of an operator."""
    with pytest.raises(CaptureFailed, match=r"the tensor '.*' has other values"):
        check_one_network(captured(Counts()))
    check_one_network(captured(Divides()))
    check_one_network(taggers())

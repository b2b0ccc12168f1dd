"""Layers that are skipped by a random number: captured where every number decides alike, else refused by the line."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as drawn_by_name
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.drawn_numbers import DrawnNumber, decided
from manyhands.graph.verify import verify


class LayerDrop(nn.Module):
    """As in transformers' OPT (`continue`) and wav2vec 2.0."""

    def __init__(self, probability: float, draw: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.probability, self.draw = probability, draw
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            number = self.draw()
            skipped = self.training and number < self.probability
            if not skipped:
                x = self.dropout(layer(x))
        return x


DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand([]), "torch.rand of one": lambda: torch.rand(1),
    "torch.rand, item": lambda: torch.rand(1).item(),
    "numpy.random.random": lambda: numpy.random.random(),
    "numpy.random.uniform": lambda: numpy.random.uniform(0, 1), "random.uniform": lambda: random.uniform(0, 1),
    "random.random": lambda: drawn_by_name(),
}  # fmt: skip
X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("source", DRAWS)
def test_a_layer_that_is_never_skipped_is_captured(source: str) -> None:
    module = LayerDrop(0.0, DRAWS[source])
    graph = capture(module, X, loss=F.mse_loss, target=torch.zeros_like(X))
    assert [node.target for node in graph.nodes] == ["aten.linear.default", "aten.dropout.default"] * 2
    verified = verify(graph, module, F.mse_loss, X, torch.zeros_like(X))
    assert not verified.note, "the numbers that decide are no draws of the graph"
    assert verified.difference < 1e-12


@pytest.mark.parametrize("source", DRAWS)
def test_a_layer_that_may_be_skipped_is_refused_by_its_line(source: str) -> None:
    with pytest.raises(CaptureFailed, match=r"random number[\s\S]*test_drawn_numbers.py:\d+[\s\S]*layerdrop=0.0"):
        capture(LayerDrop(0.1, DRAWS[source]), X)
    assert isinstance(random.uniform(0, 1), float)
    assert isinstance(numpy.random.random(), float)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * numpy.random.rand(), lambda x: x + random.random(), lambda x: x * random.gauss(0, 1),
        lambda x: x[:, numpy.random.permutation(4).tolist()], lambda x: x if random.choice([True, False]) else -x,
        lambda x: x.where(torch.from_numpy(numpy.random.rand(4) < 0.5), 0.0), lambda x: x * float(random.random()),
        lambda x: x[:, int(torch.empty(1).uniform_(0.0, 3.0).item())],
    ],
    ids=["multiplied", "added", "normal", "permutation", "choice", "mask", "float", "item"],
)  # fmt: skip
def test_numbers_drawn_outside_of_torch_never_become_constants(use: Callable[[Tensor], Tensor]) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return use(x)

    with pytest.raises(CaptureFailed, match=r"random numbers with ((numpy.)?random|torch).*no device[\s\S]*\.py:\d+"):
        capture(Noisy(), X)


def test_one_number_for_all_samples_is_still_drawn_by_the_graph() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            number = torch.rand([], dtype=x.dtype)
            return x * number if not number < 0 else x

    graph = capture(Scaled(), X)
    assert [node.target for node in graph.nodes if node.target != "aten.zeros.default"] == [
        "aten.rand_like.default", "aten.mul.Tensor"
    ]  # fmt: skip


NUMBERS = st.floats(-2, 2)


@given(st.sampled_from(["<", "<=", ">", ">="]), NUMBERS, NUMBERS, NUMBERS, st.floats(0, 1, exclude_max=True))
def test_what_is_decided_holds_for_every_number(sign: str, number: float, low: float, high: float, part: float) -> None:
    low, high = min(low, high), max(low, high)
    drawn = low + part * (high - low)
    if not low <= drawn < high:
        return
    answer = decided(sign, number, low, high)
    truth = {"<": drawn < number, "<=": drawn <= number, ">": drawn > number, ">=": drawn >= number}[sign]
    assert answer in (None, truth)
    if number >= high or number < low:
        assert answer is not None
        stand_in = DrawnNumber("random.uniform", low, high, "")
        compared = {"<": stand_in.__lt__, "<=": stand_in.__le__, ">": stand_in.__gt__, ">=": stand_in.__ge__}
        assert compared[sign](number) is truth

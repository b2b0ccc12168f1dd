"""Samples side by side and answers taken apart give what the module gives for all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.errors import BadData
from manyhands.graph.batching import answers_of, batch_of, joined, named_sample
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.graph.weights import Weights
from tape import forward

SAMPLES = 7


class Many(nn.Module):
    """Two inputs of two types; outputs with samples first, in the middle, in rows of three, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, words: Tensor, numbers: Tensor) -> dict[str, Any]:
        x = self.line(self.table(words)) + numbers.unsqueeze(1)
        return {
            "first": x.sum(1), "others": (x.transpose(0, 1), x.flatten(0, 1)), "none": self.line.weight * 2,
        }  # fmt: skip


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 11, (SAMPLES, 3), generator=generator), torch.randn(SAMPLES, 4, generator=generator)


def captured() -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    module = Many()
    words, numbers = drawn()
    return module, capture(module, (words[:4], numbers[:4]))


MODULE, GRAPH = captured()


def run(values: dict[str, Tensor]) -> dict[str, Tensor]:
    piece = Piece(GRAPH, Weights.copied(GRAPH))
    found, _ = forward([piece], values)
    return found


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(4, 5))
def test_any_batches_give_what_the_module_gives(counts: list[int], size: int) -> None:
    words, numbers = drawn()
    samples = [named_sample(GRAPH, (words[place], numbers[place])) for place in range(SAMPLES)]
    found: list[Any] = []
    for count in counts:
        first = len(found)
        own = samples[first : first + count]
        if own:
            found += answers_of(GRAPH, run(batch_of(GRAPH, own, size)), len(own))
    every = joined(GRAPH, found)
    with torch.no_grad():
        wanted = MODULE(words[: len(found)], numbers[: len(found)])
    pairs = [
        (every["first"], wanted["first"]),
        *zip(every["others"], wanted["others"]),
        (every["none"], wanted["none"]),
    ]
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.allclose(one, other, atol=1e-6)


def test_an_answer_is_without_the_axis_of_samples() -> None:
    words, numbers = drawn()
    (answer,) = answers_of(GRAPH, run(batch_of(GRAPH, [named_sample(GRAPH, (words[0], numbers[0]))], 2)), 1)
    assert answer["first"].shape == (4,)
    assert [tuple(part.shape) for part in answer["others"]] == [(3, 4), (3, 4)]


def test_a_sample_is_a_copy_in_the_networks_types() -> None:
    words, numbers = drawn()
    own = numbers[0].double()
    named = named_sample(GRAPH, (words[0].to(torch.int32), own))
    own.zero_()
    given_words, given_numbers = (named[spec.name] for spec in GRAPH.inputs)
    assert given_words.dtype == torch.int64
    assert torch.equal(given_numbers, numbers[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one, two: one, "does not fit the example"),
        (lambda one, two: (one, two, two), "does not fit the example"),
        (lambda one, two: (one, two[:3]), r"has shape \(3,\); the network was captured for \(4,\)"),
        (lambda one, two: (one, two.unsqueeze(0)), "give them one by one"),
        (lambda one, two: (one.float(), two), "is float32; it must be int64"),
        (lambda one, two: (one, "two"), "is a str; it must be a tensor"),
    ],
    ids=["one", "three", "short", "a batch", "floats", "text"],
)
def test_a_sample_that_does_not_fit(change: Any, words: str) -> None:
    one, two = drawn()
    with pytest.raises(BadData, match=words):
        named_sample(GRAPH, change(one[0], two[0]))

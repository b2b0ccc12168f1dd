"""Weights that several stages hold: training a causal language model over stages is training it on one device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import ADAM, SGD, Batch, Ran, alone, plan_for, run, shared
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import ByTiles, Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.schedule.actions import Reduce
from small_networks import batches_of
from small_networks import captured as small_captured

WORDS, WIDTH, LENGTH, SAMPLES, STEPS = 13, 8, 6, 4, 4
DECAY = Optimizer("AdamW", lr=1e-2, weight_decay=0.1)


class Block(nn.Module):
    """Attention to what came before, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.reads, self.makes = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.reads(self.norm(x)).chunk(3, -1)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        out: Tensor = x + self.makes(torch.tanh(scores.softmax(-1) @ value))
        return out


class Language(nn.Module):
    """A causal language model: the words' embedding is the output layer too, and a block comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        out: Tensor = self.head(self.first(self.second(self.first(x))))
        return out


def next_word(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batch(seed: int) -> Batch:
    """Sentences of several lengths; what pads them has the label -100."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return words, torch.where(torch.arange(LENGTH) < lengths, words, -100)


BATCHES = [batch(seed) for seed in range(STEPS)]


def language() -> Language:
    torch.manual_seed(0)
    return Language().double()


@cache
def captured() -> Graph:
    words, labels = BATCHES[0]
    return capture(language(), words, loss=next_word, target=labels, granularity="operators")


def staged(graph: Graph, shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    """Stages with about equally many layers, each with its share of a micro-batch's samples."""
    count = len(graph.network.layers)
    ends = [count * place // len(shares) for place in range(len(shares) + 1)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=SAMPLES // sum(shares[0]), **options)


def assert_copies_equal(ran: Ran, name: str) -> None:
    """Every device that holds the weight has the same, to the last bit."""
    first, *others = [weights[name] for weights in ran.weights.values() if name in weights]
    assert others
    assert all(torch.equal(first, other) for other in others)


def tied_sums(ran: Ran) -> set[Reduce]:
    actions = (action for listed in ran.schedule.actions.values() for action in listed)
    return {action for action in actions if isinstance(action, Reduce) and action.weights}


SHARES: dict[str, list[list[int]]] = {
    "two stages": [[2], [2]],
    "three stages": [[1], [1], [1]],
    "shared stages": [[3, 1], [1, 1, 2], [4]],
    "shared embedding": [[1, 1], [2]],
}


@pytest.mark.quick("SGD-shared stages", "AdamW-two stages", "Adam-three stages")
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("optimizer", [SGD, ADAM, DECAY], ids=["SGD", "Adam", "AdamW"])
def test_a_language_model_with_padding(optimizer: Optimizer, shares: list[list[int]]) -> None:
    graph = captured()
    ran = run(graph, staged(graph, shares), BATCHES, optimizer)
    ran.assert_as_planned(STEPS)
    ran.assert_equals(*alone(graph, BATCHES, optimizer))
    assert_copies_equal(ran, "words.weight")
    assert {name for reduce in tied_sums(ran) for name in reduce.weights} >= {"words.weight"}

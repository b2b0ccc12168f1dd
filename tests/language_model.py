"""A small causal language model whose embedding is the output layer too, and sentences that are padded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Batch

WORDS, WIDTH, LENGTH, SAMPLES = 13, 8, 6, 4


class Block(nn.Module):
    """Attention to what came before. Without biases of keys: their gradients are zero but for rounding, and Adam
    divides the noise by its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.reads, self.makes = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

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


def language() -> Language:
    torch.manual_seed(0)
    return Language().double()

"""A small causal language model for texts of any length, and texts of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

WORDS, WIDTH, PLACES = 13, 8, 16


class Block(nn.Module):
    """Attention to what came before, and to no padding where a mask says which words are real."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.reads, self.makes = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        query, key, value = self.reads(self.norm(x)).chunk(3, -1)
        read = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + self.makes(torch.tanh(read))


class Causal(nn.Module):
    """Learned places, two blocks, and an output layer of its own; it may compute its own loss, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None] > 0)
        x = self.words(input_ids) + self.places(torch.arange(length))
        logits = self.head(self.second(self.first(x, seen), seen))
        return {"logits": logits} if labels is None else {"loss": next_word(logits, labels), "logits": logits}


class Bidirectional(Causal):
    """The same with attention to all words: without a mask it reads the padding."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        length = input_ids.shape[1]
        seen = torch.ones(1, length, length, dtype=torch.bool)
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None] > 0)
        x = self.words(input_ids) + self.places(torch.arange(length))
        made: Tensor = self.head(self.second(self.first(x, seen), seen))
        return made


def next_word(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def every_word(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def causal(kind: type[Causal] = Causal) -> Causal:
    torch.manual_seed(0)
    return kind().double()


class Texts(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Texts of these lengths, with masks unless left out; each word is its own label."""

    def __init__(self, lengths: Sequence[int], *, has_mask: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self.texts = [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]
        self.has_mask = has_mask

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        text = self.texts[index]
        mask = {"attention_mask": torch.ones_like(text)} if self.has_mask else {}
        return {"input_ids": text, **mask}, text


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Texts of these lengths alone, with a label for each word."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.texts = Texts(lengths).texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index], (self.texts[index] + 1) % WORDS


def tagger() -> nn.Sequential:
    """A label for every word by itself: quick to capture."""
    torch.manual_seed(0)
    layers = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(*layers).double()


def drawn_lengths(count: int, least: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(least, most + 1, (count,), generator=generator).tolist()

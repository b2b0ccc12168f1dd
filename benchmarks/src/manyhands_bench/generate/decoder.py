"""A causal decoder of a given size with random weights, and its cache on one device, which grows by concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderSize:
    """The size of a decoder."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 32_000
    positions: int = 512


class DecoderLayer(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self, number: int, size: DecoderSize) -> None:
        super().__init__()
        self.number, self.heads = number, size.heads
        self.norm, self.joined = nn.LayerNorm(size.width), nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(size.width), nn.Linear(size.width, 4 * size.width), nn.GELU(),
            nn.Linear(4 * size.width, size.width),
        )  # fmt: skip

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.joined(self.norm(x)).chunk(3, -1)
        )
        mask = None
        if cache is not None:
            keys, values = cache.update(self.number, keys, values)
            mask = cache.mask
        is_causal = mask is None and x.shape[1] > 1
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=is_causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.perceptron(x)
        return made


class Decoder(nn.Module):
    """Learned positions; the output layer is the embedding."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.positions, size.width)
        self.layers = nn.ModuleList(DecoderLayer(number, size) for number in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        with torch.no_grad():
            self.words.weight.mul_(0.02)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if cache is None else cache.positions
        x = self.words(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GrowingCache:
    """Keys and values of one device, joined to those before them at every token."""

    mask = None

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = torch.zeros(1, 1, dtype=torch.int64)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.kept:
            keys, values = (torch.cat(parts, 2) for parts in zip(self.kept[layer], (keys, values)))
        self.kept[layer] = (keys, values)
        return keys, values


@torch.no_grad()
def plain_texts(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the likeliest tokens after prompts of one length, all prompts in one batch on this device."""
    cache, length = GrowingCache(), len(prompts[0])
    cache.positions = torch.arange(length).unsqueeze(0)
    tokens = decoder(torch.tensor(prompts), cache)[:, -1].argmax(-1, keepdim=True)
    made = [tokens]
    for place in range(length, length + count - 1):
        cache.positions = torch.tensor([[place]])
        tokens = decoder(tokens, cache)[:, -1].argmax(-1, keepdim=True)
        made.append(tokens)
    rows: list[list[int]] = torch.cat(made, 1).tolist()
    return rows

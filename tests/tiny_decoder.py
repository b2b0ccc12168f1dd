"""A causal decoder small enough for tests, with the cache that manyhands gives; and its texts on one device, where the
whole text is computed again for every token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.inference.sampling import Sampling, generator_of
from manyhands.inference.token_cache import TokenCache

WORDS, POSITIONS, LAYERS = 29, 24, 3


class Attention(nn.Module):
    def __init__(self, number: int, width: int, heads: int) -> None:
        super().__init__()
        self.number, self.heads = number, heads
        self.norm, self.joined, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: TokenCache | None) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.joined(self.norm(x)).chunk(3, -1)
        )
        mask = None
        if cache is not None:
            keys, values = cache.update(self.number, keys, values)
            mask = cache.mask
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=cache is None)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class TinyDecoder(nn.Module):
    """Learned positions, layer norms, and an output layer that is the embedding."""

    def __init__(self, seed: int = 0, layers: int = LAYERS, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(POSITIONS, width)
        self.layers = nn.ModuleList(Attention(number, width, 2) for number in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        with torch.no_grad():
            self.words.weight.mul_(3)  # else a token is followed by itself
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, cache: TokenCache | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if cache is None else cache.positions
        x = self.words(input_ids) * 0.1 + self.places(places)
        for layer in self.layers:
            x = layer(x, cache)
        logits: Tensor = self.head(x)
        return logits


@torch.no_grad()
def on_one_device(
    decoder: nn.Module, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling | None = None, *,
    seed: int = 0, ends: Collection[int] = (),
) -> list[list[int]]:  # fmt: skip
    """The new tokens of each prompt, without a cache."""
    texts = []
    for number, prompt in enumerate(prompts):
        generator, text = generator_of(seed, number), list(prompt)
        for _ in range(count):
            logits = decoder(torch.tensor([text]))[0, -1]
            text.append((sampling or Sampling()).next_token(logits, generator))
            if text[-1] in ends:
                break
        texts.append(text[len(prompt) :])
    return texts

"""The choice of the next token by the numbers that a network gives every token: the same on one device as on many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """The settings of a choice; without a temperature the likeliest token is taken."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature is None

    def next_token(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return a token. `logits`: a number for each token of the vocabulary; `generator` is advanced by one draw, as
        transformers' `generate(do_sample=True)` advances PyTorch's own."""
        if self.temperature is None:
            return int(logits.argmax())
        scores = logits.reshape(1, -1).float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[1]:
            least = torch.topk(scores, self.top_k).values[:, -1:]
            scores = scores.masked_fill(scores < least, _LEAST)
        if self.top_p is not None and self.top_p < 1:
            scores = self._likeliest(scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

    def _likeliest(self, scores: Tensor) -> Tensor:
        """Return the scores without the least likely tokens, whose probabilities add up to no more than 1 - top_p."""
        assert self.top_p is not None
        ordered, places = torch.sort(scores, descending=False)
        removed = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
        removed[..., -1:] = False
        return scores.masked_fill(removed.scatter(1, places, removed), _LEAST)


def generator_of(seed: int, prompt: int) -> torch.Generator:
    """Return the random numbers of a prompt: they do not depend on the other prompts. Those of the first prompt are
    PyTorch's own after torch.manual_seed(seed)."""
    return torch.Generator().manual_seed((seed + prompt) % 2**63)

"""BERT-Small (4 layers of 512) with a classifier.

Devlin et al., "BERT", NAACL 2019 (arXiv:1810.04805); the size is google/bert_uncased_L-4_H-512_A-8 of
Turc et al., "Well-Read Students Learn Better" (arXiv:1908.08962), 28,763,648 parameters before the classifier.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Example ids stay below this, so that models built with a smaller vocabulary take them too.
_EXAMPLE_VOCABULARY = 1000


class SelfAttention(nn.Module):
    """Multi-head attention, spelled out so that each product is a layer of its own in a captured graph."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        """Turn (batch, length, hidden) into (batch, heads, length, hidden / heads)."""
        return torch.unflatten(x, 2, (self.heads, x.shape[2] // self.heads)).transpose(1, 2)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(query.shape[3])
        if bias is not None:
            scores = scores + bias
        weights = self.dropout(scores.softmax(dim=3))
        out: Tensor = self.output(torch.matmul(weights, value).transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """A layer of attention and a two-layer perceptron, each added to its input and then normalised."""

    def __init__(self, hidden: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.inner = nn.Linear(hidden, inner)
        self.activation = nn.GELU()
        self.outer = nn.Linear(inner, hidden)
        self.outer_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, bias)))
        out: Tensor = self.outer_norm(x + self.dropout(self.outer(self.activation(self.inner(x)))))
        return out


class Bert(nn.Module):
    """The model: embeddings, encoder layers, the pooler over the first token, and a classifier.

    The mask holds 1 for tokens and 0 for padding. All tokens belong to the first segment.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        inner: int,
        num_classes: int = 2,
        vocabulary: int = 30522,
        max_length: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden, padding_idx=0)
        self.positions = nn.Embedding(max_length, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, inner, dropout) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.positions.weight[:length] + self.segments.weight[0]
        x = self.dropout(self.norm(x))
        bias = None
        if attention_mask is not None:
            # Large enough to silence padding, small enough for half precision; the published code's number.
            bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        out: Tensor = self.classifier(self.dropout(pooled))
        return out


def bert_small(num_classes: int = 2, *, vocabulary: int = 30522, max_length: int = 512, dropout: float = 0.1) -> Bert:
    return Bert(
        layers=4,
        hidden=512,
        heads=8,
        inner=2048,
        num_classes=num_classes,
        vocabulary=vocabulary,
        max_length=max_length,
        dropout=dropout,
    )


def example_inputs(batch_size: int, input_shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random sentences of different lengths, zero after their end."""
    (length,) = input_shape
    lengths = torch.randint(max(1, length // 2), length + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(1, _EXAMPLE_VOCABULARY, (batch_size, length), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}

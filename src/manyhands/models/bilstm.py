"""A bidirectional LSTM that classifies film reviews (IMDB: Maas et al., ACL 2011).

Layers: Graves and Schmidhuber, "Framewise Phoneme Classification with Bidirectional LSTM", 2005. The widths follow
the feature sizes that the SPLIT paper (edge-cloud pipeline training; its Table 3, batch 32) gives for its cuts:
embedding 256 x 100 = 3.13 MB, first layer 256 x 200 = 6.25 MB, second layer 256 x 100 = 3.13 MB, pooled 200 = 0.02 MB.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Example ids stay below this, so that models built with a smaller vocabulary take them too.
_EXAMPLE_VOCABULARY = 1000


class BiLSTM(nn.Module):
    """A classifier of an embedding, two bidirectional LSTM layers, mean and maximum over time, and a linear layer."""

    def __init__(
        self,
        num_classes: int = 2,
        *,
        vocabulary: int = 25002,
        embedding: int = 100,
        hidden: tuple[int, int] = (100, 50),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        # One nn.LSTM per layer, so that a cut may fall between them.
        self.first = nn.LSTM(embedding, hidden[0], batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * hidden[0], hidden[1], batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(4 * hidden[1], num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.first(self.embedding(tokens))
        x, _ = self.second(self.dropout(x))
        pooled = torch.cat((x.mean(dim=1), x.amax(dim=1)), dim=1)
        out: Tensor = self.classifier(self.dropout(pooled))
        return out


def bilstm(num_classes: int = 2, *, vocabulary: int = 25002, dropout: float = 0.5) -> BiLSTM:
    """Return the model; the default vocabulary is IMDB's 25,000 commonest words, padding and "unknown"."""
    return BiLSTM(num_classes, vocabulary=vocabulary, dropout=dropout)


def example_inputs(batch_size: int, input_shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random reviews, all of full length."""
    return torch.randint(1, _EXAMPLE_VOCABULARY, (batch_size, *input_shape), generator=generator)

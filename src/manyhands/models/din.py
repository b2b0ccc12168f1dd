"""Deep Interest Network for MovieLens: Zhou et al., KDD 2018 (arXiv:1706.06978).

Inputs to the last perceptron are those of the authors' code: candidate, sum of the history, their product, and the
attended interest. With 128-long embeddings of film and genre these are 4 x 256 = 1024 numbers, the 0.125 MB for batch
32 that the SPLIT paper (edge-cloud pipeline training) gives for this network in its Table 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Example ids stay below these, so that models built with fewer films take them too.
_EXAMPLE_MOVIES = 1000
_EXAMPLE_GENRES = 18


class Dice(nn.Module):
    """The paper's activation: a leaky rectifier whose corner follows the batch's mean and variance."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, eps=1e-8, affine=False)
        self.slope = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.norm(x))
        return gate * x + (1.0 - gate) * self.slope * x


class ActivationUnit(nn.Module):
    """A network that computes how much each film of the history matters for the candidate. Weights are not normalised,
    as in the paper."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(4 * features, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1)
        )

    def forward(self, candidate: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        query = candidate.unsqueeze(1).expand_as(history)
        scores: Tensor = self.score(torch.cat((query, history, query - history, query * history), dim=2))
        weights = scores.transpose(1, 2) * mask.unsqueeze(1)
        return torch.matmul(weights, history).squeeze(1)


class DeepInterestNetwork(nn.Module):
    """A network that gives one number per sample: the logit that this user clicks this film. Id 0 and mask 0 are
    padding."""

    def __init__(self, *, movies: int, genres: int, embedding: int) -> None:
        super().__init__()
        self.movies = nn.Embedding(movies + 1, embedding, padding_idx=0)
        self.genres = nn.Embedding(genres + 1, embedding, padding_idx=0)
        for table in (self.movies, self.genres):
            nn.init.normal_(table.weight, std=embedding**-0.5)
        features = 2 * embedding
        self.attention = ActivationUnit(features)
        self.head = nn.Sequential(
            nn.Linear(4 * features, 200), Dice(200), nn.Linear(200, 80), Dice(80), nn.Linear(80, 1)
        )

    def _embed(self, movies: Tensor, genres: Tensor) -> Tensor:
        return torch.cat((self.movies(movies), self.genres(genres)), dim=-1)

    def forward(
        self, history_movies: Tensor, history_genres: Tensor, history_mask: Tensor, movie: Tensor, genre: Tensor
    ) -> Tensor:
        candidate = self._embed(movie, genre)
        history = self._embed(history_movies, history_genres)
        mask = history_mask.to(history.dtype)
        interest = self.attention(candidate, history, mask)
        total = (history * mask.unsqueeze(2)).sum(dim=1)
        out: Tensor = self.head(torch.cat((candidate, total, candidate * total, interest), dim=1))
        return out.squeeze(1)


def din(*, movies: int = 27278, genres: int = 21, embedding: int = 128) -> DeepInterestNetwork:
    """Return the model; default sizes are those of MovieLens-20M, Table 1 of the paper."""
    return DeepInterestNetwork(movies=movies, genres=genres, embedding=embedding)


def example_inputs(batch_size: int, input_shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random histories of different lengths, zero after their end, and one candidate each."""
    (length,) = input_shape

    def ids(limit: int, *shape: int) -> Tensor:
        return torch.randint(1, limit, shape, generator=generator)

    lengths = torch.randint(1, length + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {
        "history_movies": ids(_EXAMPLE_MOVIES, batch_size, length) * mask,
        "history_genres": ids(_EXAMPLE_GENRES, batch_size, length) * mask,
        "history_mask": mask,
        "movie": ids(_EXAMPLE_MOVIES, batch_size),
        "genre": ids(_EXAMPLE_GENRES, batch_size),
    }

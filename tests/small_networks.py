"""Small networks that each have something a share or a cut could get wrong, captured with a loss, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import Batch
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

CLASSES = 5
PICTURE = (1, 8, 8)


class Small(nn.Module):
    """Convolutions, batch norms, dropout, a residual and a linear layer.

    No biases before batch norms: their gradient is zero but for rounding, and Adam divides the noise by its own size.
    """

    def __init__(self, *, bias: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1, bias=bias)
        self.b = nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.d = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.e = nn.Linear(4 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(self.a(x)))
        x = torch.relu(x + self.d(self.c(x)))
        x = functional.avg_pool2d(x, 2).flatten(1)
        out: Tensor = self.e(self.drop(x))
        return out


class Skips(nn.Module):
    """Tensors that jump over several stages, one of them into two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 3, 3, padding=1)
        self.b = nn.Conv2d(3, 3, 3, padding=1)
        self.c = nn.Conv2d(3, 3, 3, padding=1)
        self.d = nn.Conv2d(6, 3, 3, padding=1)
        self.e = nn.Conv2d(3, 2, 3, padding=1)
        self.f = nn.Linear(2 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.a(x))
        b = torch.tanh(self.b(a))
        c = torch.tanh(self.c(b))
        d = torch.tanh(self.d(torch.cat([c, a], 1)))
        e = torch.tanh(self.e(d + a * b))
        out: Tensor = self.f(e.flatten(1))
        return out


class Pair(nn.Module):
    """Two inputs, the second read late; two outputs, the first made early and read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8 + 3, CLASSES)

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.a(first))
        early = self.b(x)
        x = torch.tanh(self.c(x)) * early.sum(1, keepdim=True)
        return {"early": early, "late": self.d(torch.cat([x, second], 1))}


def pair_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    late = functional.cross_entropy(output["late"], target["classes"])
    return late + functional.mse_loss(output["early"], target["values"])


class Named(nn.Module):
    """Inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.d = nn.Linear(8 + 3, CLASSES)

    def forward(self, wide: Tensor, narrow: Tensor) -> Tensor:
        out: Tensor = self.d(torch.cat([torch.tanh(self.a(wide)), narrow], 1))
        return out


class EarlyOnly(nn.Module):
    """The first output is made in the first layer and read by nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.c(torch.tanh(self.b(x)))


def both_loss(output: Sequence[Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[1], target) + (output[0] ** 2).mean()


class UnreadHead(nn.Module):
    """A head that the loss does not read: its weights have no gradient, and weight decay leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head, self.c = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.a(x))
        return self.head(x), self.c(x)


def second_loss(output: Sequence[Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[1], target)


class GivesInput(nn.Module):
    """Returns its input beside what it made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.b(torch.tanh(self.a(x)))


def like_input_loss(output: Sequence[Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output[1], output[0]) + functional.mse_loss(output[1], target)


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.c(torch.tanh(self.b(x))))
        out: Tensor = self.d(x)
        return out


class Frozen(Small):
    """A first convolution and a batch norm that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)


class Evaluating(Small):
    """A batch norm left in evaluation mode among one in training: it shares no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.b.running_mean.normal_()  # type: ignore[union-attr,operator]
        self.b.eval()


class Norms(nn.Module):
    """A batch norm first of all, one without weights, one without running statistics, and over rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(1)
        self.a = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.plain = nn.BatchNorm2d(3, affine=False)
        self.b = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.still = nn.BatchNorm2d(3, track_running_stats=False)
        self.c = nn.Linear(3 * 16, 6, bias=False)
        self.flat = nn.BatchNorm1d(6, momentum=0.3, eps=1e-3)
        self.d = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.plain(self.a(self.first(x))))
        x = functional.avg_pool2d(torch.tanh(self.still(self.b(x))), 2).flatten(1)
        out: Tensor = self.d(torch.tanh(self.flat(self.c(x))))
        return out


class OnlyNorm(nn.Module):
    """A batch norm without weights on the input: nothing before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(6, affine=False), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(self.norm(x))
        return out


class Words(nn.Module):
    """Rows of several tokens a sample, batch norm over them, and a table of places that has no samples at all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(4, 6)
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.tanh(self.places.weight)
        x = self.words(tokens) + places
        x = self.norm(torch.tanh(self.a(x)).flatten(0, 1))
        x = x.unflatten(0, (-1, 4)) * places
        out: Tensor = self.b(x.mean(1))
        return out


class Logs(nn.Module):
    """A logarithm in the middle: of negative numbers it is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.log(self.b(x) + 10.0)
        out: Tensor = self.d(torch.tanh(self.c(x)))
        return out


class Weighted(nn.Module):
    """A loss with a constant of its own."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, target, pos_weight=self.weights)


class Drawn:
    """Batches drawn from a seed, for each network."""

    def __init__(self, samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.samples, self.dtype = samples, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(self.samples, *shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def whole(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, (self.samples, *shape), generator=self.generator)


def pictures(drawn: Drawn) -> Batch:
    return drawn.numbers(*PICTURE), drawn.whole(CLASSES)


def rows(drawn: Drawn) -> Batch:
    return drawn.numbers(6), drawn.whole(CLASSES)


def two(drawn: Drawn) -> Batch:
    return (drawn.numbers(6), drawn.numbers(3)), {"classes": drawn.whole(CLASSES), "values": drawn.numbers(4)}


def by_name(drawn: Drawn) -> Batch:
    return {"wide": drawn.numbers(6), "narrow": drawn.numbers(3)}, drawn.whole(CLASSES)


def tokens(drawn: Drawn) -> Batch:
    return drawn.whole(11, 4), drawn.whole(CLASSES)


def one_hot(drawn: Drawn) -> Batch:
    return drawn.numbers(*PICTURE), functional.one_hot(drawn.whole(CLASSES), CLASSES).to(drawn.dtype)


def like_input(drawn: Drawn) -> Batch:
    return drawn.numbers(6), drawn.numbers(6)


_cross_entropy = functional.cross_entropy
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Drawn], Batch], Any]] = {
    "small": (Small, pictures, _cross_entropy),
    "biased": (partial(Small, bias=True), pictures, _cross_entropy),
    "still": (partial(Small, dropout=0.0), pictures, _cross_entropy),
    "skips": (Skips, pictures, _cross_entropy),
    "pair": (Pair, two, pair_loss),
    "named": (Named, by_name, _cross_entropy),
    "early": (EarlyOnly, rows, both_loss),
    "unread": (UnreadHead, rows, second_loss),
    "gives-input": (GivesInput, like_input, like_input_loss),
    "tied": (Tied, rows, _cross_entropy),
    "frozen": (Frozen, pictures, _cross_entropy),
    "evaluating": (Evaluating, pictures, _cross_entropy),
    "norms": (Norms, pictures, _cross_entropy),
    "only-norm": (OnlyNorm, rows, _cross_entropy),
    "words": (Words, tokens, _cross_entropy),
    "logs": (Logs, rows, _cross_entropy),
    "summed": (Small, pictures, partial(functional.cross_entropy, reduction="sum")),
    "squares": (Small, one_hot, functional.mse_loss),
    "weighted": (Small, one_hot, Weighted()),
}


@cache
def module_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return NETWORKS[name][0]().to(dtype)


@cache
def captured(name: str, *, granularity: str = "operators", dtype: torch.dtype = torch.float64) -> Graph:
    """The graph of a network, with its loss. Its state is the module's: nobody may train that."""
    _, draw, loss = NETWORKS[name]
    batch, target = draw(Drawn(4, seed=99, dtype=dtype))
    module = module_of(name, dtype)
    return capture(module, batch, loss=loss, target=target, granularity=granularity, name=name)


def batches_of(
    name: str, count: int, samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Batch]:
    drawn = Drawn(samples, seed, dtype)
    return [NETWORKS[name][1](drawn) for _ in range(count)]

"""Modules that compute their own loss without labels: autoencoders (plain, variational, masked), and pairs of views."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import by_pieces
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.alike_draws import AlikeDraws
from manyhands.graph.capture import capture
from manyhands.graph.own_loss import module_loss
from manyhands.graph.store import load, save

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    mask: Tensor | None = None


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.deviation, self.decoder = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)
        self.double()


class Autoencoder(Body):
    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x).relu()), x)


class Penalised(Body):
    """The code is kept small, and so are the weights."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encoder(x)
        distances = (self.decoder(code) - x).square().sum(1)
        loss = distances.sum() / x.shape[0] + 0.1 * code.abs().mean() + 0.01 * self.decoder.weight.square().sum()
        return {"loss": loss, "code": code}


class Variational(Body):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x), self.deviation(x)
        code = mean + torch.randn_like(mean) * (spread / 2).exp()
        decoded = self.decoder(code)
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(decoded, x.sigmoid(), reduction="sum") / x.shape[
            0
        ] + divergence, decoded


class Masked(Body):
    """As ViTMAE: which parts are hidden is drawn, and the loss is that of the hidden parts."""

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Output:
        if noise is None:
            noise = torch.rand(x.shape[0], x.shape[1], dtype=x.dtype)
        mask = (noise.argsort(1).argsort(1) >= 2).to(x.dtype)
        decoded = self.decoder(self.encoder(x * (1 - mask)))
        return Output(((decoded - x).square() * mask).sum() / mask.sum(), decoded, mask)


class Views(Body):
    """Two views of each sample are pulled together, and those of others apart."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.normalize(self.encoder(x), dim=-1), F.normalize(self.deviation(x), dim=-1)
        return F.cross_entropy(one @ other.t() * 5, torch.arange(x.shape[0]))


class SelfLabelled(nn.Module):
    """Its labels come with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Output:
        logits = self.head(x)
        return Output(F.cross_entropy(logits, classes) if classes is not None else logits.sum(), logits)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "autoencoder": (Autoencoder, X, "mean"), "penalised": (Penalised, X, "mean"),
    "variational": (Variational, X, "mean"), "masked": (Masked, X, "whole"), "views": (Views, X, "whole"),
    "keyword": (Autoencoder, {"x": X}, "mean"),
    "labels among the inputs": (SelfLabelled, {"x": X, "classes": torch.tensor([0, 2, 1, 0])}, "whole"),
}  # fmt: skip


def repeated(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: torch.cat([part, part[:1]]) for key, part in batch.items()}
    return torch.cat([batch, batch[:1] + 1])


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_modules_own(name: str, tmp_path: Path) -> None:
    make, batch, combination = CASES[name]
    module = make()
    graph = capture(module, batch, loss="own", verify=True)
    assert graph.loss is not None
    assert graph.loss_combination == combination
    save(graph, tmp_path / "stored")
    for known in (graph, load(tmp_path / "stored")):
        for given in (batch, repeated(batch)):
            with AlikeDraws(known):
                value = module_loss(copy.deepcopy(module), "own", given, ())
            with AlikeDraws(known) as draws:
                again = module_loss(module, "own", given, None)
            draws.check_all_drawn()
            assert torch.equal(value, again)
            trained = dict(module.named_parameters())
            wanted = dict(zip(trained, torch.autograd.grad(again, list(trained.values()), allow_unused=True)))
            for cuts in ((), (2, 4)):
                step = by_pieces(known, cuts, given, ())
                torch.testing.assert_close(step.loss, value.detach(), rtol=1e-12, atol=0)
                for key, gradient in wanted.items():
                    if gradient is not None:
                        torch.testing.assert_close(step.gradients[key], gradient, rtol=1e-10, atol=1e-14)


def test_targets_that_forward_has_no_argument_for_are_not_used() -> None:
    """As of a data set of pictures and classes."""
    graph = capture(Autoencoder(), X, target=torch.arange(4))
    assert graph.loss is not None
    assert graph.loss_combination == "mean"
    for targets in (torch.arange(4), (), {"boxes": torch.zeros(4, 2)}):
        assert torch.equal(by_pieces(graph, (), X, targets).loss, by_pieces(graph, (), X, ()).loss)


def test_a_module_without_a_loss_is_refused_by_its_line() -> None:
    class Plain(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

    text = r"No loss is given, and Plain.forward, without labels, returns none: it takes x, and returns a tensor of "
    with pytest.raises(CaptureFailed, match=text + r"shape batch x 3\.\n  at .*test_unlabelled_loss.py:\d+"):
        capture(Plain(), X, loss="own")
    with pytest.raises(CaptureFailed, match="No loss is given"):
        capture(Plain(), X, target=torch.arange(4))

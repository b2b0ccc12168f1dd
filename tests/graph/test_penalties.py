"""Losses that read the model's parameters: what they compute from weights alone becomes a part of the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graph_checks import by_pieces
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import weights_of
from manyhands.graph.store import load, save

BATCH = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 1, 0])
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.unread = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.norm(self.one(x))))


def losses(module: Net) -> dict[str, Loss]:
    direct = module.two.weight  # known to the loss by itself, not through the module
    return {
        "all": lambda o, t: F.cross_entropy(o, t) + 0.1 * sum(p.pow(2).sum() for p in module.parameters()),
        "norms": lambda o, t: F.cross_entropy(o, t) + torch.stack([p.norm() for p in module.parameters()]).sum(),
        "direct": lambda o, t: F.cross_entropy(o, t) + direct.abs().mean(),
        "times": lambda o, t: F.cross_entropy(o, t) * (1 + module.one.bias.square().sum()),
        "mixed in": lambda o, t: F.cross_entropy(o @ module.two.weight[:, :2], t),
    }


def exact(module: nn.Module, loss: Loss) -> Graph:
    graph = capture(module, BATCH, loss=loss, target=CLASSES, verify=True)
    same_as_plain(graph, module, loss)
    return graph


def same_as_plain(graph: Graph, module: nn.Module, loss: Loss) -> None:
    """Loss and gradients are those of the module itself: a copy would not be the one that the loss knows."""
    value = loss(module(BATCH), CLASSES)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted = dict(zip(trained, torch.autograd.grad(value, list(trained.values()), allow_unused=True)))
    for cuts in ((), (1, 3, 5)):
        step = by_pieces(graph, cuts, BATCH, CLASSES)
        assert abs(float(step.loss) - float(value.detach())) <= 1e-14 * abs(float(value.detach()))
        for name, gradient in wanted.items():
            found = step.gradients.get(name)
            zero = torch.zeros_like(trained[name])
            one, other = (zero if g is None else g for g in (found, gradient))
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("name", ["all", "norms", "direct", "times", "mixed in"])
def test_gradients_are_the_modules_own(name: str) -> None:
    module = Net()
    graph = exact(module, losses(module)[name])
    assert graph.penalties
    assert graph.loss is not None
    assert not graph.loss.weights
    assert graph.loss_combination == "mean"


@pytest.mark.slow
def test_a_penalty_stays_in_the_layer_of_its_weight() -> None:
    module = Net()
    graph = capture(module, BATCH, loss=losses(module)["all"], target=CLASSES, granularity="operators")
    plain = capture(Net(), BATCH, loss=F.cross_entropy, target=CLASSES, granularity="operators")
    assert len(graph.network.layers) == len(plain.network.layers)
    homes = {}
    for layer in graph.network.layers:
        for name in layer.weights:
            homes.setdefault(name, []).append(layer.name)
    assert all(len(layers) == 1 for layers in homes.values())
    assert "unread" in homes  # a weight that only the loss reads


def test_a_loss_that_adds_up_is_not_shared_with_a_penalty() -> None:
    """The penalty would be counted once for every share."""
    module = Net()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum") + module.one.weight.square().sum()

    assert exact(module, loss).loss_combination == "whole"


@pytest.mark.slow
def test_a_frozen_weight_is_a_constant() -> None:
    module = Net()
    module.one.requires_grad_(False)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + (module.two.weight - module.one.weight.sum()).square().sum()

    graph = exact(module, loss)
    assert graph.loss is not None
    assert len(graph.loss.weights) == 1


@pytest.mark.slow
def test_what_changes_unseen_is_refused() -> None:
    module = Net()
    view = module.two.weight.detach().view(-1)
    with pytest.raises(CaptureFailed, match=r"reads the buffer 'norm.running_mean', which the model writes"):
        capture(module, BATCH, loss=lambda o, t: F.cross_entropy(o, t) + module.norm.running_mean.sum(), target=CLASSES)
    with pytest.raises(CaptureFailed, match=r"a view of the parameter 'two.weight'"):
        capture(module, BATCH, loss=lambda o, t: F.cross_entropy(o, t) + view.sum(), target=CLASSES)


@pytest.mark.slow
def test_a_stored_graph_keeps_its_penalties(tmp_path: Path) -> None:
    module = Net()
    graph = exact(module, losses(module)["all"])
    save(graph, tmp_path / "graph")
    again = load(tmp_path / "graph")
    assert again.penalties == graph.penalties
    same_as_plain(again, module, losses(module)["all"])
    assert {name for node in again.nodes for name in weights_of(node)} >= {"unread", "one.weight"}

"""A rehearsed split: without delay it is plain training; with it, what is computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import alone
from manyhands.executor.codec import pack, unpack
from manyhands.executor.rehearsal import Rehearsal
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Replay
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.tape import bind_inputs, bind_tree
from real_runs import SGD as REPLAYED_SGD
from replayed import CUT, Replayed, plan_for
from replayed import batches as replayed_batches
from replayed import captured as replayed_graph
from small_networks import batches_of, captured

SGD = Optimizer("SGD", lr=0.1, momentum=0.9)
Batch = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Small(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.third = nn.Linear(8, 3)
        self.first.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x)))
        return found


def graph_of(model: nn.Module) -> Graph:
    example = torch.randn(4, 6, dtype=torch.float64)
    target = torch.zeros(4, dtype=torch.int64)
    return capture(model.double(), example, loss=F.cross_entropy, target=target, name="small")


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return graph_of(Small())


def batches(graph: Graph, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    assert graph.loss is not None
    for _ in range(count):
        x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        yield bind_inputs(graph, x), bind_tree(graph.loss.input_tree[0][1], y)


def trained(graph: Graph, cut: int, steps: int = 12, **facts: object) -> Rehearsal:
    found = Rehearsal(graph, SGD, cut, **facts)  # type: ignore[arg-type]
    for inputs, targets in batches(graph, steps):
        found.train(inputs, targets)
    found.drain()
    return found


def distance(one: Rehearsal, other: Rehearsal) -> float:
    there = other.state()
    return max(float((own - there[name]).abs().max()) for name, own in one.state().items())


def test_without_delay_a_cut_changes_nothing(graph: Graph) -> None:
    """Drop-out and batch statistics included."""
    whole = trained(graph, 0)
    for cut in range(1, len(graph.network.layers)):
        found = trained(graph, cut)
        assert distance(found, whole) < 1e-12
        assert found.losses == pytest.approx(whole.losses, rel=1e-12)
        assert found.staleness == [0] * 12
    assert whole.losses[-1] < whole.losses[0]


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", ["skips", "pair", "early", "unread", "gives-input", "frozen", "norms", "words"])
def test_any_network_anywhere(name: str) -> None:
    graph = captured(name)
    assert graph.loss is not None
    given = batches_of(name, 3, 6)
    weights, losses = alone(graph, given, SGD)
    count = len(graph.network.layers)
    for cut in {1, count // 2, count - 1}:
        found = Rehearsal(graph, SGD, cut)
        for inputs, targets in given:
            found.train(bind_inputs(graph, inputs), bind_tree(graph.loss.input_tree[0][1], targets))
        assert found.losses == pytest.approx(losses, rel=1e-10)
        assert all(torch.allclose(own, weights[one], rtol=1e-9) for one, own in found.state().items())


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("replay", "expected"),
    [
        (Replay(2, "grouped"), [0, 1, 2] * 4),
        (Replay(2, "window"), [0, 1, *[2] * 10]),
        (Replay(4, "grouped"), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]),
        (Replay(None), list(range(12))),
    ],
    ids=str,
)
def test_staleness_is_as_large_as_k_allows(graph: Graph, replay: Replay, expected: list[int]) -> None:
    found = trained(graph, 1, replay=replay)
    assert found.staleness == expected
    assert distance(found, trained(graph, 0)) > 1e-6


class Plain(nn.Module):
    """Nothing random and no statistics: easily done by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.server = nn.Sequential(nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.server(self.edge(x))
        return found


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("k", "bits", "feeds_back"), [(0, 4, True), (2, 32, True), (2, 4, True), (2, 4, False)])
def test_replay_and_feedback_by_hand(k: int, bits: int, feeds_back: bool) -> None:
    """Eq. 3 and Algorithm 1 with plain modules and autograd."""
    torch.manual_seed(3)
    model = Plain()
    graph = graph_of(model)
    found = trained(graph, 1, 6, codec=Codec(bits, error_feedback=feeds_back), replay=Replay(k))
    up = torch.optim.SGD(model.edge.parameters(), lr=0.1, momentum=0.9)
    down = torch.optim.SGD(model.server.parameters(), lr=0.1, momentum=0.9)
    pairs = [(next(iter(a.values())), next(iter(b.values()))) for a, b in batches(graph, 6)]
    losses = []
    for first in range(0, 6, k + 1):
        group = []
        for x, y in pairs[first : first + k + 1]:
            feature = model.edge(x).detach()
            error = torch.zeros_like(feature)
            arrived = feature
            if bits < 32:
                arrived = unpack(pack(feature, bits, error), tuple(feature.shape), feature.dtype, bits, "cpu")
            leaf = arrived.clone().requires_grad_()
            loss = F.cross_entropy(model.server(leaf), y)
            down.zero_grad()
            loss.backward()
            down.step()
            losses.append(loss.item())
            assert leaf.grad is not None
            group.append((x, leaf.grad - error * leaf.grad**2 if feeds_back else leaf.grad))
        for x, gradient in group:
            up.zero_grad()
            model.edge(x).backward(gradient)
            up.step()
    assert found.losses == pytest.approx(losses, rel=1e-9)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found.weights.tensors[name], tensor, rtol=1e-9), name


def test_nothing_comes_back_to_what_is_frozen() -> None:
    torch.manual_seed(0)
    graph = graph_of(Small(frozen=True))
    before = Rehearsal(graph, SGD, 1)
    found = trained(graph, 1, replay=Replay(3))
    assert found.staleness == []
    assert torch.equal(found.weights.tensors["first.0.weight"], before.weights.tensors["first.0.weight"])
    moved = found.weights.tensors["first.1.running_mean"] - before.weights.tensors["first.1.running_mean"]
    assert moved.abs().max() > 0, "its statistics move all the same"


def test_numbers_that_are_none(graph: Graph) -> None:
    found = Rehearsal(graph, SGD, 1, codec=Codec(8))
    inputs, targets = next(batches(graph, 1))
    wrong = {name: torch.full_like(tensor, math.nan) for name, tensor in inputs.items()}
    assert math.isnan(found.train(wrong, targets))


def test_a_score(graph: Graph) -> None:
    found = Rehearsal(graph, SGD, 1)
    before = found.score(batches(graph, 4))
    found = trained(graph, 1, 60)
    after = found.score(batches(graph, 4))
    assert before.accuracy is not None
    assert after.accuracy is not None
    assert after.accuracy > before.accuracy
    assert after.loss < before.loss
    again = Rehearsal(graph, SGD, 2, state=found.state()).score(batches(graph, 4))
    assert again == after


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("replay", "codec"),
    [(Replay(2), Codec(4)), (Replay(2, "window"), Codec(8)), (Replay(None), Codec(8, gradients=True))],
    ids=str,
)
def test_it_is_what_the_executor_does(replay: Replay, codec: Codec) -> None:
    """To the bit, where the server is so late that edge and rehearsal are equally behind."""
    graph, given = replayed_graph(), replayed_batches(6)
    assert graph.loss is not None
    found = Rehearsal(graph, REPLAYED_SGD, CUT, codec=codec, replay=replay, seed=7)
    for inputs, targets in given:
        found.train(bind_inputs(graph, inputs), bind_tree(graph.loss.input_tree[0][1], targets))
    found.drain()
    for late in (0.03, 0.2, 1.0):  # the machine may be busy with something else
        run = Replayed(graph, plan_for(replay.k, replay.mode, codec=codec), given, late=late)
        if run.staleness == found.staleness:
            break
    assert run.staleness == found.staleness
    assert run.losses == found.losses
    assert all(torch.equal(tensor, found.weights.tensors[name]) for name, tensor in run.weights.items())

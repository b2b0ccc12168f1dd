"""Batch norms with momentum=None: their running statistics are the average over all batches, shared however."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import ADAM, Batch, alone, plan_for, run, shared
from manyhands.facts.errors import BadGraph
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.document_reader import read_document
from manyhands.graph.folding import at_rest
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights

SAMPLES, SIZE, CLASSES, STEPS = 8, 6, 3, 5


class Averaging(nn.Module):
    """A batch norm that averages over all batches, one with a momentum, and one that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=None)
        self.b, self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=0.3)
        self.c = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.third = nn.BatchNorm2d(4, momentum=None, track_running_stats=False)
        self.d = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.a(x)))
        x = torch.relu(self.second(self.b(x)))
        x = torch.relu(self.third(self.c(x)))
        out: Tensor = self.d(x).mean((2, 3))
        return out


def averaging() -> Averaging:
    torch.manual_seed(2)
    return Averaging().double()


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x + seed, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


BATCHES = [batch(seed) for seed in range(STEPS)]


@cache
def captured() -> Graph:
    x, y = BATCHES[0]
    module = averaging()
    graph = capture(module, x, loss=functional.cross_entropy, target=y, granularity="operators", verify=True)
    assert module.first.momentum is None
    assert int(module.first.num_batches_tracked) == 0
    return graph


def samples(graph: Graph) -> Plan:
    return plan_for(graph, [shared(0, len(graph.network.layers), 5, 1, 2)], batch_size=SAMPLES)


def micro_batches(graph: Graph) -> Plan:
    middle, last = graph.network.find_layer("second"), len(graph.network.layers)
    return plan_for(graph, [shared(0, middle, 2), shared(middle, last, 2)], batch_size=SAMPLES, micro_batches=4)


def hybrid(graph: Graph) -> Plan:
    middle, last = graph.network.find_layer("second"), len(graph.network.layers)
    return plan_for(graph, [shared(0, middle, 1, 3), shared(middle, last, 4)], batch_size=SAMPLES, micro_batches=2)


def tiles(graph: Graph) -> Plan:
    end = graph.network.find_layer("mean")
    stages = Stage((0, end), ("t0", "t1"), ByTiles((2, 1))), shared(end, len(graph.network.layers), 4)
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=2)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("plan", [samples, micro_batches, hybrid, tiles], ids=lambda plan: str(plan.__name__))
def test_as_on_one_device(plan: Callable[[Graph], Plan]) -> None:
    graph = captured()
    chosen = plan(graph)
    ran = run(graph, chosen, BATCHES, ADAM)
    ran.assert_as_planned(STEPS)
    expected, losses = alone(graph, BATCHES, ADAM, micro_batches=chosen.micro_batches)
    ran.assert_equals(expected, losses)
    assert int(expected["first.num_batches_tracked"]) == STEPS * chosen.micro_batches


def test_the_reference_is_the_module_trained_by_pytorch() -> None:
    graph, module = captured(), averaging()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for x, y in BATCHES:
        for part in (slice(0, 4), slice(4, 8)):
            (functional.cross_entropy(module(x[part]), y[part]) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    weights, _ = alone(graph, BATCHES, ADAM, micro_batches=2)
    for name, tensor in module.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-12)
    assert not torch.equal(module.first.running_mean, torch.zeros(4))


def test_at_rest_nothing_counts() -> None:
    graph, module = captured(), averaging()
    weights = Weights.copied(graph)
    x = BATCHES[1][0]
    piece = Piece(graph, weights)
    piece({"x": x}, Context())
    module(x)
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    (made,) = piece({"x": x}, Context(training=False)).values()
    module.eval()
    torch.testing.assert_close(made, module(x), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.tensors.items())


def test_a_norm_in_evaluation_mode() -> None:
    module = averaging()
    module(BATCHES[0][0])
    module.first.eval()
    other = copy.deepcopy(module)
    graph = capture(module, BATCHES[1][0])
    (made,) = Piece(graph, Weights.copied(graph))({"x": BATCHES[2][0]}, Context()).values()
    torch.testing.assert_close(made, other(BATCHES[2][0]), rtol=1e-12, atol=1e-12)


def test_read_back_the_graph_is_the_same() -> None:
    again = read_document(to_document(captured()))
    assert again.nodes == captured().nodes


@pytest.mark.parametrize("name", ["first.weight", "first.running_mean"])
def test_only_a_counter_counts(name: str) -> None:
    document = to_document(captured())
    momentum = b'true,{"is":"weight","name":"first.num_batches_tracked"}'
    assert momentum in msgspec.json.encode(document)
    text = msgspec.json.encode(document).replace(momentum, f'true,{{"is":"weight","name":"{name}"}}'.encode())
    with pytest.raises(BadGraph, match="what counts the batches of a normalisation must be a buffer of one whole"):
        read_document(msgspec.json.decode(text))


def test_folded_into_the_convolution_before_it() -> None:
    graph, x = captured(), BATCHES[1][0]
    weights = Weights.copied(graph)
    piece = Piece(graph, weights)
    piece({"x": x}, Context())
    rested = msgspec.structs.replace(graph, state=dict(weights.tensors))
    smaller = at_rest(rested)
    assert len(smaller.nodes) < len(graph.nodes)
    (made,) = Piece(smaller, Weights.copied(smaller))({"x": x}, Context(training=False)).values()
    torch.testing.assert_close(made, *piece({"x": x}, Context(training=False)).values(), rtol=1e-10, atol=1e-12)

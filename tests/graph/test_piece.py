"""A captured network, whole or cut anywhere, computes what the module computes: outputs, loss, gradients, buffers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import (
    Example,
    Outcome,
    assert_close,
    assert_same,
    assert_same_gradients,
    by_module,
    by_pieces,
    cut,
    flat,
    numpy_bits,
    numpy_keep,
    zoo,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from groups import by_name
from manyhands.graph.capture import capture
from manyhands.graph.describe import describe
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights
from manyhands.models.registry import ZOO
from tape import forward

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes")  # nn.LSTM refreshes its list of weights


def bounds_of(graph: Graph, granularity: str) -> list[int]:
    return [layer.first for layer in describe(graph, granularity).layers]


@pytest.fixture(scope="module", params=by_name("zoo", ZOO, slow=("yolov2", "resnet50", "mobilenetv3-large")))
def example(request: pytest.FixtureRequest) -> Example:
    return zoo(request.param)


@pytest.mark.quick("resnet18")
def test_zoo_trains_exactly(example: Example) -> None:
    graph = example.graph
    batch, target = example.batch(3), example.target(3)
    wanted = by_module(example.module.train(), graph, batch, target, example.loss)
    places = random.Random(example.name).sample(range(len(graph.nodes)), min(5, len(graph.nodes)))
    for bounds in ([], bounds_of(graph, "blocks"), bounds_of(graph, "operators"), places):
        assert_same(by_pieces(graph, bounds, batch, target), wanted, 1e-12)


@pytest.mark.quick("resnet18", "din", "tiny")
def test_zoo_evaluates_exactly(example: Example) -> None:
    graph = example.graph
    batch = example.batch(3)
    with torch.no_grad():
        wanted = example.module.eval()(**batch) if isinstance(batch, dict) else example.module.eval()(batch)
    example.module.train()
    weights = Weights.copied(graph)
    before = {key: tensor.clone() for key, tensor in weights.tensors.items()}
    places = random.Random(example.name).sample(range(len(graph.nodes)), min(3, len(graph.nodes)))
    values, _ = forward(cut(graph, weights, places), bind_inputs(graph, batch), Context(training=False))
    assert_close(outputs_of(graph, values), wanted, "output")
    assert all(torch.equal(weights.tensors[key], tensor) for key, tensor in before.items()), "evaluation wrote a weight"


class _Masks:
    """Stands in for torch's dropout and bernoulli_, drawing by counter in the order of the graph's nodes."""

    def __init__(self, graph: Graph, seed: int, step: int, first_sample: int) -> None:
        self.nodes: Iterator[Any] = (n for n in graph.nodes if "dropout" in n.target or "bernoulli" in n.target)
        self.who = (seed, step)
        self.first_sample = first_sample
        self.drawn = 0

    def draw(self, x: Tensor, keep: float) -> Tensor:
        spec = next(self.nodes).outputs[0]
        self.drawn += 1
        name = spec.name
        bits = numpy_bits(*self.who, name, 0, tuple(spec.shape), spec.batch_axis, self.first_sample, x.shape[0])
        return numpy_keep(bits, keep)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * self.draw(x, 1 - p) / (1 - p) if training else x

    def bernoulli_(self, x: Tensor, p: float) -> Tensor:
        return self.draw(x, p)


def draws_as_numpy(name: str, first_sample: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Outcome]:
    example = zoo(name, still=False)
    graph = example.graph
    batch, target = example.batch(3), example.target(3)
    masks = _Masks(graph, 7, 11, first_sample)
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", masks.dropout)
        patch.setattr(Tensor, "bernoulli_", lambda x, p: masks.bernoulli_(x, p))
        wanted = by_module(example.module.train(), graph, batch, target, example.loss)
    assert masks.drawn > 1, "nothing was drawn"
    context = Context(seed=7, step=11, first_sample=first_sample)
    return by_pieces(graph, bounds_of(graph, "blocks"), batch, target, context), wanted


@pytest.mark.slow
@pytest.mark.quick("bilstm")
@pytest.mark.parametrize(
    "name", by_name("zoo", ["bilstm", "vgg16", "bert-small", "efficientnet-b1"], slow=("bert-small",))
)
def test_dropout_is_the_mask_drawn_by_counter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for first_sample in (0, 5) if name == "bilstm" else (5,):
        found, wanted = draws_as_numpy(name, first_sample, monkeypatch)
        assert_same(found, wanted, 1e-12)


@pytest.mark.slow
@pytest.mark.xdist_group("zoo bert-small")
def test_shares_of_a_batch_add_up_to_the_batch() -> None:
    """Two shares with their own offsets: outputs are the rows of the whole, gradients add up."""
    example = zoo("bert-small", still=False)
    graph = example.graph
    batch, target = example.batch(5), example.target(5)
    whole = by_pieces(graph, [], batch, target, Context(seed=3, step=2))
    parts = []
    for low, high in ((0, 2), (2, 5)):
        share = {key: value[low:high] for key, value in batch.items()}
        parts.append(by_pieces(graph, [7, 40], share, target[low:high], Context(seed=3, step=2, first_sample=low)))
    assert_close(torch.cat([flat(p.outputs)[0] for p in parts]), flat(whole.outputs)[0], "output")
    one, other = (part.gradients for part in parts)
    assert_same_gradients({name: 0.4 * one[name] + 0.6 * other[name] for name in whole.gradients}, whole.gradients)


@pytest.mark.slow
@pytest.mark.xdist_group("zoo bert-small")
def test_wrong_offset_draws_other_masks() -> None:
    example = zoo("bert-small", still=False)
    batch, target = example.batch(2), example.target(2)
    one = by_pieces(example.graph, [], batch, target, Context(first_sample=0))
    other = by_pieces(example.graph, [], batch, target, Context(first_sample=1))
    assert not torch.allclose(flat(one.outputs)[0], flat(other.outputs)[0])


class Counting(nn.Module):
    """Counters of batches: one alone, one that is read as a number too, one of a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.again, self.twice = (nn.BatchNorm1d(3) for _ in range(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.plain(x) / self.seen
        return self.twice(torch.relu(self.twice(self.again(x))))  # type: ignore[no-any-return]


def test_counters_that_nothing_reads_are_counted_up_at_once() -> None:
    module, x = Counting().double(), torch.randn(4, 3, dtype=torch.float64)
    graph = capture(module, x)
    weights = Weights.copied(graph)
    piece = Piece(graph, weights)
    calls = Counter[str]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[func.name()] += 1
            return func(*args, **kwargs or {})

    for _ in range(3):
        with Seen():
            found = piece(bind_inputs(graph, x))[graph.outputs[0]]
        assert_close(found.detach(), module(x).detach(), "output")
    assert calls["aten::_foreach_add_.Scalar"] == 3
    assert calls["aten::add_.Tensor"] == 3 * 3  # the one that is read, and the one that is counted twice
    for name, buffer in module.named_buffers():
        assert_close(weights.tensors[name].double(), buffer.double(), name)
    before = int(weights.tensors["plain.num_batches_tracked"])
    piece(bind_inputs(graph, x), Context(moves_buffers=False))
    piece(bind_inputs(graph, x), Context(training=False))
    assert int(weights.tensors["plain.num_batches_tracked"]) == before == 3

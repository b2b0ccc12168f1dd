"""Random numbers by counter: any share draws its own part of the same numbers, and they look random."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from graph_checks import by_pieces, flat, numpy_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.boxes import Box
from manyhands.graph import random
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.random import Draw, bits, keep_mask, normal, uniform
from manyhands.graph.weights import Weights

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**63 - 1)


def whole_bits(draw: Draw, sample_shape: tuple[int, ...], batch_axis: int | None, samples: int) -> Tensor:
    shape = [e * samples if a == batch_axis else e for a, e in enumerate(sample_shape)]
    return bits(draw, Box.whole(shape), sample_shape, batch_axis, CPU)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axis = draw(st.none() | st.integers(0, len(shape) - 1))
    return shape, axis, draw(st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(
    tensors(), SEEDS, st.integers(0, 2**40), st.text(max_size=8), st.integers(0, 3), st.integers(0, 2**33),
    st.booleans(),
)  # fmt: skip
def test_many_and_few_numbers_are_those_of_the_definition(
    tensor: tuple[tuple[int, ...], int | None, int], seed: int, step: int, operator: str, stream: int, first: int,
    are_many: bool,
) -> None:  # fmt: skip
    shape, axis, samples = tensor
    intervals = [(0, e) for e in shape]
    if axis is not None:
        intervals[axis] = (first * shape[axis], (first + samples) * shape[axis])
    with mock.patch.object(random, "_SMALL", 0 if are_many else 2**16):
        found = bits(Draw(seed, step, operator, stream), Box(tuple(intervals)), shape, axis, CPU)
    assert found.dtype == torch.int32
    wanted = numpy_bits(seed, step, operator, stream, shape, axis, first, samples)
    assert np.array_equal(found.numpy().view(np.uint32), wanted)


def test_places_beyond_32_bits_wrap_around() -> None:
    """Element 2**32 + 5 of a sample is hashed as element 5: numpy's uint32 does the same."""
    shape = (1, 2**17, 2**16)
    far = bits(Draw(1, 2, "x"), Box.of((0, 1), (2**16, 2**16 + 1), (0, 64)), shape, 0, CPU)
    near = bits(Draw(1, 2, "x"), Box.of((0, 1), (0, 1), (0, 64)), shape, 0, CPU)
    assert torch.equal(far, near)
    high = bits(Draw(1, 2, "x"), Box.of((0, 1), (2**15, 2**15 + 1), (0, 64)), shape, 0, CPU)  # the sign bit is set
    assert not torch.equal(high, near)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(tensors(), st.data())
def test_any_box_draws_its_part_of_the_whole(
    tensor: tuple[tuple[int, ...], int | None, int], data: st.DataObject
) -> None:
    shape, axis, samples = tensor
    draw = Draw(3, 4, "dropout_1")
    whole = whole_bits(draw, shape, axis, samples)
    intervals = []
    for extent in whole.shape:
        low = data.draw(st.integers(0, extent - 1))
        intervals.append((low, data.draw(st.integers(low + 1, extent))))
    box = Box(tuple(intervals))
    assert torch.equal(bits(draw, box, shape, axis, CPU), whole[box.slices()])


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])


def test_keep_rate_is_the_probability() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = keep_mask(whole_bits(Draw(5, 6, "drop"), (1, 200, 500), 0, 4), p, torch.float64)
        sigma = math.sqrt(p * (1 - p) / kept.numel())
        assert abs(float(kept.mean()) - p) < 4 * sigma
    every = whole_bits(Draw(5, 6, "drop"), (1, 1000), 0, 2)
    assert keep_mask(every, 1.0, torch.float32).all()
    assert not keep_mask(every, 0.0, torch.float32).any()


def test_numbers_are_independent_of_each_other() -> None:
    shape, samples = (1, 40_000), 3
    base = uniform(whole_bits(Draw(1, 2, "a"), shape, 0, samples), torch.float64)
    bound = 4 / math.sqrt(40_000)
    others = {
        "seed": Draw(2, 2, "a"), "high half of the seed": Draw(1 + 2**32, 2, "a"), "step": Draw(1, 3, "a"),
        "operator": Draw(1, 2, "b"), "stream": Draw(1, 2, "a", 1),
    }  # fmt: skip
    for what, draw in others.items():
        other = uniform(whole_bits(draw, shape, 0, samples), torch.float64)
        assert abs(correlation(base[0], other[0])) < bound, what
    assert abs(correlation(base[0], base[1])) < bound, "samples"
    assert abs(correlation(base[0, :-1], base[0, 1:])) < bound, "neighbours"
    assert abs(correlation(base[0, :-200], base[0, 200:])) < bound, "rows"


def test_uniform_and_normal_have_their_moments() -> None:
    one, two = (whole_bits(Draw(1, 2, "a", stream), (1, 100_000), 0, 2) for stream in (0, 1))
    flat_numbers = uniform(one, torch.float64)
    assert float(flat_numbers.min()) >= 0
    assert float(flat_numbers.max()) < 1
    assert float(flat_numbers.mean()) == pytest.approx(0.5, abs=0.003)
    assert float(flat_numbers.var()) == pytest.approx(1 / 12, abs=0.001)
    bell = normal(one, two, torch.float64)
    assert float(bell.mean()) == pytest.approx(0, abs=0.01)
    assert float(bell.std()) == pytest.approx(1, abs=0.01)
    assert float((bell**4).mean()) == pytest.approx(3, abs=0.1)


class Noisy(nn.Module):
    """Every random operator there is, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * self.scale
        attended = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return (
            nn.functional.dropout(x, 0.4),
            nn.functional.dropout2d(x, 0.4),
            nn.functional.alpha_dropout(x, 0.4, training=True),
            torch.bernoulli(x.sigmoid()),
            x + torch.rand_like(x),
            x + torch.randn_like(x),
            attended,
        )


def noisy_loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((output.square().mean() for output in outputs), target.sum())


@pytest.fixture(scope="module")
def noisy() -> Graph:
    return capture(Noisy().double(), torch.randn(2, 3, 4, 5).double(), loss=noisy_loss, target=torch.zeros(2))


@pytest.mark.slow
def test_shares_draw_their_part_in_every_operator(noisy: Graph) -> None:
    x = torch.randn(6, 3, 4, 5, dtype=torch.float64)
    context = {"seed": 2**40 + 1, "step": 9}
    whole = flat(by_pieces(noisy, [], x, torch.zeros(6), Context(**context)).outputs)
    for low, high in ((0, 1), (1, 4), (4, 6)):
        share = by_pieces(noisy, [2], x[low:high], torch.zeros(high - low), Context(**context, first_sample=low))
        for i, (part, all_of_it) in enumerate(zip(flat(share.outputs), whole, strict=True)):
            assert torch.allclose(part, all_of_it[low:high], rtol=1e-13, atol=1e-13), i


def test_each_operator_draws_what_it_should(noisy: Graph) -> None:
    x = torch.ones(200, 3, 4, 5, dtype=torch.float64)
    outputs = flat(by_pieces(noisy, [], x, torch.zeros(200), Context(seed=1)).outputs)
    dropped, features, alpha, coins, even, bell, _ = outputs
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.6}
    assert all(len(channel.unique()) == 1 for channel in features.flatten(0, 1))
    assert len(features.unique()) == 2
    own = nn.functional.alpha_dropout(x, 0.4, training=True).unique()
    assert torch.allclose(alpha.unique(), own, rtol=1e-12)
    assert float(coins.mean()) == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.02)
    assert float(even.mean()) == pytest.approx(1.5, abs=0.02)
    assert float(bell.std()) == pytest.approx(1.0, abs=0.05)


def test_nothing_is_dropped_in_evaluation(noisy: Graph) -> None:
    x = torch.randn(3, 3, 4, 5, dtype=torch.float64)
    left = Piece(noisy, Weights.copied(noisy))({"x": x}, Context(training=False))
    assert any("alpha" in node.target for node in noisy.nodes)
    dropped, features, alpha, *_, attended = (left[name] for name in noisy.outputs)
    for output in (dropped, features, alpha):
        assert torch.equal(output, x)
    assert torch.allclose(attended, nn.functional.scaled_dot_product_attention(x, x, x))


@pytest.mark.slow
def test_attention_with_dropout_is_attention_under_a_mask() -> None:
    """Independently written: softmax, numpy's mask, product; and without a draw it is torch's own."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)

    q, k, v = torch.randn(3, 2, 2, 4, 6, dtype=torch.float64)
    graph = capture(Attention(), (q, k, v))
    (node,) = graph.nodes
    found = Piece(graph, Weights.copied(graph))({"q": q, "k": k, "v": v}, Context(seed=5, first_sample=3))[node.name]
    scores = q @ k.transpose(-1, -2) / math.sqrt(6)
    weights = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1)
    kept = numpy_bits(5, 0, node.name, 0, (1, 2, 4, 4), 0, 3, 2).view(np.int32) < round(0.75 * 2**32) - 2**31
    assert torch.allclose(found, (weights * torch.from_numpy(kept) / 0.75) @ v, rtol=1e-13)


class Coin(nn.Module):
    """torch.export leaves out an argument that is its default: the probability of 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x).bernoulli_(0.5) * self.factor


def test_a_coin_of_one_half() -> None:
    """It does not look at what is in the tensor, which may be memory that nobody has written."""
    graph = capture(Coin(), torch.randn(4, 50))
    (node,) = (node for node in graph.nodes if node.target == "aten.bernoulli_.float")
    assert len(node.arguments) == 1
    drawn = Piece(graph, Weights.copied(graph))({"x": torch.randn(40, 50)})[graph.outputs[0]]
    assert set(drawn.flatten().tolist()) == {0.0, 1.0}
    assert 0.45 < float(drawn.detach().mean()) < 0.55

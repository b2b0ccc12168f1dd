"""Batch statistics from shares are those of the whole batch, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness import relative
from manyhands.executor.statistics import SharedBatchNorm, merged, own_moments
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from small_networks import captured

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def drawn(
    counts: Sequence[int], *rest: int, seed: int = 0, scale: float = 1.0, offset: float = 0.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *rest, generator=generator, dtype=torch.float64) * scale + offset for n in counts]


@pytest.mark.slow
@given(COUNTS, st.integers(1, 4), st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 999), st.floats(-1e3, 1e3))
def test_merged_moments_are_those_of_everything(
    counts: list[int], channels: int, place: tuple[int, ...], seed: int, offset: float
) -> None:
    parts = drawn(counts, channels, *place, seed=seed, offset=offset)
    found = merged([own_moments(part) for part in parts])
    whole = torch.cat(parts).transpose(0, 1).flatten(1)
    variance, mean = torch.var_mean(whole, 1, correction=0)
    assert found.count == whole.shape[1]
    assert torch.allclose(found.mean, mean, rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.variance, variance, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@given(COUNTS, st.floats(-1e6, 1e6))
def test_a_constant_channel_has_no_variance(counts: list[int], value: float) -> None:
    parts = [torch.full((n, 2, 3), value, dtype=torch.float64) for n in counts]
    found = merged([own_moments(part) for part in parts])
    assert torch.allclose(found.mean, torch.full((2,), value, dtype=torch.float64), rtol=1e-12, atol=1e-300)
    assert float(found.variance.abs().max()) <= 1e-12 * max(1.0, value * value)


def test_one_sample_is_its_own_mean() -> None:
    row = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    found = merged([own_moments(row)])
    assert found.count == 1
    assert torch.equal(found.mean, row[0])
    assert torch.equal(found.variance, torch.zeros(2, dtype=torch.float64))


def test_the_order_of_the_devices_decides_the_bits() -> None:
    """Everybody adds up by itself, so everybody must do so in the same order."""
    rows = [own_moments(part) for part in drawn([3, 5, 2], 4, seed=1)]
    assert torch.equal(merged(rows).variance, merged([row.clone() for row in rows]).variance)


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any), st.integers(0, 999), st.floats(-1e3, 1e3))
def test_two_rows_are_merged_like_more(counts: list[int], seed: int, offset: float) -> None:
    """A third device that owns nothing changes nothing; nor does one of the two."""
    parts = drawn(counts, 4, seed=seed, offset=offset)
    rows = [own_moments(part) if len(part) else torch.zeros(9, dtype=torch.float64) for part in parts]
    found, wanted = merged(rows), merged([*rows, torch.zeros(9, dtype=torch.float64)])
    assert found.count == wanted.count
    assert torch.allclose(found.mean, wanted.mean, rtol=1e-13, atol=1e-13)
    assert torch.allclose(found.variance, wanted.variance, rtol=1e-10, atol=1e-10)


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out


NORMS = {
    "2d": (nn.BatchNorm2d(3, momentum=0.2, eps=1e-3), (3, 4, 2)),
    "1d": (nn.BatchNorm1d(4), (4,)),
    "1d-rows": (nn.BatchNorm1d(4), (4, 3)),
    "3d": (nn.BatchNorm3d(2), (2, 2, 2, 2)),
    "no-weights": (nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
    "no-statistics": (nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    "neither": (nn.BatchNorm1d(3, affine=False, track_running_stats=False), (3,)),
}


@cache
def graph_of(kind: str) -> Graph:
    norm, shape = NORMS[kind]
    module = Norm(norm).double().train()
    for parameter in module.parameters():
        parameter.data.uniform_(0.5, 1.5)
    return capture(module, torch.randn(3, *shape, dtype=torch.float64))


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("kind", NORMS)
@settings(max_examples=15)
@given(COUNTS.filter(lambda counts: sum(counts) > 1), st.integers(0, 999))
def test_forward_and_backward_are_those_of_the_whole_batch(kind: str, counts: list[int], seed: int) -> None:
    norm, shape = NORMS[kind]
    graph = graph_of(kind)
    (node,) = (node for node in graph.nodes if node.target == "aten.batch_norm.default")

    data, gradients = drawn(counts, *shape, seed=seed, offset=2.0), drawn(counts, *shape, seed=seed + 1)
    whole = torch.cat(data).requires_grad_()
    reference = Weights.copied(graph).tensors
    names = ("norm.running_mean", "norm.running_var")
    made = torch.batch_norm(
        whole, reference.get("norm.weight"), reference.get("norm.bias"), *(reference.get(name) for name in names),
        True, norm.momentum or 0.0, norm.eps, False,
    )  # fmt: skip
    made.backward(torch.cat(gradients))

    devices = [Weights.copied(graph) for _ in counts]
    shared = [SharedBatchNorm(node, weights) for weights in devices]
    moments = merged([own_moments(part) for part in data])
    outputs = [one.forward(part, moments) for one, part in zip(shared, data)]
    prepared = [one.own_sums(part, g, moments) for one, part, g in zip(shared, data, gradients)]
    rows = [own for _, own in prepared]
    back = [one.backward(part, scaled, own, rows, moments) for one, part, (scaled, own) in zip(shared, data, prepared)]
    assert whole.grad is not None
    assert relative(torch.cat(outputs), made.detach()) <= 1e-10
    # Over two rows of numbers the input's gradient is zero but for rounding: measured against what went in.
    size = float(torch.cat(gradients).abs().max())
    spread = float((moments.variance + norm.eps).rsqrt().max())
    assert float((torch.cat(back) - whole.grad).abs().max()) <= 1e-10 * size * max(1.0, spread)
    for name, tensor in reference.items():
        if tensor.grad is not None:
            terms = [weights.tensors[name].grad for weights in devices]
            total = torch.stack([term for term in terms if term is not None]).sum(0)
            assert torch.allclose(total, tensor.grad, rtol=1e-9, atol=1e-9 * size)
        elif name in names:
            assert all(relative(weights.tensors[name], tensor) <= 1e-10 for weights in devices)


def test_gradients_are_added_over_micro_batches() -> None:
    graph = captured("small")
    op = next(place for place, node in enumerate(graph.nodes) if node.target == "aten.batch_norm.default")
    weights = Weights.copied(graph)
    norm = SharedBatchNorm(graph.nodes[op], weights)
    (data,), (gradient,) = drawn([3], 4, 8, 8), drawn([3], 4, 8, 8, seed=1)
    moments = merged([own_moments(data)])
    for _ in range(2):
        scaled, own = norm.own_sums(data, gradient, moments)
        norm.backward(data, scaled, own, [own], moments)
    found = weights.tensors["b.bias"].grad
    assert found is not None
    assert torch.allclose(found, 2 * gradient.sum((0, 2, 3)))


def test_a_frozen_norm_collects_no_gradient() -> None:
    graph = captured("frozen")
    op = next(place for place, node in enumerate(graph.nodes) if node.target == "aten.batch_norm.default")
    weights = Weights.copied(graph)
    norm = SharedBatchNorm(graph.nodes[op], weights)
    (data,) = drawn([3], 4, 8, 8)
    moments = merged([own_moments(data)])
    scaled, own = norm.own_sums(data, torch.ones_like(data), moments)
    norm.backward(data, scaled, own, [own], moments)
    assert weights.tensors["b.weight"].grad is None

"""The shares' losses and gradients add up to the batch's."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import plan_for, rows_of, shared
from manyhands.executor.share_loss import ShareLoss, shared_totals, target_names, trained_weights
from manyhands.facts.plan import Plan
from manyhands.graph.graph import Graph
from manyhands.graph.loss_totals import LOSS_TOTALS
from manyhands.graph.piece import Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights
from small_networks import NETWORKS, Drawn, captured
from tape import CapturedLoss


def plan_of(graph: Graph, samples: int, micro_batches: int, **options: Any) -> Plan:
    stage = shared(0, len(graph.network.layers), samples)
    return plan_for(graph, [stage], batch_size=samples * micro_batches, micro_batches=micro_batches, **options)


def outputs_for(graph: Graph, samples: int, seed: int) -> dict[str, torch.Tensor]:
    drawn = Drawn(samples, seed)
    return {name: drawn.numbers(*graph.network.tensors[name].shape[1:]) for name in graph.outputs}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", ["small", "summed", "squares", "weighted", "pair", "early", "unread", "gives-input"])
@settings(max_examples=10)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), micro=st.integers(1, 3), seed=st.integers(0, 99))
def test_shares_add_up(name: str, counts: list[int], micro: int, seed: int) -> None:
    """A mean over samples is weighted by them; a sum is not."""
    graph = captured(name)
    samples = sum(counts)
    outputs = outputs_for(graph, samples * micro, seed)
    _, targets = NETWORKS[name][1](Drawn(samples * micro, seed + 1))
    value, gradients = CapturedLoss(graph)(outputs, targets)

    plan = plan_of(graph, samples, micro)
    loss, totals = ShareLoss(graph, plan, torch.device("cpu")), shared_totals(graph, plan)
    ahead = {LOSS_TOTALS: totals.of(dict(_targets(graph, targets)), samples * micro)} if totals is not None else {}
    total, found = 0.0, {name: torch.zeros_like(tensor) for name, tensor in outputs.items()}
    for start in range(0, samples * micro, samples):
        for first, count in zip(accumulate(counts, initial=start), counts):
            own = rows_of(targets, samples * micro, first, count)
            part, slopes = loss(
                rows_of(outputs, samples * micro, first, count), {**dict(_targets(graph, own)), **ahead}, count
            )
            total += float(part)
            for output, slope in slopes.items():
                found[output][first : first + count] += slope
    assert total == pytest.approx(float(value), rel=1e-12)
    for output, tensor in found.items():
        expected = gradients.get(output, torch.zeros_like(tensor))
        assert torch.allclose(tensor, expected, rtol=1e-12, atol=1e-15)


def _targets(graph: Graph, targets: Any) -> list[tuple[str, torch.Tensor]]:
    assert graph.loss is not None
    tree = graph.loss.input_tree[0][1]
    leaves = [targets] if isinstance(targets, torch.Tensor) else [targets[key] for key in tree]
    return list(zip(tree_leaves(tree), leaves, strict=True))


def test_targets_are_the_second_argument() -> None:
    names = target_names(captured("pair"))
    assert len(names) == 2
    graph = captured("pair")
    assert graph.loss is not None
    assert not set(names) & set(tree_leaves(graph.loss.input_tree[0][0]))


def test_evaluation_computes_no_gradients() -> None:
    graph = captured("small")
    loss = ShareLoss(graph, plan_of(graph, 4, 1, order="stream"), torch.device("cpu"))
    _, targets = NETWORKS["small"][1](Drawn(4))
    value, gradients = loss(outputs_for(graph, 4, 0), dict(_targets(graph, targets)), 4)
    assert not gradients
    assert not value.requires_grad


# Which weights have a gradient at all


@pytest.mark.quick(every=19)
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_gradient_reaches_what_autograd_says(name: str) -> None:
    graph = captured(name)
    weights = Weights.copied(graph)
    inputs, targets = NETWORKS[name][1](Drawn(4))
    values = Piece(graph, weights)(bind_inputs(graph, inputs))
    _, gradients = CapturedLoss(graph)(values, targets)
    roots = [(values[n], g) for n, g in gradients.items() if values[n].requires_grad]
    torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
    assert trained_weights(graph) == {n for n, tensor in weights.tensors.items() if tensor.grad is not None}


def test_the_unread_head_is_not_trained() -> None:
    assert trained_weights(captured("unread")) == {"a.weight", "a.bias", "c.weight", "c.bias"}

"""Shares of a weighted loss, given the totals of all targets, add up to the user's own function of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.errors import BadData, BadGraph
from manyhands.graph import store
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.loss import loss_totals, weighted_combination
from manyhands.graph.loss_totals import LossTotals, totals_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_tree
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

CLASSES, ROWS = 3, 4
WEIGHTS = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)
LossFunction = Callable[[Any, Any], Tensor]


class Heads(nn.Module):
    """(N, CLASSES, ROWS) as it comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def labels(samples: int, generator: torch.Generator) -> Tensor:
    """About a third is ignored; of the first sample, as capture sees it, some is and some is not."""
    numbers = torch.randint(-1, CLASSES, (samples, ROWS), generator=generator)
    numbers = torch.where(numbers < 0, -100, numbers)
    numbers[0, :2] = torch.tensor([-100, 1])
    return numbers


def first_labels(samples: int, generator: torch.Generator) -> Tensor:
    return labels(samples, generator)[:, :1].expand(-1, ROWS).contiguous()


def valid_labels(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (samples, ROWS), generator=generator)


def floats(samples: int, generator: torch.Generator) -> Tensor:
    return torch.rand((samples, CLASSES, ROWS), generator=generator, dtype=torch.float64)


def mask(samples: int, generator: torch.Generator) -> Tensor:
    drawn = (floats(samples, generator) > 0.6).double()
    drawn[0, 0, 0] = 1.0
    return drawn


def both(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"values": floats(samples, generator), "mask": mask(samples, generator)}


def per_token(output: Tensor, target: Tensor) -> Tensor:
    """As language models compute it: rows of tokens, each against the next one."""
    return F.cross_entropy(output.transpose(1, 2)[:, :-1].reshape(-1, CLASSES), target[:, 1:].reshape(-1))


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Weights of classes from how often each occurs in this batch."""
    counts = F.one_hot(target, CLASSES).double().sum((0, 1))
    return F.cross_entropy(output, target, weight=1.0 / (counts + 1.0))


def balanced_by_row(output: Tensor, target: Tensor) -> Tensor:
    frequency = F.one_hot(target, CLASSES).double().mean((0, 1))
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses * (F.one_hot(target, CLASSES).double() * frequency).sum(2)).mean()


def normalised(output: Tensor, target: Tensor) -> Tensor:
    return (output * (target / target.sum())).sum()


def padded(output: Tensor, target: Tensor) -> Tensor:
    kept = (target != -100).to(output.dtype)
    losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (losses * kept).sum() / kept.sum().clamp(min=1)


CASES: dict[str, tuple[LossFunction, Callable[[int, torch.Generator], Any]]] = {
    "ignored": (F.cross_entropy, labels),
    "samples ignored": (F.cross_entropy, first_labels),
    "weights of classes": (nn.CrossEntropyLoss(WEIGHTS), valid_labels),
    "weights and ignored": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), labels),
    "weights, ignored and smoothing": (lambda o, t: F.cross_entropy(o, t, WEIGHTS, label_smoothing=0.2), labels),
    "smoothing": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2), labels),
    "a class ignored": (lambda o, t: F.cross_entropy(o, t, WEIGHTS, ignore_index=1), valid_labels),
    "likelihoods": (lambda o, t: F.nll_loss(o.log_softmax(1), t, WEIGHTS), labels),
    "likelihoods ignored": (lambda o, t: F.nll_loss(o.log_softmax(1), t), labels),
    "next tokens": (per_token, labels),
    "padded": (padded, labels),
    "two": (lambda o, t: F.cross_entropy(o, t) + 0.5 * F.cross_entropy(2 * o, t, WEIGHTS), labels),
    "beside a mean": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().mean(), labels),
    "beside a sum": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().sum(), labels),
    "plus a constant": (lambda o, t: F.cross_entropy(o, t) + 1.5, labels),
    "times samples": (lambda o, t: F.cross_entropy(o, t) * o.shape[0], labels),
    "made up": (lambda o, t: F.cross_entropy(o, torch.where(t == 0, -100, t), WEIGHTS), valid_labels),
    "balanced": (balanced, valid_labels),
    "balanced by row": (balanced_by_row, valid_labels),
    "masked": (lambda o, t: ((o - t["values"]) ** 2 * t["mask"]).sum() / t["mask"].sum(), both),
    "mean over a share": (
        lambda o, t: ((o - t["values"]) ** 2 * t["mask"]).mean() * (1.0 / t["mask"].mean()), both,
    ),
    "times a total, beside a mean": (
        lambda o, t: (o * t["mask"]).sum() * (1.0 / t["mask"].sum()) + o.square().mean(), both,
    ),
    "masked, whole numbers": (lambda o, t: (o * (t != -100)[:, None]).sum() / (t != -100).sum(), labels),
    "masked, beside a mean": (
        lambda o, t: (o * (t != -100)[:, None]).sum() / (t != -100).sum() + o.square().mean(), labels,
    ),
    "masked by the loss": (
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t["values"], weight=t["mask"], pos_weight=torch.full((ROWS,), 2.0, dtype=torch.float64), reduction="sum",
        ) / t["mask"].sum(), both,
    ),
    "probabilities masked": (
        lambda o, t: F.binary_cross_entropy(o.sigmoid(), t["values"], weight=t["mask"], reduction="sum")
        / t["mask"].sum().clamp(min=1.0), both,
    ),
    "normalised": (normalised, floats),
    "any": (lambda o, t: (o * t["values"]).sum() * (t["mask"] > 0).any(), both),
}  # fmt: skip
SCALED = {
    "ignored": 0, "mean over a share": 0, "beside a sum": 0, "beside a mean": 1, "plus a constant": 1,
    "times samples": 1, "masked, beside a mean": 1, "times a total, beside a mean": -1,
}  # fmt: skip


def example(name: str, samples: int, seed: int) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn((samples, CLASSES, ROWS), generator=generator, dtype=torch.float64)
    return output, CASES[name][1](samples, generator)


@cache
def captured(name: str) -> Graph:
    output, target = example(name, 4, 1)
    return capture(Heads(), output, loss=CASES[name][0], target=target)


def rows_of(target: Any, rows: slice) -> Any:
    return {key: part[rows] for key, part in target.items()} if isinstance(target, dict) else target[rows]


def bound(graph: Graph, target: Any) -> dict[str, Tensor]:
    assert graph.loss is not None
    return bind_tree(graph.loss.input_tree[0][1], target)


def shared_out(graph: Graph, output: Tensor, target: Any, counts: list[int]) -> tuple[float, Tensor]:
    """The sum of the shares' losses, and the gradient of all outputs."""
    totals = loss_totals(graph)
    assert totals is not None
    assert graph.loss is not None
    claim, power = weighted_combination(graph, totals)
    piece, samples = Piece(totals.loss, Weights.copied(graph.loss)), len(output)
    flat = totals.of(bound(graph, target), samples)
    assert flat.shape == totals.spec.shape
    (name,) = tree_leaves(graph.loss.input_tree[0][0])
    value, gradients, first = 0.0, [], 0
    for count in counts:
        rows = slice(first, first := first + count)
        leaf = output[rows].clone().requires_grad_()
        inputs = {name: leaf, **bound(graph, rows_of(target, rows)), **totals.inputs(flat, count / samples, power)}
        made = piece(inputs, Context(samples=count))[totals.loss.outputs[0]]
        made = made * (count / samples if claim == "mean" else 1.0)
        made.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        value += float(made.detach())
        gradients.append(leaf.grad)
    return value, torch.cat(gradients)


@pytest.mark.quick(every=30)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_shares_add_up(name: str, counts: list[int], seed: int) -> None:
    """Against the user's function under plain autograd: what each share ignores or masks differs."""
    graph = captured(name)
    assert graph.loss_combination == "weighted"
    output, target = example(name, sum(counts), seed)
    leaf = output.clone().requires_grad_()
    expected = CASES[name][0](leaf, target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    value, gradient = shared_out(graph, output, target, counts)
    assert value == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-14, nan_ok=True)
    if value == value:  # else everything is ignored
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", SCALED)
def test_how_totals_are_scaled(name: str) -> None:
    assert _combination(captured(name))[1] == SCALED[name]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ["ignored", "weights and ignored", "likelihoods ignored"])
def test_where_everything_is_ignored_it_is_no_number(name: str) -> None:
    graph = captured(name)
    output, target = example(name, 4, 0)
    target = torch.full_like(target, -100)
    assert CASES[name][0](output, target).isnan()
    value, _ = shared_out(graph, output, target, [1, 3])
    assert value != value


@pytest.mark.slow
def test_a_clamped_total_is_a_number_then_too() -> None:
    output, target = example("padded", 4, 0)
    value, gradient = shared_out(captured("padded"), output, torch.full_like(target, -100), [1, 3])
    assert value == 0.0
    assert not gradient.any()


def test_a_share_may_have_nothing_but_ignored_targets() -> None:
    output, target = example("ignored", 4, 0)
    target[1:3] = -100
    value, gradient = shared_out(captured("ignored"), output, target, [1, 2, 1])
    assert value == pytest.approx(float(F.cross_entropy(output, target)), rel=1e-13)
    assert not gradient[1:3].any()
    assert gradient[0].any()


def test_a_mean_whose_example_ignores_nothing_is_shared_with_totals() -> None:
    output, target = example("weights of classes", 4, 0)
    graph = capture(Heads(), output, loss=F.cross_entropy, target=target)
    assert graph.loss_combination == "mean"
    target[1:] = -100
    value, _ = shared_out(graph, output, target, [1, 3])
    assert value == pytest.approx(float(F.cross_entropy(output, target)), rel=1e-13)


@pytest.mark.slow
def test_totals_do_not_look_at_outputs() -> None:
    """For every case: they are there when no output is."""
    for name in CASES:
        graph = captured(name)
        totals = loss_totals(graph)
        assert totals is not None
        given = bound(graph, example(name, 3, 5)[1])
        assert not set(given) & set(tree_leaves(totals.original.input_tree[0][0]))
        assert totals.of(given, 3).isfinite().all()


def loss_of(function: LossFunction, target: Any) -> LossTotals | None:
    output = torch.randn((4, CLASSES, ROWS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = capture(Heads(), output, loss=function, target=target)
    assert graph.loss is not None
    return totals_of(graph.loss)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    "function",
    [
        lambda o, t: (o * t).sum() / o.sum(),
        lambda o, t: (o * t).sum() / (t * (o > 0)).sum(),
        lambda o, t: F.mse_loss(o, t),
        lambda o, t: (o * t).sum() / t.shape[0],
        lambda o, t: (F.dropout(t, 0.5) * o).sum() / t.sum(),
    ],
)
def test_what_has_none(function: LossFunction) -> None:
    assert loss_of(function, torch.rand((4, CLASSES, ROWS), dtype=torch.float64)) is None


def test_weights_for_fewer_classes_than_the_targets_name() -> None:
    graph = captured("made up")
    totals = loss_totals(graph)
    assert totals is not None
    with pytest.raises(BadData, match="given the class 3; there are weights for 3 classes"):
        totals.of(bound(graph, torch.full((2, ROWS), 3)), 2)


def _combination(graph: Graph) -> tuple[str, int]:
    totals = loss_totals(graph)
    assert totals is not None
    return weighted_combination(graph, totals)


@pytest.mark.parametrize(
    ("name", "said"), [("squares", "its targets have no totals"), ("root", "no sum or mean over samples")]
)
def test_a_document_that_claims_too_much_is_refused(name: str, said: str) -> None:
    functions = {
        "squares": lambda o, t: F.mse_loss(o, t).sqrt(),
        "root": lambda o, t: ((o * t).sum() / t.sum()).sqrt(),
    }
    output = torch.rand((4, CLASSES, ROWS), dtype=torch.float64)
    graph = capture(Heads(), output, loss=functions[name], target=output)
    document = {**store.to_document(graph), "loss_combination": "weighted"}
    claimed = store.from_document(document, store.state_of(graph))
    with pytest.raises(BadGraph, match=said):
        _combination(claimed)

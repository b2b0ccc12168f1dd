"""Metrics of held-out data: fed batch by batch or with all at once, whatever the batches are; what raises is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.errors import BadValue
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.job.metrics import Metric, MetricTally, check_metrics, has_accuracy, text_of

CLASSES = 3


class MeanSquare:
    """A running metric, of torchmetrics' kind."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total += float(predictions.square().sum())
        self.count += predictions.numel()

    def compute(self) -> dict[str, Tensor]:
        return {"mean": torch.tensor(self.total / self.count, dtype=torch.float64), "classes": torch.arange(3)}


def captured(loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES).double()
    batch = torch.randn(4, 4, dtype=torch.float64)
    return model, capture(model, batch, loss=loss, target=torch.tensor([0, 1, 1, 0]))


def filled(samples: int, size: int, metrics: dict[str, Metric], loss: Any = functional.cross_entropy) -> Any:
    """A tally of drawn samples in batches, the last of which is padded; all predictions; all targets."""
    model, graph = captured(loss)
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, CLASSES, (samples,), generator=generator)
    tally = MetricTally(graph, loss, samples, size, metrics)
    with torch.no_grad():
        for number, first in enumerate(range(0, samples, size)):
            rows = [min(first + place, samples - 1) for place in range(size)]
            tally.targets[number] = targets[rows]
            tally.take(number, {graph.outputs[0]: model(inputs[rows])})
        return tally, model(inputs), targets


def mean_square(predictions: Tensor, targets: Tensor) -> float:
    return float(predictions.square().mean())


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / 4


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(samples=st.integers(1, 17), size=st.integers(1, 6))
def test_results_do_not_depend_on_the_batches(samples: int, size: int) -> None:
    tally, predictions, targets = filled(samples, size, {"square": mean_square, "running": MeanSquare()})
    results = tally.results()
    assert tally.failure is None
    assert results.keys() == {"loss", "accuracy", "square", "running/mean"}
    assert results["loss"] == pytest.approx(float(functional.cross_entropy(predictions, targets)), rel=1e-12)
    assert results["accuracy"] == pytest.approx(float((predictions.argmax(1) == targets).double().mean()))
    assert results["square"] == pytest.approx(mean_square(predictions, targets), rel=1e-12)
    assert results["running/mean"] == pytest.approx(results["square"], rel=1e-12)


def test_predictions_are_kept_only_where_a_function_needs_them() -> None:
    running, _, _ = filled(9, 4, {"running": MeanSquare()})
    whole, _, _ = filled(9, 4, {"square": mean_square})
    assert (len(running._kept), len(whole._kept)) == (0, 3)
    assert running.targets == {}


def test_targets_that_a_loss_ignores_need_all_predictions() -> None:
    """It is noticed where the first one comes, and begins anew."""

    def ignoring(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, ignore_index=2)

    tally, predictions, targets = filled(11, 4, {}, ignoring)
    assert tally.is_incomplete
    tally.begin(keeps_all=True)
    for number, first in enumerate(range(0, 11, 4)):
        tally.targets[number] = targets[first : first + 4]
        tally.take(number, {tally.graph.outputs[0]: predictions[first : first + 4]})
    assert not tally.is_incomplete
    assert tally.results()["loss"] == pytest.approx(float(ignoring(predictions, targets)), rel=1e-12)


def test_a_weighted_loss_is_that_of_all_samples() -> None:
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, weight=weight)

    tally, predictions, targets = filled(11, 4, {}, weighted)
    assert tally.results()["loss"] == pytest.approx(float(weighted(predictions, targets)), rel=1e-12)


def raising(predictions: Any, targets: Any) -> float:
    raise ZeroDivisionError("no samples")


class Broken(MeanSquare):
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (raising, "The metric 'm' raised ZeroDivisionError: no samples"),
        (Broken(), "The metric 'm' raised RuntimeError: shapes differ"),
        (lambda predictions, targets: predictions, "The metric 'm' returned a Tensor; it must be a number"),
        (lambda predictions, targets: None, "The metric 'm' returned a NoneType"),
    ],
)
def test_what_raises_is_named(metric: Metric, message: str) -> None:
    tally, _, _ = filled(5, 2, {"m": metric, "square": mean_square})
    tally.results()
    assert tally.failure is not None
    assert message in tally.failure.message


@pytest.mark.parametrize("name", ["", "loss", "step", "a,b", "a/b", " a", 'a"', "a\nb"])
def test_names_that_no_metric_can_have(name: str) -> None:
    with pytest.raises(BadValue):
        check_metrics({name: mean_square})


def test_what_is_no_metric() -> None:
    check_metrics({"a": mean_square, "b": MeanSquare()})
    for metrics in ([mean_square], {"a": 3}, {"a": MeanSquare}):
        with pytest.raises(BadValue):
            check_metrics(metrics)  # type: ignore[arg-type]


def test_whether_there_is_an_accuracy() -> None:
    _, graph = captured()
    assert has_accuracy(graph, torch.tensor([0, 1]))
    assert not has_accuracy(graph, torch.tensor([0.5, 1.0]))
    assert not has_accuracy(graph, torch.tensor([[0, 1], [1, 0]]))


def test_results_as_a_person_reads_them() -> None:
    assert text_of({"loss": 0.123456, "accuracy": 0.5, "auc": float("nan")}) == "loss 0.1235, accuracy 50.0%, auc nan"


def test_metrics_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = torchmetrics.MetricCollection(
        {"f1": torchmetrics.classification.MulticlassF1Score(CLASSES, average="macro")}
    )
    top = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
    check_metrics({"all": metrics, "top": top})
    tally, predictions, targets = filled(13, 4, {"all": metrics, "top": top})
    results = tally.results()
    assert tally.failure is None
    assert results["top"] == pytest.approx(results["accuracy"], rel=1e-6)
    whole = torchmetrics.functional.classification.multiclass_f1_score(predictions, targets, CLASSES, average="macro")
    assert results["all/f1"] == pytest.approx(float(whole), rel=1e-6)

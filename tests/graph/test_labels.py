"""Labels that are no class of the network: named, with how many outputs there are, before a loss meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.executor.share_loss import ShareLoss
from manyhands.facts.errors import BadData
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.labels import ClassLabels, check_labels, labels_of

GOOD = torch.tensor([0, 9, 3, 4])


def graph(loss: Callable[..., Tensor] = functional.cross_entropy, target: Any = GOOD, outputs: int = 10) -> Graph:
    return capture(nn.Linear(3, outputs), torch.randn(4, 3), loss=loss, target=target)


def with_label(label: int, place: int = 2) -> Tensor:
    target = GOOD.clone()
    target[place] = label
    return target


@pytest.mark.parametrize("label", [10, 12, -1])
def test_an_example_with_a_wrong_label_is_not_taken_for_a_strange_loss(label: int) -> None:
    said = f"sample 2 has the label {label}; the network has 10 outputs, for labels from 0 to 9"
    with pytest.raises(BadData, match=said) as caught:
        graph(target=with_label(label))
    assert ("13 outputs" if label == 12 else "Number the classes from 0") in caught.value.hint


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_batch_is_looked_at(reduction: Any) -> None:
    captured = graph(lambda output, target: functional.cross_entropy(output, target, reduction=reduction))
    check_labels(captured, GOOD)
    with pytest.raises(BadData, match="The targets of step 7: sample 1 has the label 10"):
        check_labels(captured, with_label(10, 1), "The targets of step 7")


def test_what_is_left_out_is_no_wrong_label() -> None:
    check_labels(graph(), with_label(-100))
    ignoring = graph(lambda output, target: functional.cross_entropy(output, target, ignore_index=255))
    check_labels(ignoring, with_label(255))
    with pytest.raises(BadData, match=r"label -100"):
        check_labels(ignoring, with_label(-100))


def test_labels_of_every_pixel() -> None:
    module, target = nn.Conv2d(1, 5, 1), torch.zeros(4, 6, 6, dtype=torch.long)
    captured = capture(module, torch.randn(4, 1, 6, 6), loss=functional.cross_entropy, target=target)
    target[3, 2, 1] = 7
    with pytest.raises(BadData, match="sample 3 has the label 7; the network has 5 outputs"):
        check_labels(captured, target)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (functional.mse_loss, torch.randn(4, 10)),
        (functional.cross_entropy, torch.full((4, 10), 0.1)),  # probabilities
        (lambda output, target: functional.cross_entropy(output, target[:, 0]), torch.tensor([[1, 99]] * 4)),
    ],
    ids=["numbers", "probabilities", "a part of the target"],
)
def test_what_may_be_any_number_is_not_looked_at(loss: Any, target: Tensor) -> None:
    captured = graph(loss, target)
    assert captured.loss is not None
    assert labels_of(captured.loss) == ()
    check_labels(captured, target)


def test_labels_that_are_made_whole_on_the_way() -> None:
    captured = graph(
        lambda output, target: functional.nll_loss(output.log_softmax(1), target.view(-1).long()), GOOD[:, None].float()
    )
    assert captured.loss is not None
    assert labels_of(captured.loss) == (ClassLabels("target", 10, -100),)
    with pytest.raises(BadData, match="sample 2 has the label 12"):
        check_labels(captured, with_label(12)[:, None].float())


def test_a_worker_that_has_the_labels_itself_says_the_same() -> None:
    captured = graph()
    plan = Plan("Linear", 4, (Stage((0, len(captured.layers)), ("a",), Single()),))
    loss = ShareLoss(captured, plan, torch.device("cpu"))
    output = {captured.outputs[0]: torch.randn(4, 10)}
    with pytest.raises(BadData, match="sample 2 has the label 12; the network has 10 outputs"):
        loss(output, {"target": with_label(12)}, 4)

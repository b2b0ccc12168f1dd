"""Losses that a module computes itself: divided from the network at its outputs, and the same as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import by_pieces
from torch import Tensor, nn

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.own_loss import module_loss
from manyhands.graph.piece import Context, Piece
from manyhands.graph.store import load, save
from manyhands.graph.tape import outputs_of
from manyhands.graph.trees import tree_leaves
from manyhands.graph.weights import Weights

TOKENS = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6).expand(4, 6) < torch.tensor([[6], [4], [5], [2]])
CLASSES = torch.tensor([0, 2, 1, 0])


@dataclass
class Output:
    """Shaped as transformers' outputs."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    past_key_values: Any = None


class Cache:
    """No tensor, and no dataclass."""


class Body(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.one, self.two = nn.Embedding(11, 5), nn.Linear(5, 7), nn.Linear(7, outputs)
        self.double()

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.table(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return torch.tanh(self.one(hidden))


class Classifier(Body):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        hidden = self.hidden(input_ids, attention_mask)
        logits = self.two(hidden.mean(1))
        loss = F.cross_entropy(logits.view(-1, 3), labels.view(-1)) if labels is not None else None
        return Output(loss=loss, logits=logits, hidden_states=(hidden,), past_key_values=Cache())


class LanguageModel(Body):
    def __init__(self) -> None:
        super().__init__(11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.two(self.hidden(input_ids))
        if labels is None:
            return {"loss": None, "logits": logits}
        shifted = logits[:, :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, 11), labels[..., 1:].contiguous().view(-1))
        return {"loss": loss, "logits": logits}


class Scalar(Body):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.two(self.hidden(x)).view(-1, 3), y.view(-1))


class OutputsFirst(Body):
    """As nanoGPT does."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.two(self.hidden(x).mean(1))
        return logits, F.cross_entropy(logits, targets)


class Masked(Body):
    """The loss reads an input of the network too."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.two(self.hidden(input_ids, attention_mask))
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * attention_mask
        return each.sum() / attention_mask.sum(), logits


class Routed(Body):
    """An auxiliary loss that does not see the labels, with a trained weight for each of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.3, 0.2], dtype=torch.float64))
        self.register_buffer("smooth", torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(input_ids)
        logits = self.two(hidden.mean(1))
        balance = (hidden.square().mean((0, 1)) - 0.1).square().sum()
        each = F.cross_entropy(logits * self.smooth, labels)
        return {"loss": each * self.weights[0].exp() + balance * self.weights[1].exp(), "logits": logits}


class Centres(Body):
    """The labels choose rows of a parameter, inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(3, 7, dtype=torch.float64))

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        features = self.hidden(x).mean(1)
        return (features - self.centres[label]).square().sum(1).mean(), features


class Spans(Body):
    """Two labels, which the target names."""

    def forward(self, input_ids: Tensor, start: Tensor | None = None, end: Tensor | None = None) -> Output:
        logits = self.two(self.hidden(input_ids))
        assert start is not None
        assert end is not None
        first, last = logits[..., 0], logits[..., 1]
        return Output((F.cross_entropy(first, start) + F.cross_entropy(last, end)) / 2, logits)


IDS = {"input_ids": TOKENS}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "dataclass": (Classifier, {**IDS, "attention_mask": MASK}, CLASSES, "mean"),
    "dict": (LanguageModel, IDS, TOKENS, "mean"),
    "number": (Scalar, TOKENS, TOKENS % 3, "mean"),
    "second of a tuple": (OutputsFirst, TOKENS, CLASSES, "mean"),
    "masked": (Masked, {**IDS, "attention_mask": MASK}, TOKENS % 3, "whole"),
    "auxiliary": (Routed, IDS, CLASSES, "whole"),
    "parameters": (Centres, TOKENS, CLASSES, ""),
    "two labels": (Spans, IDS, {"start": TOKENS[:, 0] % 6, "end": TOKENS[:, 1] % 6}, "mean"),
}


def exact(graph: Graph, module: nn.Module, batch: Any, target: Any) -> None:
    """Loss and gradients of the pieces, wherever they are cut, are those of the module."""
    value = module_loss(module, "own", batch, target)
    trained = dict(module.named_parameters())
    wanted = dict(zip(trained, torch.autograd.grad(value, list(trained.values()), allow_unused=True)))
    for cuts in ((), (1, 3), (2, 4, 5)):
        step = by_pieces(graph, cuts, batch, target)
        torch.testing.assert_close(step.loss, value.detach(), rtol=1e-12, atol=0)
        for name, gradient in wanted.items():
            zero = torch.zeros_like(trained[name])
            made = step.gradients.get(name, zero)
            torch.testing.assert_close(made, zero if gradient is None else gradient, rtol=1e-10, atol=1e-14)
    assert any(bool(gradient.any()) for gradient in wanted.values() if gradient is not None)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_the_modules_own(name: str, tmp_path: Path) -> None:
    make, batch, target, combination = CASES[name]
    module = make()
    graph = capture(module, batch, target=target, verify=True)
    exact(graph, module, batch, target)
    assert graph.loss is not None
    assert graph.loss_combination == combination or not combination
    save(graph, tmp_path / "stored")
    exact(load(tmp_path / "stored"), module, batch, target)
    more = [{key: torch.cat([t, t]) for key, t in part.items()} if isinstance(part, dict) else torch.cat([part, part])
            for part in (batch, target)]  # fmt: skip
    exact(graph, module, *more)


@pytest.mark.parametrize("name", ["dataclass", "dict", "second of a tuple", "two labels"])
def test_the_network_hands_over_the_modules_output(name: str) -> None:
    """Not views of it, nor the hidden states that nobody reads."""
    make, batch, target, _ = CASES[name]
    graph = capture(make(), batch, target=target)
    assert isinstance(graph.output_tree, str)
    outputs = 11 if name == "dict" else 3
    (spec,) = [spec for node in graph.nodes for spec in node.outputs if spec.name == graph.output_tree]
    assert (spec.batch_axis, spec.rows_per_sample, spec.shape[-1]) == (0, 1, outputs)


def test_the_network_has_no_labels_and_the_loss_no_trained_weights() -> None:
    for make, batch, target, _ in CASES.values():
        graph = capture(make(), batch, loss="own", target=target)
        taken = set(tree_leaves(graph.input_tree[0])) | set(tree_leaves(list(graph.input_tree[1].values())))
        assert {spec.name for spec in graph.inputs} == taken
        assert len(taken) == (len(batch) if isinstance(batch, dict) else 1)
        assert graph.loss is not None
        assert not any(spec.trainable for spec in graph.loss.weights)


def test_a_single_sample_and_evaluation_mode() -> None:
    module = Classifier().eval()
    exact(capture(module, {"input_ids": TOKENS[:1]}, target=CLASSES[:1]), module, IDS, CLASSES)
    assert not module.training


# What is refused


class NoLabels(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.hidden(x))


class NoLoss(Body):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # no loss
        return {"logits": self.two(self.hidden(x)), "labels": labels + 1}


class NotReduced(Body):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.two(self.hidden(x).mean(1)), labels, reduction="none")}


class TeacherForced(Body):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        decoded = self.two(self.one(self.table(labels)))  # the labels go in
        logits = decoded + self.two(self.hidden(x))
        return F.cross_entropy(logits.view(-1, 3), labels.view(-1) % 3), logits


class Counting(Body):
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.counts.add_(labels.double().mean())  # counted
        return F.cross_entropy(self.two(self.hidden(x).mean(1)), labels)


class Noisy(Body):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(self.two(self.hidden(x).mean(1)), labels, reduction="none")
        return F.dropout(each, 0.5).mean()  # drawn


class DataDependent(Body):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = [row for row, label in zip(self.hidden(x), labels) if label > 0]  # decided
        return torch.stack(kept).mean()


class Unread(Body):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return labels.double().mean(), self.two(self.hidden(x))


REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "no argument": (NoLabels, r"NoLabels.forward, without labels, .* it takes x, .*\n  at .*test_own_loss.py:\d+"),
    "no loss": (NoLoss, r"NoLoss.forward returns no loss: given labels, it returns logits, labels\."),
    "not one number": (NotReduced, r"it returns a loss that is a tensor of shape batch"),
    "labels go in": (TeacherForced, r"\(labels\) go into the network itself, .*\n  at test_own_loss.py:\d+"),
    "a buffer": (Counting, r"writes its buffer 'counts' from the labels.\n  at test_own_loss.py:\d+"),
    "random": (Noisy, r"draws random numbers in its loss.*\n  at test_own_loss.py:\d+"),
    "data-dependent": (DataDependent, r"test_own_loss.py:\d+, in .*\n.*# decided"),
    "unread": (Unread, "does not depend on its input"),
}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(CaptureFailed, match=text) as caught:
        capture(make(), TOKENS, target=TOKENS if name == "labels go in" else CLASSES)
    assert caught.value.hint or name == "unread"


def test_a_loss_that_is_neither() -> None:
    with pytest.raises(BadValue, match="loss is 'mine'; it must be a function"):
        capture(Classifier(), IDS, loss="mine", target=CLASSES)  # type: ignore[arg-type]
    with pytest.raises(CaptureFailed, match=r"Classifier.forward, without labels, returns none: .* returns logits"):
        capture(Classifier(), IDS, loss="own")
    with pytest.raises(CaptureFailed, match="without an example target"):
        capture(Classifier(), IDS, loss=F.cross_entropy)


def test_a_tensor_given_twice_is_two_inputs() -> None:
    """Without labels too: another batch may have other values there."""

    class Both(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left - 2 * right

    x = torch.ones(4, 3)
    graph = capture(Both(), (x, x))
    values = Piece(graph, Weights.copied(graph))({"left": x, "right": 3 * x}, Context(samples=4))
    assert torch.equal(outputs_of(graph, values), -5 * x)

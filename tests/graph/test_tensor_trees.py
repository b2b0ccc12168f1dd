"""Outputs that are dataclasses: fields by name, as the loss reads them and as results are handed over."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import by_pieces
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.batching import answers_of, joined
from manyhands.graph.capture import capture
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.tensor_trees import flattened, tensors_alone
from manyhands.graph.trees import Fields, rebuilt
from manyhands.graph.weights import Weights

BATCH = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2, 1, 0])


@dataclass(frozen=True)
class Plain:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: Tensor | None = None

    @property
    def confidence(self) -> Tensor:
        return self.logits.softmax(1)


@dataclass
class Items(OrderedDict):  # type: ignore[type-arg]
    """Shaped as transformers' ModelOutput: a dataclass that is a dict of its fields that are not None."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) is not None})


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.kind = nn.Linear(5, 4), nn.Linear(4, 3), kind
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.one(x))
        logits = self.two(hidden)
        if self.kind == "plain":
            return Plain(logits, (x * 2, hidden))
        return Items(logits=logits) if self.kind == "items" else {"logits": logits, "loss": None}


def by_property(out: Plain, target: Tensor) -> Tensor:
    assert out.extra is None
    return F.nll_loss(out.confidence.log(), target) + out.hidden[1].square().mean()


def by_attribute_and_key(out: Any, target: Tensor) -> Tensor:
    assert out.loss is None
    return F.cross_entropy(out.logits, target) + out["logits"].square().mean()


LOSSES = {
    "plain": by_property, "items": by_attribute_and_key,
    "dict": lambda out, target: F.cross_entropy(out["logits"], target),
}  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_reads_the_fields(kind: str) -> None:
    module, loss = Net(kind), LOSSES[kind]
    graph = capture(module, BATCH, loss=loss, target=CLASSES, verify=True)
    value = loss(module(BATCH), CLASSES)
    value.backward()
    for cuts in ((), (1, 2)):
        step = by_pieces(graph, cuts, BATCH, CLASSES)
        torch.testing.assert_close(step.loss, value.detach(), rtol=1e-13, atol=0)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=1e-12, atol=1e-15)
    assert graph.loss_combination == "mean"


def test_results_have_the_fields_as_attributes() -> None:
    module = Net("plain")
    graph = capture(module, BATCH)
    values = Piece(graph, Weights.copied(graph))(bind_inputs(graph, BATCH), Context(samples=4))
    wanted, output = module(BATCH), outputs_of(graph, values)
    answers = answers_of(graph, values, 4)
    for result in (output, joined(graph, answers)):
        torch.testing.assert_close(result.logits, wanted.logits)
        torch.testing.assert_close(result["hidden"][1], wanted.hidden[1])
        assert result.extra is None
        with pytest.raises(AttributeError, match="no field 'nothing'; there are logits, hidden"):
            _ = result.nothing
    torch.testing.assert_close(answers[2].logits, wanted.logits[2])


def test_a_dataclass_is_made_anew_without_its_post_init() -> None:
    @dataclass
    class Halved:
        value: Tensor
        made: Tensor = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.value, self.made = self.value / 2, self.value

    leaves: list[Tensor] = []
    tree = flattened({"x": Halved(torch.tensor([2.0]))}, leaves, "the output")
    assert [leaf.item() for leaf in leaves] == [1.0, 2.0]
    made = rebuilt({"x": tree["x"].filled({"value": leaves[0], "made": leaves[1]})})["x"]
    assert isinstance(made, Halved)
    assert (made.value.item(), made.made.item()) == (1.0, 2.0)


def test_other_fields_are_refused_by_name_unless_tensors_alone_are_wanted() -> None:
    @dataclass
    class Counted:
        value: Tensor
        steps: int

    output = Counted(torch.ones(2), 3)
    with pytest.raises(CaptureFailed, match=r"the output\.steps is a int(.|\n)*Do not return it"):
        flattened(output, [], "the output")
    assert tensors_alone((output, 3, {"cache": object()})) == [{"value": output.value}, {}]
    assert isinstance(tensors_alone(output), Fields)

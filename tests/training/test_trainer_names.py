"""Names of Lightning and of transformers, without either of them: what is mapped, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.executor.group_stepper import KEPT
from manyhands.executor.optimizers import build, slots, state_entries
from manyhands.executor.rates import Accumulation, RateLayout
from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.training.lightning_names import REFUSED, clipping_options, read_precision, validation_options
from manyhands.training.step_form import BatchForm, StepForm


class Plain(nn.Module):
    """Lightning's methods, and no LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), 4)


# Lightning's names


@pytest.mark.parametrize(
    ("given", "ours", "lightnings"),
    [
        (None, "float32", "32-true"), ("32-true", "float32", "32-true"), (32, "float32", "32-true"),
        ("64-true", "float32", "64-true"), (64, "float32", "64-true"), ("bf16-mixed", "bf16", "bf16-mixed"),
        ("bf16", "bf16", "bf16-mixed"), ("16-mixed", "fp16", "16-mixed"), ("fp16", "fp16", "16-mixed"),
    ],
)  # fmt: skip
def test_precisions_have_both_names(given: Any, ours: str, lightnings: str) -> None:
    assert read_precision(given)[:2] == (ours, lightnings)


def test_names_in_our_words() -> None:
    assert clipping_options(0.5, None) == {"clip_norm": 0.5}
    assert clipping_options(2, "value") == {"clip_value": 2.0}
    assert clipping_options(None, "norm") == clipping_options(0, None) == {}
    assert validation_options(7) == {"validate_every": 7}
    assert validation_options(1.0) == {"validate_every": "epoch"}
    assert validation_options(None) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "16-true"}, "precision is '16-true'"),
        ({"precision": True}, "precision is True"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val is -1.0"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "l1"}, "gradient_clip_algorithm is 'l1'"),
        ({"val_check_interval": 0.25}, "val_check_interval is 0.25"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches is 4, which is for a LightningModule; Plain is none"),
        ({"logger": object()}, "logger is a object, which needs a LightningModule"),
        ({"limit_train_batches": 3}, "limit_train_batches is an option of Lightning's loop"),
        ({"precision": "64-true"}, "the module's weights are not"),
        ({"callbacks": object()}, "a object"),
        *(({name: "auto"}, f"no option {name}") for name in REFUSED),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadValue, match=words) as refused:
        mh.Trainer(**options).fit(Plain(), loader())
    assert refused.value.hint


def test_lightnings_arguments_need_its_module() -> None:
    with pytest.raises(BadValue, match="datamodule is for a LightningModule; Plain is none"):
        mh.Trainer().fit(Plain(), datamodule=object())


# A training_step as a module


class Steps(nn.Module):
    """Logs its loss under several names, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.trainer_reads = ""

    def log(self, *_: Any, **__: Any) -> None:
        raise AssertionError("there is no trainer")

    @property
    def trainer(self) -> Any:
        return self.__dict__["_trainer"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.layer(x)
        loss = functional.cross_entropy(out, y)
        self.log("loss", loss, prog_bar=True)
        self.log("again", loss.detach(), on_epoch=True)
        self.log("half", loss / 2)
        self.log_dict({"accuracy": (out.argmax(1) == y).float().mean()})
        if self.trainer_reads == "batch_idx":
            return loss * (batch_idx + 1)
        return {"loss": loss * getattr(self.trainer, self.trainer_reads) if self.trainer_reads else loss}


BATCH = (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))


def test_a_step_is_a_module_with_the_same_parameters() -> None:
    module = Steps()
    form = StepForm.named(module, BatchForm.of(BATCH), BATCH)
    assert type(form).__name__ == "Steps"
    assert dict(form.named_parameters()).keys() == dict(module.named_parameters()).keys()
    loss = form(BATCH[0], labels=BATCH[1])
    assert torch.equal(loss, functional.cross_entropy(module.layer(BATCH[0]), BATCH[1]))
    assert form.notes.logged == [("loss", {"prog_bar": True}), ("again", {"on_epoch": True})]
    assert form.notes.left_out == ["half", "accuracy"]
    assert form.notes.returns_dict
    assert "_trainer" not in vars(module)
    assert "log" not in vars(module)


@pytest.mark.parametrize("what", ["global_step", "current_epoch", "logger", "batch_idx"])
def test_what_changes_from_step_to_step_is_refused(what: str) -> None:
    module = Steps()
    module.trainer_reads = what
    with pytest.raises(BadValue, match=what):
        StepForm.named(module, BatchForm.of(BATCH), BATCH)(BATCH[0], labels=BATCH[1])
    assert "_trainer" not in vars(module)


def test_forms_of_batches() -> None:
    x, y = BATCH
    for batch, expected in (
        ((x, y), (x, y)), ([x, y], (x, y)), ({"image": x, "label": y}, ({"image": x}, y)), (x, (x, ())),
        ({"image": x}, ({"image": x}, ())), ((x, x, y), ((x, x, y), ())),
    ):  # fmt: skip
        form = BatchForm.of(batch)
        inputs, target = form.divided(batch)
        assert type(inputs) is type(expected[0])
        assert repr((inputs, target)) == repr(expected)
        joined = form.joined(inputs, target, type(batch))
        assert type(joined) is type(batch)
        assert repr(joined) == repr(batch)


# Accumulation


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_gradients_are_kept_until_an_update(name: str) -> None:
    """As one step with their average; the state taken in the midst of it goes on alike."""
    torch.manual_seed(1)
    start, gradients = torch.randn(3, 2, dtype=torch.float64), torch.randn(6, 3, 2, dtype=torch.float64)
    optimizer = Optimizer(name, lr=0.1, weight_decay=0.1).accumulating()
    assert Optimizer.from_dict(optimizer.to_dict()) == optimizer != Optimizer(name, lr=0.1, weight_decay=0.1)
    plain = start.clone().requires_grad_()
    reference = getattr(torch.optim, name)([plain], lr=0.1, weight_decay=0.1)
    weight = start.clone().requires_grad_()
    stepper = build(optimizer, {"w": weight})
    for number, gradient in enumerate(gradients):
        weight.grad = gradient.clone()
        stepper.add_kept(1 / 3)
        if number % 3 == 2:
            torch.testing.assert_close(weight.grad, gradients[number - 2 : number + 1].mean(0))
            stepper.step()
            plain.grad = gradients[number - 2 : number + 1].mean(0)
            reference.step()
        else:
            stepper.keep_gradients()
        stepper.zero()
        tensors, scalars = stepper.state()
        assert f"w/{KEPT}" in tensors
        stepper = build(optimizer, {"w": weight})
        stepper.load(tensors, scalars, number + 1)
        torch.testing.assert_close(weight, plain, rtol=1e-12, atol=1e-12)
    assert state_entries(optimizer, {"w": 2}) == frozenset({*tensors, *scalars})
    assert slots(optimizer) == slots(Optimizer(name, lr=0.1, weight_decay=0.1)) + 1


def test_the_numbers_of_a_step_say_whether_it_updates() -> None:
    layout = RateLayout.of(Optimizer("SGD", lr=0.1).accumulating())
    plain = RateLayout.of(Optimizer("SGD", lr=0.1))
    assert layout.bytes == plain.bytes + 16
    numbers = [0.1, 0.0, 0.0][: plain.count]
    assert layout.accumulation([*numbers, 0.25, 0.0]) == Accumulation(0.25, False)
    assert layout.options([*numbers, 0.25, 1.0]) == plain.options(numbers)
    assert plain.accumulation(numbers) == Accumulation(1.0, True)


# TrainingArguments


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(ManyhandsError, match=r"arguments is a dict; it must be a transformers\.TrainingArguments"):
        mh.from_training_arguments({}, Plain(), loader())

"""Optimizers as callers have them: read as data, with groups, names and state; refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from manyhands.executor.optimizers import build, slots, validate
from manyhands.facts import allowed_optimizers
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.job.given_optimizer import names_of_parameters, read_optimizer


class Model(nn.Module):
    """Two linear layers that share a weight, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.conv = nn.Conv2d(1, 2, 3)


def over(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    return optimizer.over(list(names_of_parameters(model).values()))


def test_an_optimizer_is_data_already() -> None:
    given = Optimizer("SGD", lr=0.1)
    read = read_optimizer(Model(), given)
    assert (read.optimizer, read.scheduling, read.objects, read.left_out) == (given, None, (), ())


def test_groups_of_an_object() -> None:
    model = Model()
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    optimizer = AdamW([{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.01, fused=False)
    read = read_optimizer(model, optimizer)
    first, second = read.optimizer.all_groups
    assert (read.optimizer.name, dict(first.options)["weight_decay"], dict(second.options)["weight_decay"]) == (
        "AdamW", 0.01, 0.0,
    )  # fmt: skip
    assert "fused" not in dict(first.options), "workers choose how a step is computed"
    assert second.weights == ("one.bias", "two.bias", "conv.bias")
    assert Optimizer.from_dict(read.optimizer.to_dict()) == read.optimizer
    validate(over(read.optimizer, model), ((name, p.dim()) for name, p in model.named_parameters()))


def test_several_objects_and_what_they_leave_out() -> None:
    model = Model()
    both = [SGD([model.one.weight], lr=0.1), Adam([model.conv.weight], lr=0.01)]
    read = read_optimizer(model, both)
    assert [group.name for group in read.optimizer.all_groups] == ["SGD", "Adam"]
    assert slots(read.optimizer) == 2, "memory is counted for the group that keeps most"
    frozen = [name for name, p in model.named_parameters() if any(p is other for other in read.left_out)]
    assert frozen == ["one.bias", "two.bias", "conv.bias"]
    with read.frozen():
        assert [name for name, p in model.named_parameters() if p.requires_grad] == ["one.weight", "conv.weight"]
    assert all(p.requires_grad for p in model.parameters())


def test_tied_weights_have_all_their_names() -> None:
    model = Model()
    read = read_optimizer(model, [SGD([model.one.bias], lr=0.1), Adam([model.two.weight], lr=0.01)])
    assert read.optimizer.groups[0].weights == ("one.weight", "two.weight")


def test_a_function_is_called_with_the_named_parameters() -> None:
    def made(named: Any) -> Any:
        groups = [
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.5},
            {"params": [p for name, p in named if not name.endswith("bias")]},
        ]
        return SGD(groups, lr=0.1)

    read = read_optimizer(Model(), made)
    assert [dict(group.options)["lr"] for group in read.optimizer.all_groups] == [0.5, 0.1]


def test_a_class_alone_is_such_a_function() -> None:
    read = read_optimizer(Model(), Adam)
    assert (read.optimizer.name, read.left_out) == ("Adam", ())


@pytest.mark.parametrize(
    ("pattern", "fits"), [("*.bias", ["one.bias", "two.bias", "conv.bias"]), ("two.weight", ["one.weight"])]
)
def test_patterns_become_names(pattern: str, fits: list[str]) -> None:
    """A tied weight is meant by any of its names."""
    optimizer = over(Optimizer("SGD", lr=0.1, groups=[{"weights": [pattern], "lr": 0.2}]), Model())
    assert [name for name, _ in Model().named_parameters() if optimizer.group_numbers.get(name) == 1] == fits


def test_the_first_group_that_fits() -> None:
    groups = [{"weights": ["conv.*"], "lr": 1}, {"weights": ["*.bias"], "lr": 2}]
    numbers = over(Optimizer("SGD", lr=0.1, groups=groups), Model()).group_numbers
    assert (numbers["conv.bias"], numbers["one.bias"]) == (1, 2)


def test_a_group_of_another_class_inherits_nothing() -> None:
    groups = [{"weights": ["*"], "optimizer": "Adam"}, {"weights": ["conv.*"], "momentum": 0.5}]
    _, adam, sgd = Optimizer("SGD", lr=0.1, momentum=0.9, groups=groups).all_groups
    assert (dict(adam.options), dict(sgd.options)) == ({}, {"lr": 0.1, "momentum": 0.5})


# State


@pytest.mark.parametrize("kind", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_the_state_of_earlier_steps_is_taken_along_and_given_back(kind: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    read = read_optimizer(model, optimizer)
    tensors, scalars = read.state()
    stepper = build(over(read.optimizer, model), dict(model.named_parameters()))
    stepper.load(tensors, scalars, 0)
    again = read_optimizer(model, fresh := kind(model.parameters()))
    assert again.state() == ({}, {})
    again.take_back(*stepper.state())
    for parameter in model.parameters():
        assert optimizer.state[parameter].keys() == fresh.state[parameter].keys()
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(fresh.state[parameter][key]))


def test_a_state_that_is_another_optimizers() -> None:
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.conv.weight]["exp_avg"] = torch.zeros(2, 1, 3, 3)
    with pytest.raises(BadValue, match="its state cannot be taken along") as caught:
        read_optimizer(model, optimizer).state()
    assert caught.value.hint == "Make the optimizer anew."


# Refused


def raises(_: Any) -> Any:
    raise KeyError("head")


def twice(model: nn.Module) -> Any:
    return [SGD(model.parameters(), lr=0.1), Adam(model.parameters())]


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda model: "SGD", "optimizer is a str", "mh.Optimizer"),
        (lambda model: [], "an empty list", "torch.optim"),
        (lambda model: [Optimizer("SGD")], "optimizer is a Optimizer", "a list of them"),
        (lambda model: SGD(nn.Linear(2, 2).parameters()), r"a parameter of shape \(2, 2\) that is none", "model.param"),
        (twice, "Two optimizers have the parameter 'one.weight'", ""),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot be used: .* cannot be split", "Use one of"),
        (lambda model: raises, r"optimizer=raises raised KeyError: 'head'.\n  at .*test_given_optimizer.py:\d+", ""),
        (lambda model: lambda named: None, "optimizer is a NoneType", "function"),
    ],
)
def test_what_is_no_optimizer(make: Callable[[nn.Module], Any], message: str, hint: str) -> None:
    model = Model()
    with pytest.raises(BadValue, match=message) as caught:
        read_optimizer(model, make(model))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda o: None, "scheduler is a NoneType"),
        ({"interval": "step"}, "has no 'scheduler'"),
        ({"scheduler": lr_scheduler.ExponentialLR, "every": 3}, "has 'every'"),
        ({"scheduler": lambda o: lr_scheduler.ExponentialLR(o, 0.9), "interval": "day"}, "interval is 'day'"),
        ({"scheduler": lambda o: lr_scheduler.ExponentialLR(o, 0.9), "frequency": 0}, "frequency is 0"),
        (raises, "scheduler=raises raised KeyError"),
        (lr_scheduler.StepLR(SGD([torch.ones(1)]), 2), "The StepLR is of another optimizer than the one that trains"),
    ],
)
def test_what_is_no_scheduler(scheduler: Any, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        read_optimizer(Model(), Optimizer("SGD", lr=0.1), scheduler)


def test_two_schedules() -> None:
    optimizer = Optimizer("SGD", lr=0.1, schedule=("ExponentialLR", {"gamma": 0.9}))
    with pytest.raises(BadValue, match="has a schedule, and a scheduler is given"):
        read_optimizer(Model(), optimizer, lambda o: lr_scheduler.ExponentialLR(o, 0.9))


def test_a_schedule_decides_what_workers_keep() -> None:
    """OneCycleLR gives SGD a momentum, for which each weight needs a buffer."""
    model = Model()
    for given in (Optimizer("SGD", lr=0.1), SGD(model.parameters(), lr=0.1)):
        read = read_optimizer(model, given, lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=9))
        assert slots(read.optimizer) == 1
        assert read.scheduling is not None
        assert read.scheduling.at(0)[:2] == (pytest.approx(0.2 / 25), 0.95)


def test_muon_for_what_is_no_matrix() -> None:
    model = Model()
    optimizer = Optimizer("Muon", lr=0.1, groups=[{"weights": ["*.bias"], "optimizer": "AdamW"}])
    with pytest.raises(BadValue, match=r"Muon cannot train 'conv\.weight', which has 4 axes") as caught:
        validate(over(optimizer, model), ((name, p.dim()) for name, p in model.named_parameters()))
    assert "groups=" in caught.value.hint


def test_a_group_of_nothing() -> None:
    with pytest.raises(BadValue, match=r"names 'tow\.bias', which is no weight of the model"):
        over(Optimizer("SGD", lr=0.1, groups=[{"weights": ["tow.bias"]}]), Model())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("*.bias", "must be a list of groups"),
        ([["*.bias"]], "must say its weights"),
        ([{"weights": "*.bias"}], "must be a list of names"),
        ([{"weights": [1]}], "must be a list of names"),
        ([{"weights": ["a" * 2000]}], "1 to 1000 letters"),
        ([{"weights": []}] * 10_001, "there can be 10000"),
        ([{"weights": ["a"], "schedule": ("StepLR", {})}], "which is of the whole optimizer"),
        ([{"weights": ["a"], "optimizer": "os system"}], "must be a class of torch.optim"),
        ([{"weights": ["a"], "lr": object()}], "lr is"),
    ],
)
def test_groups_that_are_none(groups: Any, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        Optimizer("SGD", lr=0.1, groups=groups)


# Other packages


class Halving(torch.optim.Optimizer):
    """Subtracts the rate times half of the gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / 2 * parameter.grad


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, as timm's Lamb does, and bounds the norm of all gradients if asked to."""

    def __init__(self, params: Any, lr: float = 0.1, most: float | None = None) -> None:
        super().__init__(params, {"lr": lr, "most": most})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            factor = 1.0 if group["most"] is None else min(1.0, group["most"] / float(norm))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / group["step"] * factor * parameter.grad


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_optimizers, "_allowed", set())


NAME = f"{Halving.__module__}.Halving"


@pytest.mark.usefixtures("_as_before")
def test_another_packages_class_must_be_allowed() -> None:
    model = Model()
    with pytest.raises(BadValue, match=f"{NAME} is of another package, which was not allowed here") as caught:
        read_optimizer(model, Halving(model.parameters()))
    assert f"--allow-optimizer {NAME}" in caught.value.hint
    allowed_optimizers.allow_optimizers([NAME])
    read = read_optimizer(model, Halving(model.parameters(), lr=0.5))
    assert read.optimizer == Optimizer(NAME, lr=0.5)
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    build(Optimizer.from_dict(read.optimizer.to_dict()), {"w": weight}).step()
    assert weight.tolist() == [0.75, 0.75]


@pytest.mark.usefixtures("_as_before")
def test_steps_that_are_counted_in_the_group_go_on() -> None:
    name, model = f"{Counting.__module__}.Counting", Model()
    allowed_optimizers.allow_optimizers([name])
    straight = Counting(model.parameters())
    stepper = build(Optimizer(name), dict(model.named_parameters()))
    for each in (straight, stepper):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.step()
    tensors, scalars = stepper.state()
    assert scalars["one.bias/group.step"] == 1
    again = build(Optimizer(name), dict(model.named_parameters()))
    again.load(tensors, scalars, 1)
    again.step()
    assert again.state()[1]["one.bias/group.step"] == 2
    read = read_optimizer(model, straight)
    straight.state[model.one.bias]["seen"] = 1
    with pytest.raises(BadValue, match="cannot be taken along"):
        read.state()
    read.take_back(*again.state())
    assert straight.param_groups[0]["step"] == 2


@pytest.mark.usefixtures("_as_before")
def test_what_looks_at_all_weights_cannot_be_split() -> None:
    name = f"{Counting.__module__}.Counting"
    allowed_optimizers.allow_optimizers([name])
    validate(Optimizer(name))
    with pytest.raises(BadValue, match="an optimizer that cannot be split") as caught:
        validate(Optimizer(name, most=1.0))
    assert "max_grad_norm" in caught.value.hint


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", ["os.system", "a_module_that_runs_code.Now", "builtins.eval"])
def test_nothing_is_imported_without_permission(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(BadValue, match="not allowed here"):
        build(Optimizer.from_dict({"name": name}), {"w": torch.ones(1, requires_grad=True)})


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("collections.OrderedDict", "is no optimizer of PyTorch"),
        ("no_such_package.Adan", "cannot be imported: No module named 'no_such_package'"),
    ],
)
def test_what_is_allowed_must_be_an_optimizer(name: str, message: str) -> None:
    allowed_optimizers.allow_optimizers([name])
    with pytest.raises(BadValue, match=message):
        validate(Optimizer(name))


def test_pytorchs_own_need_no_permission() -> None:
    with pytest.raises(BadValue, match="needs no permission"):
        allowed_optimizers.allow_optimizers(["Adam"])

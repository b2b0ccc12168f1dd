"""Schedules of a LightningModule: read as they were made, or refused with what to write in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

from manyhands.executor.optimizers import build
from manyhands.facts.errors import BadValue
from manyhands.training.trainer import optimizer_of

STEPS = 15


class Module(nn.Module):
    """Gives what `configure` makes of an optimiser."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def stepwise(make: Callable[[Any], Any], kind: Any = SGD, **options: Any) -> Module:
    def configure(own: Any) -> Any:
        optimizer = kind(own.parameters(), lr=0.1, **options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}

    return Module(configure)


def sequence(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 11)], milestones=[4])


def to_one_cycle(optimizer: Any) -> Any:
    """OneCycleLR changes what its optimiser began with: rate and momentum."""
    first = lr_scheduler.LinearLR(optimizer, total_iters=5)
    second = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [5])


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 4),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS, div_factor=7.0),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=(3, 3, 9), gamma=0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=9, power=2),
        sequence,
        to_one_cycle,
    ],
)
def test_rates_are_those_of_the_users_own_scheduler(make: Callable[[Any], Any], kind: Any) -> None:
    module = stepwise(make, kind)
    weight = torch.ones(2, requires_grad=True)
    stepper = build(optimizer_of(module), {"w": weight})
    settings = module.configure_optimizers()
    optimizer, scheduler = settings["optimizer"], settings["lr_scheduler"]["scheduler"]
    for _ in range(STEPS):
        ours, theirs = stepper._torch.param_groups[0], optimizer.param_groups[0]
        assert ours["lr"] == theirs["lr"]
        assert [ours.get(name) for name in ("momentum", "betas")] == [
            theirs.get(name) for name in ("momentum", "betas")
        ]
        stepper.step()
        optimizer.step()
        scheduler.step()


def test_constructors_are_themselves_again() -> None:
    before = lr_scheduler.StepLR.__init__
    with pytest.raises(BadValue, match="gives a NoneType"):
        optimizer_of(Module(lambda own: None))
    with pytest.raises(ZeroDivisionError):
        optimizer_of(Module(lambda own: 1 / 0))
    assert lr_scheduler.StepLR.__init__ is before


class Own(lr_scheduler.ExponentialLR):
    """A class of the user's own, which workers do not have."""


def several(own: Any) -> Any:
    optimizer = SGD(own.parameters(), lr=0.1)
    schedulers = [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return [optimizer], [{"scheduler": one, "interval": "step"} for one in schedulers]


def made_before() -> Module:
    parameters = nn.Linear(2, 2)
    optimizer = SGD(parameters.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    module = Module(lambda own: {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}})
    module.layer = parameters
    return module


def seldom(own: Any) -> Any:
    optimizer = SGD(own.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 5}}


def stepped(optimizer: Any) -> Any:
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler.step()
    return scheduler


def nested(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [sequence(optimizer)], [])


def chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


@pytest.mark.parametrize(
    ("module", "said", "hint"),
    [
        (stepwise(lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.9**step)), "LambdaLR cannot be used", "StepLR"),
        (stepwise(lambda one: lr_scheduler.ReduceLROnPlateau(one)), "needs a metric", "StepLR"),
        (stepwise(lambda one: Own(one, 0.9)), "Own is no class of torch.optim.lr_scheduler", "ExponentialLR"),
        (stepwise(chained), "A ChainedScheduler cannot be used", "SequentialLR"),
        (stepwise(nested), "A SequentialLR cannot be used", "milestones"),
        (Module(several), "2 schedules, which would all be applied", "SequentialLR"),
        (made_before(), "was not made in configure_optimizers", "within configure_optimizers"),
        (Module(seldom), r"once in 5 steps \(frequency\)", "Leave frequency out"),
        (stepwise(stepped), "learning rate is 0.05 after configure_optimizers; .* 0.1", "Do not step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_what_can(module: Module, said: str, hint: str) -> None:
    with pytest.raises(BadValue, match=said) as caught:
        optimizer_of(module)
    assert hint in caught.value.hint
    assert "LambdaLR" not in caught.value.hint

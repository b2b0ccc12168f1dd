"""Learning-rate schedules: the rate of every step is PyTorch's own, one schedule or several."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from manyhands.executor.optimizers import slots, validate
from manyhands.executor.schedules import at_start, schedule_names
from manyhands.executor.scheduling import Scheduling
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer, parse
from scheduled_stepper import ScheduledStepper

STEPS = 24
SINGLE: list[tuple[str, dict[str, Any]]] = [
    ("ConstantLR", {"factor": 0.25, "total_iters": 7}),
    ("CosineAnnealingLR", {"T_max": 9, "eta_min": 0.001}),
    ("CosineAnnealingWarmRestarts", {"T_0": 5, "T_mult": 2}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4, "mode": "triangular2"}),
    ("ExponentialLR", {"gamma": 0.93}),
    ("LinearLR", {"start_factor": 0.1, "total_iters": 6}),
    ("MultiStepLR", {"milestones": [3, 3, 11], "gamma": 0.5}),
    ("OneCycleLR", {"max_lr": 0.4, "total_steps": STEPS}),
    (
        "OneCycleLR",
        {"max_lr": 0.4, "epochs": 4, "steps_per_epoch": 6, "three_phase": True, "anneal_strategy": "linear"},
    ),
    ("PolynomialLR", {"total_iters": 20, "power": 2.0}),
    ("StepLR", {"step_size": 5, "gamma": 0.3}),
]
WARM_UP = ("LinearLR", {"start_factor": 0.1, "total_iters": 6})
COSINE = ("CosineAnnealingLR", {"T_max": STEPS - 6})
FOLLOWING: list[tuple[list[Any], list[int] | None, list[int]]] = [
    ([WARM_UP, COSINE], None, [6]),
    ([WARM_UP, ("ExponentialLR", {"gamma": 0.9})], None, [6]),
    ([WARM_UP, ("ConstantLR", {"factor": 1.0, "total_iters": 4}), ("StepLR", {"step_size": 3})], None, [6, 10]),
    ([("PolynomialLR", {"total_iters": 8}), ("CosineAnnealingWarmRestarts", {"T_0": 4})], None, [8]),
    ([("StepLR", {"step_size": 2}), ("LinearLR", {}), ("ExponentialLR", {"gamma": 0.8})], [5, 13], [5, 13]),
    ([WARM_UP, ("OneCycleLR", {"max_lr": 0.3, "total_steps": STEPS - 6})], None, [6]),
    ([("OneCycleLR", {"max_lr": 0.3, "total_steps": 10}), ("ExponentialLR", {"gamma": 0.9})], None, [10]),
    ([WARM_UP, ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3})], [4], [4]),
]  # fmt: skip


def rates(make: Callable[[torch.optim.Optimizer], Any], name: str) -> tuple[list[float], torch.Tensor]:
    """The learning rate of every step in a loop of plain PyTorch, and the weight it trains."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    scheduler = make(optimizer)
    found = []
    for step in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.full_like(weight, 0.1 + step)
        optimizer.step()
        scheduler.step()
    return found, weight.detach()


def begin(optimizer: Optimizer, steps: int) -> None:
    """Refuse what a job of so many steps refuses before it starts."""
    validate(optimizer)
    scheduling = Scheduling.by_name(optimizer)
    assert scheduling is not None
    scheduling.begin(steps_per_epoch=6, last_step=steps)


def check(optimizer: Optimizer, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    begin(optimizer, STEPS)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    stepper = ScheduledStepper(optimizer, {"w": weight})
    found = []
    for step in range(STEPS):
        found.append(stepper.learning_rate)
        weight.grad = torch.full_like(weight, 0.1 + step)
        stepper.step()
    expected, trained = rates(make, optimizer.name)
    assert found == expected
    torch.testing.assert_close(weight.detach(), trained, rtol=1e-12, atol=0)  # a fused step may round otherwise


@pytest.mark.quick(every=11)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize(("schedule", "options"), SINGLE, ids=lambda value: str(value))
def test_the_rate_of_every_step_is_pytorchs(schedule: str, options: dict[str, Any], name: str) -> None:
    kind = getattr(lr_scheduler, schedule)
    check(Optimizer(name, lr=0.1, schedule=(schedule, options)), lambda built: kind(built, **options))


def test_every_schedule_was_compared() -> None:
    assert {name for name, _ in SINGLE} == set(schedule_names()), "a newer PyTorch may bring more"


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize(("schedules", "given", "milestones"), FOLLOWING, ids=lambda value: str(value))
def test_several_follow_one_another(
    schedules: list[Any], given: list[int] | None, milestones: list[int], name: str
) -> None:
    def sequence(built: torch.optim.Optimizer) -> Any:
        made = [getattr(lr_scheduler, kind)(built, **options) for kind, options in schedules]
        return lr_scheduler.SequentialLR(built, made, milestones)

    optimizer = Optimizer(name, lr=0.1, schedule=schedules, milestones=given)
    assert optimizer.milestones == tuple(milestones)
    check(optimizer, sequence)


def test_several_on_the_command_line() -> None:
    text = "SGD:lr=0.1,schedule=LinearLR,start_factor=0.1,total_iters=6,schedule=CosineAnnealingLR,T_max=18"
    assert parse(text) == Optimizer("SGD", lr=0.1, schedule=[WARM_UP, COSINE])


def test_going_on_in_the_second_of_two() -> None:
    """Without a warning, and with the rates of a run that was never stopped."""
    optimizer = Optimizer("SGD", lr=0.1, momentum=0.5, schedule=[WARM_UP, COSINE])
    straight, resumed = (ScheduledStepper(optimizer, {"w": torch.ones(2, requires_grad=True)}) for _ in range(2))
    for _ in range(9):
        straight.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load(*straight.state(), 9)
    for _ in range(STEPS - 9):
        assert resumed.learning_rate == straight.learning_rate
        straight.step()
        resumed.step()


@pytest.mark.parametrize(
    ("optimizer", "rate", "kept"),
    [
        (Optimizer("SGD", lr=0.1, schedule=("OneCycleLR", {"max_lr": 0.5, "total_steps": 8})), 0.02, 1),
        (Optimizer("Adam", lr=0.1, schedule=("OneCycleLR", {"max_lr": 0.5, "total_steps": 8})), 0.02, 2),
        (Optimizer("SGD", lr=0.1, schedule=[WARM_UP, COSINE]), 0.01, 0),
        (Optimizer("SGD", lr=0.1), 0.1, 0),
    ],
    ids=repr,
)
def test_as_at_the_first_step_for_as_long_as_one_likes(optimizer: Optimizer, rate: float, kept: int) -> None:
    """What is measured keeps what the schedule makes it keep (OneCycleLR: momentum), and never comes to an end."""
    plain = at_start(optimizer)
    assert plain.schedule == ()
    assert slots(plain) == slots(optimizer) == kept
    stepper = ScheduledStepper(plain, {"w": torch.ones(2, requires_grad=True)})
    for _ in range(12):
        assert stepper.learning_rate == pytest.approx(rate)
        stepper.step()


@pytest.mark.parametrize(
    ("schedule", "milestones", "said"),
    [
        (("OneCycleLR", {"max_lr": 1, "total_steps": STEPS - 1}), None, "over after 23 steps; it is to go on for 24"),
        ([WARM_UP, ("OneCycleLR", {"max_lr": 1, "total_steps": 17})], None, "over after 17 steps; .* for 18"),
        ([("OneCycleLR", {"max_lr": 1, "total_steps": 9}), COSINE], [12], "over after 9 steps; .* for 12"),
    ],
)
def test_a_run_longer_than_its_schedule_is_refused_at_once(schedule: Any, milestones: Any, said: str) -> None:
    with pytest.raises(BadValue, match=said) as caught:
        begin(Optimizer("SGD", lr=0.1, schedule=schedule, milestones=milestones), STEPS)
    assert "total_steps=" in caught.value.hint
    begin(Optimizer("SGD", lr=0.1, schedule=schedule, milestones=milestones), 9)

"""Schedulers in the coordinator: the numbers of every step are those of a loop of plain PyTorch, to the last bit."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from manyhands.executor.by_name import classes
from manyhands.executor.scheduling import FACT, Scheduled, Scheduling
from manyhands.facts.errors import BadValue

STEPS, EPOCH = 12, 4
Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.25, 2),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 9, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=3, scale_fn=lambda x: 0.9**x),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.93),
    "LambdaLR": lambda o: lr.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=6),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.5 + 0.4 / step),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 3, 8], 0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, [0.4, 0.2], total_steps=STEPS + 1),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 10, 2.0),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.3),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.LambdaLR(o, lambda step: 0.8**step)], [3]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ExponentialLR(o, 0.9), lr.StepLR(o, 2, 0.5)]),
    "nested": lambda o: lr.ChainedScheduler(
        [
            lr.SequentialLR(o, [lr.LinearLR(o, 0.2, total_iters=2), lr.CosineAnnealingLR(o, 5)], [2]),
            lr.ExponentialLR(o, 0.9),
        ]
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter")  # of SequentialLR itself
        yield


def optimizer(kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    groups = [
        {"params": [torch.ones(1, requires_grad=True)]},
        {"params": [torch.ones(1, requires_grad=True)], "lr": 0.05},
    ]
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    made: torch.optim.Optimizer = kind(groups, lr=0.1, **extra)
    made.__dict__["_opt_called"] = True
    return made


def of(make: Make, kind: Any = torch.optim.SGD, **settings: Any) -> tuple[Scheduling, torch.optim.Optimizer]:
    torch_optimizer = optimizer(kind)
    scheduling = Scheduling(torch_optimizer.param_groups, [Scheduled(make(torch_optimizer), **settings)])
    scheduling.steps_per_epoch = EPOCH
    return scheduling, torch_optimizer


def numbers(torch_optimizer: torch.optim.Optimizer) -> list[float]:
    found: list[float] = []
    for group in torch_optimizer.param_groups:
        found.append(group["lr"])
        found += [group["momentum"]] if "momentum" in group else group["betas"]
        found.append(group["weight_decay"])
    return found


def by_pytorch(make: Make, kind: Any, interval: str) -> list[list[float]]:
    """The numbers of each step and of the one after the last, in a loop."""
    torch_optimizer = optimizer(kind)
    scheduler = make(torch_optimizer)
    found = [numbers(torch_optimizer)]
    for step in range(STEPS):
        if interval == "step" or (step + 1) % EPOCH == 0:
            scheduler.step()
        found.append(numbers(torch_optimizer))
    return found


@pytest.mark.quick(every=20)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name: str, interval: Any, kind: Any) -> None:
    make = SCHEDULERS[name]
    scheduling, _ = of(make, kind, interval=interval)
    expected = by_pytorch(make, kind, interval)
    assert [list(scheduling.at(step)) for step in range(STEPS + 1)] == expected
    assert len(set(map(tuple, expected))) > 1, "the schedule does something"
    for step in (2, 7, 0):  # a round that is run again gets the same
        assert list(scheduling.at(step)) == expected[step]


def test_every_class_of_pytorch_was_tried() -> None:
    known = set(classes(lr, lr.LRScheduler)) - {"ReduceLROnPlateau"}
    assert known <= set(SCHEDULERS), "a newer PyTorch may bring more"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_goes_on_with_the_same_numbers(name: str) -> None:
    straight, _ = of(SCHEDULERS[name])
    for step in range(8):
        straight.at(step)  # some steps ahead of the checkpoint
    facts = json.loads(json.dumps(straight.facts(5)))
    resumed, _ = of(SCHEDULERS[name])
    resumed.resume(facts, 5)
    assert [resumed.at(step) for step in range(5, STEPS)] == [straight.at(step) for step in range(5, STEPS)]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_afterwards_the_callers_objects_are_where_a_loop_leaves_them(name: str) -> None:
    """Also where a run ends early, and the numbers of further steps were sent already."""
    scheduling, torch_optimizer = of(SCHEDULERS[name])
    scheduling.at(8)
    scheduling.rewind(6)
    expected = by_pytorch(SCHEDULERS[name], torch.optim.SGD, "step")
    assert numbers(torch_optimizer) == expected[6]
    scheduling.rewind(9)
    assert numbers(torch_optimizer) == expected[9]


def test_another_schedule_is_refused_when_a_run_is_resumed() -> None:
    facts = of(SCHEDULERS["StepLR"])[0]
    facts.at(6)
    kept = facts.facts(6)
    with pytest.raises(BadValue, match="by the schedule given now") as caught:
        of(lambda o: lr.StepLR(o, 2, 0.4))[0].resume(kept, 6)
    assert "same scheduler" in caught.value.hint
    with pytest.raises(BadValue, match="without a schedule"):
        of(SCHEDULERS["StepLR"])[0].resume({}, 6)


# Plateaus


METRICS = {4: 1.0, 8: 1.2, 12: 1.3}


def plateau(o: torch.optim.Optimizer) -> Any:
    return lr.ReduceLROnPlateau(o, factor=0.5, patience=0)


def test_a_plateau_waits_for_the_validation() -> None:
    scheduling, _ = of(plateau)
    scheduling.validates_after = lambda done: done % 4 == 0 and done > 0
    reference = optimizer()
    theirs, expected = plateau(reference), []
    for step in range(STEPS):
        expected.append(numbers(reference))
        if step + 1 in METRICS:
            theirs.step(METRICS[step + 1])
    found = []
    for step in range(STEPS):
        if step in METRICS:
            assert not scheduling.is_known(step)
            assert scheduling.is_known(step - 1)
            scheduling.on_validation({"loss": METRICS[step], "accuracy": 0.5})
        assert scheduling.is_known(step)
        found.append(list(scheduling.at(step)))
    assert found == expected
    assert len(set(map(tuple, found))) == 2
    scheduling.on_validation({"loss": 9.0})  # one that was made again: it is not awaited
    assert [list(scheduling.at(step)) for step in range(STEPS)] == expected


@pytest.mark.parametrize("done", [7, 8, 9])
def test_a_plateau_goes_on_after_a_checkpoint(done: int) -> None:
    """At 8 the validation is still outstanding: it comes first."""
    straight, resumed = of(plateau)[0], of(plateau)[0]
    straight.validates_after = resumed.validates_after = lambda done: done in METRICS
    for step in range(done):
        if step in METRICS:
            straight.on_validation({"loss": METRICS[step]})
        straight.at(step)
    resumed.resume(json.loads(json.dumps(straight.facts(done))), done)
    for each in (straight, resumed):
        if done <= 8:
            each.at(7)
            assert each.is_known(8) is False
            each.on_validation({"loss": METRICS[8]})
    assert [resumed.at(step) for step in range(done, STEPS)] == [straight.at(step) for step in range(done, STEPS)]


def test_a_plateau_without_validation_is_refused() -> None:
    scheduling, _ = of(plateau)
    with pytest.raises(
        BadValue, match="ReduceLROnPlateau needs the 'loss' of a validation, and there is none"
    ) as caught:
        scheduling.check()
    assert "validate=" in caught.value.hint


def test_a_metric_that_nobody_measures() -> None:
    scheduling, _ = of(plateau, monitor="f1")
    scheduling.validates_after = lambda done: done == 1
    with pytest.raises(BadValue, match="follows 'f1', which the validation does not give: accuracy, loss"):
        scheduling.on_validation({"loss": 1.0, "accuracy": 0.5})


def test_metrics_that_are_no_numbers_survive_a_checkpoint() -> None:
    scheduling, _ = of(plateau)
    scheduling.validates_after = lambda done: done == 4
    scheduling.at(3)
    scheduling.on_validation({"loss": math.nan})
    scheduling.at(6)
    resumed, _ = of(plateau)
    resumed.validates_after = scheduling.validates_after
    resumed.resume(json.loads(json.dumps(scheduling.facts(6), allow_nan=False)), 6)
    assert resumed.at(6) == scheduling.at(6)


@pytest.mark.parametrize(
    "observed", [[[1]], [["1", {}]], [[99, {"loss": "1"}]], [[2, []]], [[2, {"loss": "many"}]], [[2, {"loss": None}]]]
)
def test_what_a_checkpoint_observed_is_checked(observed: Any) -> None:
    with pytest.raises(BadValue, match="observed"):
        of(plateau)[0].resume({FACT: {"observed": observed, "rates": []}}, 6)


# What goes wrong


def test_a_function_that_raises() -> None:
    def fails(step: int) -> float:
        if step == 3:
            raise KeyError("no rate for 3")
        return 1.0

    scheduling, _ = of(lambda o: lr.LambdaLR(o, fails))
    assert scheduling.at(2)
    with pytest.raises(BadValue, match="The schedule LambdaLR cannot go on after step 2: 'no rate for 3'"):
        scheduling.at(3)


def test_numbers_that_are_not_finite() -> None:
    scheduling, _ = of(lambda o: lr.LambdaLR(o, lambda step: math.inf if step else 1.0))
    with pytest.raises(BadValue, match="not finite"):
        scheduling.at(1)


def test_a_schedule_that_changes_another_option() -> None:
    class Nesterov(lr.LambdaLR):
        def step(self, epoch: Any = None) -> None:
            self.optimizer.param_groups[0]["nesterov"] = self.last_epoch >= 0
            super().step(epoch)

    scheduling, _ = of(lambda o: Nesterov(o, lambda step: 1.0))
    with pytest.raises(BadValue, match="an option of the optimizer other than lr"):
        scheduling.at(1)


def test_one_that_ends_too_early() -> None:
    with pytest.raises(BadValue, match="over after 13 steps; it is to go on for 14"):
        of(SCHEDULERS["OneCycleLR"])[0].begin(EPOCH, STEPS + 2)
    of(SCHEDULERS["OneCycleLR"], interval="epoch")[0].begin(EPOCH, (STEPS + 1) * EPOCH)


def test_frequency_counts_as_lightning_does() -> None:
    scheduling, _ = of(lambda o: lr.ExponentialLR(o, 0.5), frequency=3)
    assert [scheduling.at(step)[0] for step in range(9)] == [0.1] * 3 + [0.05] * 4 + [0.025] * 2


def test_numbers_since_the_last_checkpoint_are_kept() -> None:
    scheduling, _ = of(SCHEDULERS["StepLR"])
    rates = [scheduling.at(step) for step in range(9)]
    scheduling.forget_before(6)
    assert [scheduling.at(step) for step in range(5, 9)] == rates[5:]
    assert scheduling.learning_rate(5) == rates[5][0]
    assert scheduling.learning_rate(3) is None
    assert scheduling.facts(6)[FACT]["rates"] == list(rates[5])

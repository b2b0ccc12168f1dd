"""PyTorch's optimisers over some weights: resumed exactly, refused clearly, measured truly."""

from __future__ import annotations

import inspect
import json
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.executor.by_name import classes
from manyhands.executor.optimizers import slots, validate
from manyhands.executor.schedules import schedule_names
from manyhands.executor.torch_optimizers import FUSED_STEPS, optimizer_names
from manyhands.facts.errors import BadFile, BadValue, UnknownName
from manyhands.facts.optimizer import Optimizer
from scheduled_stepper import ScheduledStepper

STEPS_BEFORE, STEPS_AFTER = 5, 4
OPTIMIZERS = [
    Optimizer("SGD", lr=0.1),
    Optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Optimizer("SGD", lr=0.1, momentum=0.9, dampening=0.3, foreach=True),
    Optimizer("Adam", lr=0.01, weight_decay=0.02),
    Optimizer("Adam", lr=0.01, fused=True),
    Optimizer("AdamW", lr=0.01, amsgrad=True),
    Optimizer("RMSprop", lr=0.01, centered=True, momentum=0.5),
    Optimizer("Adagrad", lr=0.1, lr_decay=0.05, initial_accumulator_value=0.1),
    Optimizer("NAdam", lr=0.01),
    Optimizer("RAdam", lr=0.01),
    Optimizer("Adadelta", lr=0.5),
    Optimizer("Adamax", lr=0.01),
    Optimizer("ASGD", lr=0.05, t0=3),
    Optimizer("Rprop", lr=0.01),
    Optimizer("Adafactor", lr=0.05),
]
SCHEDULES: list[Any] = [
    ("StepLR", {"step_size": 2, "gamma": 0.7}),
    ("CosineAnnealingLR", {"T_max": 7}),
    ("OneCycleLR", {"max_lr": 0.2, "total_steps": STEPS_BEFORE + STEPS_AFTER}),
    ("MultiStepLR", {"milestones": [2, 6]}),
    ("LinearLR", {"start_factor": 0.1, "total_iters": 7}),
    ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "mode": "exp_range", "gamma": 0.9}),
    ("CosineAnnealingWarmRestarts", {"T_0": 3}),
    [("LinearLR", {"total_iters": 4}), ("ExponentialLR", {"gamma": 0.9})],
]


def weights(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A small convolution and a linear layer as leaves, with a frozen tensor and a buffer between."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"conv/a.weight": (3, 2, 3, 3), "frozen": (2,), "conv/a.bias": (3,), "out.weight": (4, 3), "scale": ()}
    made = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    made["count"] = torch.zeros((), dtype=torch.int64)
    made["conv/a.weight"] = made["conv/a.weight"].to(memory_format=torch.channels_last)
    return {name: tensor.requires_grad_(name not in ("frozen", "count")) for name, tensor in made.items()}


def backward(held: dict[str, torch.Tensor], step: int) -> None:
    """Gradients that depend on the step, the same each time it is asked for."""
    dtype = held["frozen"].dtype
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn((5, 2, 4, 4), generator=generator, dtype=dtype)
    wanted = torch.randn((5, 4), generator=generator, dtype=dtype)
    hidden = torch.conv2d(images, held["conv/a.weight"], held["conv/a.bias"]).tanh().mean(dim=(2, 3))
    ((hidden @ held["out.weight"].T * held["scale"] - wanted) ** 2).mean().backward()


def train(stepper: Any, held: dict[str, torch.Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        backward(held, step)
        stepper.step()
        stepper.zero()


def check_resume(optimizer: Optimizer, dtype: torch.dtype = torch.float64) -> None:
    whole = weights(dtype)
    straight = ScheduledStepper(optimizer, whole)
    train(straight, whole, 0, STEPS_BEFORE + STEPS_AFTER)

    first = weights(dtype)
    stopped = ScheduledStepper(optimizer, first)
    train(stopped, first, 0, STEPS_BEFORE)
    rate = stopped.learning_rate
    tensors, scalars = stopped.state()
    scalars = json.loads(json.dumps(scalars, allow_nan=False))
    kept = {name: tensor.detach().clone() for name, tensor in first.items()}
    train(stopped, first, STEPS_BEFORE, STEPS_BEFORE + 1)  # what was taken out must not follow

    second = weights(dtype)
    resumed = ScheduledStepper(optimizer, second)
    train(resumed, second, 0, 2)  # a state of its own, to be forgotten
    with torch.no_grad():
        for name, tensor in second.items():
            tensor.copy_(kept[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load(tensors, scalars, STEPS_BEFORE)
    assert all(torch.equal(second[name], kept[name]) for name in second)
    assert resumed.learning_rate == rate
    train(resumed, second, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)

    assert resumed.steps_done == straight.steps_done == STEPS_BEFORE + STEPS_AFTER
    assert resumed.learning_rate == straight.learning_rate
    for name, tensor in whole.items():
        assert tensor.isfinite().all(), name
        assert torch.equal(second[name], tensor), name
        assert torch.equal(tensor, weights(dtype)[name]) != tensor.requires_grad, f"{name} was not trained"
    for entry, tensor in straight.state()[0].items():
        again = resumed.state()[0][entry]
        assert again.dtype == tensor.dtype, entry
        assert torch.equal(again, tensor), entry


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_resuming_is_exact(optimizer: Optimizer) -> None:
    check_resume(optimizer)


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_resuming_is_exact_with_schedules(name: str, schedule: Any) -> None:
    check_resume(Optimizer(name, lr=0.05, schedule=schedule))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_resuming_keeps_types(name: str, dtype: torch.dtype) -> None:
    check_resume(Optimizer(name, lr=0.1), dtype)


def test_every_optimizer_and_schedule_was_resumed() -> None:
    """A newer PyTorch may bring more: Muon alone cannot train this net."""
    assert set(optimizer_names()) - {"Muon"} == {optimizer.name for optimizer in OPTIMIZERS}
    tried = {name for schedule in SCHEDULES for name, _ in (schedule if isinstance(schedule, list) else [schedule])}
    assert set(schedule_names()) - {"ConstantLR", "PolynomialLR"} == tried


def test_same_steps_as_pytorch() -> None:
    ours, theirs = weights(), weights()
    following = [("LinearLR", {"total_iters": 4}), ("ExponentialLR", {"gamma": 0.9})]
    stepper = ScheduledStepper(Optimizer("sgd", lr=0.1, momentum=0.9, schedule=following), ours)
    trained = [one for one in theirs.values() if one.requires_grad]
    reference = torch.optim.SGD(trained, lr=0.1, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        reference,
        [
            torch.optim.lr_scheduler.LinearLR(reference, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(reference, gamma=0.9),
        ],
        milestones=[4],
    )
    for step in range(6):
        assert stepper.learning_rate == reference.param_groups[0]["lr"]
        train(stepper, ours, step, step + 1)
        backward(theirs, step)
        reference.step()
        schedule.step()
        reference.zero_grad()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class _Used(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def test_every_fused_step_was_looked_up_before_threads_may_run_it() -> None:
    used: set[Any] = set()
    for name, kind in classes(torch.optim, torch.optim.Optimizer).items():
        if "fused" in inspect.signature(kind).parameters:
            weight = torch.ones(3, 3, requires_grad=True)
            weight.grad = torch.ones(3, 3)
            with _Used() as watch:
                ScheduledStepper(Optimizer(name), {"w": weight}).step()
            used |= {one for one in watch.operators if "fused" in str(one)}
    assert torch.ops.aten._fused_sgd_.default in used
    assert used <= FUSED_STEPS


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_steps_are_the_usual_ones_however_gradients_lie(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    usual = weight.detach().clone().requires_grad_()
    stepper = ScheduledStepper(Optimizer(name, lr=0.1), {"w": weight})
    reference = getattr(torch.optim, name)([usual], lr=0.1, foreach=False)
    assert stepper._steppers[0]._torch.defaults["fused"]
    for _ in range(3):
        gradient = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        weight.grad, usual.grad = gradient, gradient.clone()
        stepper.step()
        reference.step()
    torch.testing.assert_close(weight, usual, rtol=1e-12, atol=1e-12)


def test_a_fused_step_copies_no_gradient_of_a_weight_in_channels_last() -> None:
    """PyTorch's own does, and takes two to three times as long."""
    plain = torch.ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last).requires_grad_()
    plain.grad = torch.ones_like(plain)
    stepper = ScheduledStepper(Optimizer("SGD", lr=0.1), {"w": plain})
    with _Used() as watch:
        stepper.step()
    assert torch.ops.aten._fused_sgd_.default in watch.operators
    assert torch.ops.aten.clone.default not in watch.operators
    assert bool((plain == 0.9).all())


def test_weights_that_are_laid_out_anew_between_steps() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    usual = weight.detach().clone().requires_grad_()
    stepper, reference = ScheduledStepper(Optimizer("Adam", lr=0.1), {"w": weight}), torch.optim.Adam([usual], lr=0.1)
    for layout in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        weight.data = weight.data.contiguous(memory_format=layout)
        weight.grad = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        usual.grad = weight.grad.clone()
        stepper.step()
        reference.step()
    torch.testing.assert_close(weight, usual, rtol=1e-12, atol=1e-12)
    assert stepper.state()[0]["w/step"] == 3


def test_whoever_asks_for_another_step_gets_it() -> None:
    weight = torch.zeros(2, 2, requires_grad=True)
    assert not ScheduledStepper(Optimizer("Adam", foreach=False), {"w": weight})._steppers[0]._torch.defaults["fused"]
    half = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    assert not ScheduledStepper(Optimizer("Adam"), {"w": half})._steppers[0]._torch.defaults["fused"]


def test_weights_without_gradients_have_no_state_yet() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    held["out.weight"].grad = torch.ones_like(held["out.weight"])
    stepper.step()
    tensors, scalars = stepper.state()
    assert set(tensors) == {f"out.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name, value in scalars.items() if value is None} == set(scalars)
    assert "conv/a.bias/step" in scalars
    again = ScheduledStepper(Optimizer("Adam"), held)
    again.load(tensors, scalars, 1)
    assert again.state()[1] == scalars
    train(again, held, 1, 2)  # a half-made state would fail here
    assert again.state()[0]["conv/a.bias/step"] == 1
    assert again.state()[0]["out.weight/step"] == 2


def test_state_of_a_part_of_the_weights() -> None:
    """What several workers wrote is united; each takes its own."""
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    train(stepper, held, 0, 3)
    tensors, scalars = stepper.state()
    part = ScheduledStepper(Optimizer("Adam"), {"out.weight": held["out.weight"]})
    part.load(tensors, scalars, 3)
    assert set(part.state()[0]) == {f"out.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert torch.equal(part.state()[0]["out.weight/exp_avg"], tensors["out.weight/exp_avg"])


def test_names_with_slashes_do_not_collide() -> None:
    held = {name: torch.ones(2, requires_grad=True) for name in ("a", "a/exp_avg", "a/exp_avg/exp_avg")}
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    for number, tensor in enumerate(held.values()):
        tensor.grad = torch.full_like(tensor, number + 1)
    stepper.step()
    tensors, scalars = stepper.state()
    assert len(tensors) == 9
    again = ScheduledStepper(Optimizer("Adam"), held)
    again.load(tensors, scalars, 1)
    assert all(torch.equal(tensor, again.state()[0][entry]) for entry, tensor in tensors.items())


def test_channels_last_state_is_laid_out_like_its_weight() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    train(stepper, held, 0, 1)
    tensors = {entry: tensor.contiguous() for entry, tensor in stepper.state()[0].items()}
    stepper.load(tensors, {}, 1)
    kept = stepper.state(copy=False)[0]["conv/a.weight/exp_avg"]
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(kept, tensors["conv/a.weight/exp_avg"])


def test_without_copying_the_state_is_live() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    train(stepper, held, 0, 1)
    live, copied = stepper.state(copy=False)[0], stepper.state()[0]
    train(stepper, held, 1, 2)
    assert live["out.weight/step"] == 2
    assert copied["out.weight/step"] == 1


def test_a_loaded_state_is_copied() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    train(stepper, held, 0, 1)
    tensors, scalars = stepper.state()
    before = {entry: tensor.clone() for entry, tensor in tensors.items()}
    stepper.load(tensors, scalars, 1)
    train(stepper, held, 1, 2)
    assert all(torch.equal(tensor, before[entry]) for entry, tensor in tensors.items())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("Adam"), held)
    train(stepper, held, 0, 2)
    tensors, scalars = stepper.state()
    before = stepper.state()[0]
    lacking = {entry: tensor for entry, tensor in tensors.items() if entry != "out.weight/exp_avg"}
    with pytest.raises(BadFile, match=r"Adam at step 2 lacks 'out.weight/exp_avg'"):
        stepper.load(lacking, scalars, 2)
    with pytest.raises(BadFile, match=r"lacks 'conv/a.weight/step', .* and 7 more"):
        stepper.load({}, {}, 2)
    wrong: Any
    for wrong, message in [
        (torch.zeros(3, 4, dtype=torch.float64), r"is torch.float64 \[3, 4\]; .* must be torch.float64 \[4, 3\]"),
        (torch.zeros(4, 3), "is torch.float32 .* must be torch.float64"),
        (1.5, "is a float; it must be a tensor"),
    ]:
        with pytest.raises(BadFile, match=message):
            stepper.load({**tensors, "out.weight/exp_avg": wrong}, scalars, 2)
    with pytest.raises(BadFile, match=r"holds 'conv/a.weight/exp_avg', .*another optimiser's"):
        ScheduledStepper(Optimizer("SGD"), held).load(tensors, scalars, 2)
    with pytest.raises(BadValue, match="step -1"):
        stepper.load(tensors, scalars, -1)
    assert stepper.steps_done == 2
    assert all(torch.equal(tensor, before[entry]) for entry, tensor in stepper.state()[0].items())


def test_before_the_first_step_nothing_is_missing() -> None:
    stepper = ScheduledStepper(Optimizer("Adam", schedule=("StepLR", {"step_size": 1})), weights())
    stepper.load({}, {}, 0)
    stepper.load(*stepper.state(), 0)
    assert stepper.steps_done == 0
    assert stepper.learning_rate == 1e-3


def test_no_trainable_weights() -> None:
    """A worker of layers without weights keeps the same learning rate as the others."""
    stepper = ScheduledStepper(
        Optimizer("Adam", lr=1.0, schedule=("ExponentialLR", {"gamma": 0.5})), {"frozen": torch.ones(2)}
    )
    stepper.step()
    stepper.zero()
    assert stepper.learning_rate == 0.5
    assert stepper.state() == ({}, {})
    stepper.load({}, {}, 2)
    assert stepper.learning_rate == 0.25


def test_tied_weights_are_stepped_once() -> None:
    one = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepper = ScheduledStepper(Optimizer("SGD", lr=1.0, momentum=0.5), {"a": one, "b": one})
    one.grad = torch.ones(2)
    stepper.step()
    assert one.tolist() == [0, 0]
    assert list(stepper.state()[0]) == ["a/momentum_buffer"]


def test_zero_forgets_gradients() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("SGD"), held)
    backward(held, 0)
    assert held["scale"].grad is not None
    stepper.zero()
    assert held["scale"].grad is None


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (Optimizer("SGD", lr=0.1), 0),
        (Optimizer("SGD", lr=0.1, momentum=0.9), 1),
        (Optimizer("SGD", lr=0.1, schedule=("OneCycleLR", {"max_lr": 1, "total_steps": 9})), 1),
        (Optimizer("Adam"), 2),
        (Optimizer("adamw", amsgrad=True), 3),
        (Optimizer("RMSprop"), 1),
        (Optimizer("RMSprop", centered=True, momentum=0.9), 3),
        (Optimizer("Adagrad"), 1),
        (Optimizer("Adadelta"), 2),
        (Optimizer("Adafactor"), 1),
    ],
    ids=repr,
)
def test_slots(optimizer: Optimizer, count: int) -> None:
    assert slots(optimizer) == count


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *(Optimizer(name) for name in optimizer_names())], ids=repr)
def test_good_ones_are_valid(optimizer: Optimizer) -> None:
    validate(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer("SGD", lr=-1), r"SGD\(lr=-1\) is refused by PyTorch: Invalid learning rate: -1"),
        (Optimizer("SGD", lr="fast"), "SGD: lr is 'fast'; it must be a number"),
        (Optimizer("SGD", nesterov=True), "Nesterov momentum requires a momentum"),
        (Optimizer("Adam", betas=0.9), r"Adam: betas is 0.9; it must be 2 numbers in brackets"),
        (Optimizer("Adam", betas=(0.9, 1.5)), "Invalid beta"),
        (Optimizer("SGD", momentun=0.9), "SGD takes no option 'momentun'"),
        (Optimizer("SGD", params=1), "SGD takes no option 'params'"),
        (Optimizer("Adam", differentiable=True), "refused by PyTorch"),
        (Optimizer("LBFGS"), "LBFGS cannot be used: it evaluates the loss again and again .* that cannot be split"),
        (Optimizer("sparseadam"), "SparseAdam cannot be used: it needs sparse gradients"),
        (Optimizer("SGD", schedule=("ReduceLROnPlateau", {})), "ReduceLROnPlateau cannot be used: it needs a metric"),
        (Optimizer("SGD", schedule=("LambdaLR", {})), "LambdaLR cannot be used: it needs a function"),
        (Optimizer("SGD", schedule=("MultiplicativeLR", {})), "MultiplicativeLR cannot be used"),
        (Optimizer("SGD", schedule=("SequentialLR", {})), "SequentialLR cannot be used: .*given as a list"),
        (Optimizer("SGD", schedule=("ChainedScheduler", {})), "ChainedScheduler cannot be used: .*given as a list"),
        (Optimizer("SGD", schedule=("CosineAnnealingLR", {})), "CosineAnnealingLR needs T_max, which is not given"),
        (Optimizer("SGD", schedule=("StepLR", {"size": 3})), "StepLR takes no option 'size'"),
        (Optimizer("SGD", schedule=("StepLR", {"step_size": 0})), "The schedule StepLR cannot go on"),
        (
            Optimizer("SGD", schedule=("StepLR", {"step_size": 1, "last_epoch": 3})),
            "StepLR takes no option 'last_epoch'",
        ),
        (Optimizer("SGD", schedule=("OneCycleLR", {"max_lr": 1})), r"OneCycleLR\(max_lr=1\) is refused by PyTorch"),
        (Optimizer("Adagrad", schedule=("CyclicLR", {"base_lr": 1, "max_lr": 2})), "CyclicLR.*momentum"),
    ],
    ids=repr,
)
def test_bad_ones_are_refused(optimizer: Optimizer, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        validate(optimizer)


def test_hints_say_what_to_type() -> None:
    with pytest.raises(UnknownName, match="no optimizer called 'Adan'") as caught:
        validate(Optimizer("Adan"))
    assert "Adam" in caught.value.hint
    with pytest.raises(UnknownName, match="no schedule called 'CosineLR'") as caught:
        validate(Optimizer("SGD", schedule=("CosineLR", {})))
    assert "CosineAnnealingLR" in caught.value.hint
    with pytest.raises(UnknownName, match="no optimizer called 'Optimizer'"):
        validate(Optimizer("Optimizer"))
    with pytest.raises(BadValue) as wrong:
        validate(Optimizer("SGD", momentun=0.9))
    assert wrong.value.hint.splitlines()[0] == "Did you mean momentum?"
    assert "SGD takes lr, momentum, dampening" in wrong.value.hint
    assert "params" not in wrong.value.hint


def test_names_are_found_in_any_case() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("rmsPROP", schedule=("exponentiallr", {"gamma": 0.5})), held)
    train(stepper, held, 0, 1)
    assert stepper.learning_rate == 0.005


def test_a_schedule_that_ends_says_so() -> None:
    held = weights()
    stepper = ScheduledStepper(Optimizer("SGD", schedule=("OneCycleLR", {"max_lr": 0.1, "total_steps": 3})), held)
    train(stepper, held, 0, 3)
    with pytest.raises(BadValue, match="OneCycleLR cannot go on after step 3: Tried to step 4 times"):
        train(stepper, held, 3, 5)


@pytest.mark.skipif("Muon" not in optimizer_names(), reason="this PyTorch has no Muon")
def test_muon_takes_matrices_only() -> None:
    with pytest.raises(BadValue, match="refused by PyTorch: Muon only supports 2D"):
        ScheduledStepper(Optimizer("Muon"), weights())


def test_what_cannot_be_optimized() -> None:
    with pytest.raises(BadValue, match="non-leaf"):
        ScheduledStepper(Optimizer("SGD"), {"a": torch.ones(2, requires_grad=True) * 2})


def test_only_refused_schedules_take_code() -> None:
    """An option that PyTorch calls would be a way in; none of the allowed classes has a required one."""
    for name, kind in classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler).items():
        if name in schedule_names():
            required = [
                one
                for one in inspect.signature(kind).parameters.values()
                if one.default is inspect.Parameter.empty and one.name != "optimizer"
            ]
            assert not [one for one in required if "Callable" in str(one.annotation)], name

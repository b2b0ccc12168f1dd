"""Figures of `manyhands bench capture`: the cost of capturing, once and in every step, and the gain of chosen kernels.

Every ratio is taken inside one run, with the two sides in turns: it is the median of the rounds' ratios.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.verify import verify
from manyhands.graph.weights import Weights
from manyhands.models.registry import ZOO, build, example_batch, example_target, loss_function
from manyhands.profiler.clock import TimedTrial, Timings, interleave
from manyhands.profiler.kernels import DEFAULT, choose_kernels
from manyhands.profiler.steps import TrainingStep
from manyhands.profiler.this_machine import identify
from manyhands.profiler.threads import with_threads
from manyhands_bench.figures import Figures, Progress

THREADS = 1
CHOSEN = "chosen"
_MOST_ROUNDS = 50


@dataclass(frozen=True)
class CaptureSetting:
    """A model at an input size and batch."""

    model: str
    samples: int
    input_shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = self.input_shape or ZOO[self.model].input_shape
        return f"{self.model} {'x'.join(map(str, shape))} batch {self.samples}"


OVERHEAD = (CaptureSetting("yolov2-16", 1), CaptureSetting("resnet50", 4), CaptureSetting("mobilenetv2", 8))
KERNEL_GAIN = CaptureSetting("yolov2-16", 1, (3, 608, 608))
KERNELS = (
    CaptureSetting("tiny", 16),
    CaptureSetting("resnet18", 2),
    CaptureSetting("resnet34", 2),
    CaptureSetting("resnet50", 2),
    CaptureSetting("mobilenetv2", 4),
    CaptureSetting("mobilenetv3-large", 4),
    CaptureSetting("efficientnet-b1", 2),
    CaptureSetting("vgg16", 1, (3, 112, 112)),
    CaptureSetting("vgg19", 1, (3, 112, 112)),
    CaptureSetting("unet", 1, (3, 128, 128)),
    CaptureSetting("yolov2", 1, (3, 224, 224)),
)
_QUICK_KERNELS = ("tiny", "resnet18", "mobilenetv2")


@dataclass(frozen=True)
class Budget:
    """The seconds for each part, per model, and the least number of rounds of a comparison."""

    least_rounds: int
    overhead: float
    choose: float
    compare: float
    choose_yolo: float
    compare_yolo: float


FULL = Budget(least_rounds=9, overhead=45.0, choose=20.0, compare=8.0, choose_yolo=45.0, compare_yolo=24.0)
QUICK = Budget(least_rounds=3, overhead=6.0, choose=6.0, compare=3.0, choose_yolo=15.0, compare_yolo=6.0)


def bench_capture(quick: bool = False, on_progress: Progress | None = None) -> Figures:
    """Return all figures, flat. This takes about ten minutes on two cores; with `quick`, one and a half."""
    say = on_progress or (lambda text: None)
    budget = QUICK if quick else FULL
    kernel_settings = [s for s in KERNELS if not quick or s.model in _QUICK_KERNELS]
    with with_threads(THREADS):
        figures = _about(quick, kernel_settings)
        used = [setting.model for setting in (*OVERHEAD, *kernel_settings)]
        for name in ZOO if not quick else dict.fromkeys(used):
            say(f"capturing {name}")
            figures[f"capture_seconds_{name}"] = capture_seconds(name)
        for setting in OVERHEAD:
            say(f"the captured chain beside the module: {setting}")
            timed = overhead(setting, budget.overhead, budget.least_rounds)
            figures[f"capture_overhead_{setting.model}"] = timed.ratio("captured", "module")
            figures[f"capture_overhead_noise_{setting.model}"] = timed.ratio("module again", "module")
            figures[f"capture_overhead_rounds_{setting.model}"] = timed.rounds()
            figures.update(verify_cost(setting, budget.compare, budget.least_rounds))
        figures["capture_overhead"] = max(float(figures[f"capture_overhead_{s.model}"]) for s in OVERHEAD)
        figures["verify_over_step"] = max(float(figures[f"verify_over_step_{s.model}"]) for s in OVERHEAD)
        say(f"choosing kernels: {KERNEL_GAIN}")
        figures.update(kernel_gain(KERNEL_GAIN, budget.choose_yolo, budget.compare_yolo, budget.least_rounds))
        for setting in kernel_settings:
            say(f"choosing kernels: {setting}")
            figures.update(kernel_gain(setting, budget.choose, budget.compare, budget.least_rounds))
        gains = [float(figures[f"kernel_choice_gain_{s.model}"]) for s in (KERNEL_GAIN, *kernel_settings)]
        figures["kernel_choice_gain"] = gains[0]
        figures["kernel_choice_gain_min"] = min(gains)
        return figures


def _about(quick: bool, kernel_settings: list[CaptureSetting]) -> Figures:
    """Return the machine and the settings of both sides."""
    machine = identify(THREADS)
    return {
        "machine": machine.architecture,
        "processor": machine.processor,
        "cores": machine.cores,
        "threads": machine.threads,
        "torch": machine.torch,
        "python": platform.python_version(),
        "quick": int(quick),
        "capture_overhead_settings": "; ".join(map(str, OVERHEAD))
        + ": forward, sum of the output, backward, torch.optim.SGD; the module against one piece over its whole graph; "
        "noise: the module against a copy of itself",
        "verify_over_step_settings": "; ".join(s.model for s in OVERHEAD)
        + ": loss and gradients of four samples by the module and by its captured graph, compared, over one plain step "
        "of eight samples",
        "kernel_choice_settings": "; ".join(map(str, (KERNEL_GAIN, *kernel_settings)))
        + ": the same step of the captured chain, PyTorch's default kernels against the chosen ones; 1 where the "
        "default was chosen, both sides being the same then",
    }


def capture_seconds(name: str) -> float:
    """Return the seconds of capturing a model of the zoo with its loss and describing its layers, at its own input
    size."""
    module = build(name)
    batch, target = example_batch(name, 2), example_target(name, 2)
    loss = loss_function(ZOO[name].loss)
    start = time.perf_counter()
    _ = capture(module, batch, loss=loss, target=target, name=name).network
    return time.perf_counter() - start


def _captured(setting: CaptureSetting) -> tuple[torch.nn.Module, torch.Tensor, Graph]:
    module = build(setting.model).train()
    batch = example_batch(setting.model, setting.samples, input_shape=setting.input_shape)
    assert isinstance(batch, torch.Tensor)
    return module, batch, capture(module, batch, name=setting.model)


def overhead(setting: CaptureSetting, seconds: float, least_rounds: int) -> Timings:
    """Time steps of the plain module and of the captured chain in turns, with PyTorch's default kernels on both sides.

    A copy of the plain module runs too: any difference between it and the module is the machine's noise.
    """
    module, batch, graph = _captured(setting)
    twin, again = copy.deepcopy(module), copy.deepcopy(module)
    piece, inputs = Piece(graph, Weights.shared(graph, twin)), bind_inputs(graph, batch)
    trials = [
        TimedTrial("module", _step(module, lambda: module(batch))),
        TimedTrial("captured", _step(twin, lambda: piece(inputs)[graph.outputs[0]])),
        TimedTrial("module again", _step(again, lambda: again(batch))),
    ]
    return interleave(trials, repeats=_MOST_ROUNDS, least_repeats=least_rounds, seconds=seconds)


def verify_cost(setting: CaptureSetting, seconds: float, least_rounds: int) -> Figures:
    """Compare the self-check before a run's first step, on four samples, with a plain step of eight: the check runs the
    four twice."""
    module, loss = build(setting.model).train(), loss_function(ZOO[setting.model].loss)

    def given(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = example_batch(setting.model, samples, input_shape=setting.input_shape)
        assert isinstance(batch, torch.Tensor)
        return batch, example_target(setting.model, samples, input_shape=setting.input_shape)

    (few, classes), (batch, targets) = given(4), given(8)
    graph = capture(module, few, loss=loss, target=classes)
    graph.network.layers  # noqa: B018  (described once, as any run does)
    trials = [
        TimedTrial("check", lambda: verify(graph, module, loss, few, classes)),
        TimedTrial("step", _step(module, lambda: loss(module(batch), targets))),
    ]
    timed = interleave(trials, repeats=_MOST_ROUNDS, least_repeats=least_rounds, seconds=seconds)
    return {
        f"verify_over_step_{setting.model}": timed.ratio("check", "step"),
        f"verify_seconds_{setting.model}": timed.median("check"),
    }


def _step(module: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        forward().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def kernel_gain(setting: CaptureSetting, choose_seconds: float, compare_seconds: float, least_rounds: int) -> Figures:
    """Choose kernels, then compare with the default in a run of its own: the choice's own timings are not used."""
    _, batch, graph = _captured(setting)
    inputs = bind_inputs(graph, batch)
    choice = choose_kernels(graph, setting.samples, threads=THREADS, seconds=choose_seconds, inputs=inputs)
    figures: Figures = {
        f"kernel_choice_{setting.model}": choice.name,
        f"kernel_choice_operators_{setting.model}": len(choice.kernels),
        f"kernel_choice_gain_{setting.model}": 1.0,
    }
    if choice.kernels:
        step = TrainingStep(graph, setting.samples, inputs)
        trials = [step.trial(DEFAULT, {}), step.trial(CHOSEN, choice.kernels)]
        timed = interleave(trials, repeats=_MOST_ROUNDS, least_repeats=least_rounds, seconds=compare_seconds)
        figures[f"kernel_choice_gain_{setting.model}"] = timed.ratio(DEFAULT, CHOSEN)
        figures[f"kernel_choice_rounds_{setting.model}"] = timed.rounds()
        figures[f"step_seconds_default_{setting.model}"] = timed.median(DEFAULT)
        figures[f"step_seconds_chosen_{setting.model}"] = timed.median(CHOSEN)
    return figures

"""Choose the kernels of a network on this machine, so that the choice never loses to PyTorch's default.

1. Every distinct operator is measured by every kernel (operators.py).
2. The cheapest path along the network is found: a format per convolution, with the cost of changing it in between.
3. Whole steps decide, in turns: the default, the path, and one kernel for everything (channels_last, products, native;
   for inference also packed).
4. The winner is compared with the default once more. Unless it wins again, the default stays.

For inference a step is a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from manyhands.facts.profile import Kernel
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import packable, takes_flags, takes_product
from manyhands.graph.nodes import Node, values_of
from manyhands.profiler.clock import TimedTrial, Timer, Timings, computing, interleave, passed, stopwatch
from manyhands.profiler.operators import OperatorSeconds, follows_format, is_pixel, measure_operators
from manyhands.profiler.steps import InferenceStep, TrainingStep
from manyhands.profiler.threads import with_threads

DEFAULT = "default"
PER_OPERATOR = "per operator"
LEAST_GAIN = 1.02
"""A step must become this much faster to leave PyTorch's default: a smaller gain is noise."""
FLAGS_PRICE = 1.05
"""A kernel that sets flags must be this much faster as an operator: it runs through a function of our own."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30
_VOTES = 2
"""The number of attempts at confirming a winner: on a busy machine one says little."""
_OPERATORS, _STEPS = 0.5, 0.8
"""Fractions of the time budget by which the first and the third phase end."""


@dataclass(frozen=True)
class Choice:
    """Operator -> kernel (absent: PyTorch's default), and how the choice was made."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    name: str = DEFAULT
    gain: float = 1.0
    """Seconds of a default step over seconds of a step by this choice, as measured when it was confirmed."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Candidate -> median seconds of a whole step."""


def choose_kernels(
    graph: Graph,
    samples: int,
    *,
    threads: int | None = None,
    seconds: float = 60.0,
    inputs: Mapping[str, torch.Tensor] | None = None,
    training: bool = True,
    timer: Timer | None = None,
) -> Choice:
    """Return the fastest kernels for training `graph` on `samples` samples with `threads` threads (None: torch's
    setting), or where `training` is False, for inference.

    Takes about `seconds`; a model whose single step takes longer than that gets a few steps nevertheless. With no time
    at all the default is returned unmeasured. `timer`: None for the seconds that one thread computes or, where there
    are several, the seconds that pass.
    """
    tunable = [node for node in graph.nodes if takes_flags(graph, node)]
    if seconds <= 0 or not tunable:
        return Choice()
    with with_threads(threads):
        timer = timer or (computing if torch.get_num_threads() == 1 else stopwatch)
        measured = measure_operators(graph, samples, seconds=seconds * _OPERATORS, training=training, timer=timer)
        path = cheapest_path(graph, samples, measured, training=training)
        candidates = _candidates(graph, path, training)
        step = (TrainingStep if training else InferenceStep)(graph, samples, inputs)
        return _decide(step, candidates, seconds, measured.spent_seconds, timer)


def _candidates(graph: Graph, path: dict[str, Kernel], training: bool) -> dict[str, dict[str, Kernel]]:
    """Return choices to compare by whole steps; the default first, equal ones once."""
    formatted = [n for n in graph.nodes if takes_format(graph, n)]
    may_be_packed = frozenset[str]() if training else packable(graph)
    everything = {
        DEFAULT: {},
        PER_OPERATOR: path,
        "channels_last": {n.name: Kernel(channels_last=True) for n in formatted},
        "products": {n.name: Kernel(channels_last=True, product=takes_product(graph, n)) for n in formatted},
        "packed": {n.name: Kernel(channels_last=True, packed=n.name in may_be_packed) for n in formatted},
        "native": {n.name: Kernel(onednn=False) for n in graph.nodes if takes_flags(graph, n)},
    }
    candidates: dict[str, dict[str, Kernel]] = {}
    for name, choice in everything.items():
        if name == DEFAULT or (choice and choice not in candidates.values()):
            candidates[name] = choice
    return candidates


def _decide(
    step: TrainingStep | InferenceStep,
    candidates: dict[str, dict[str, Kernel]],
    seconds: float,
    spent: float,
    timer: Timer,
) -> Choice:
    """Return the candidate that beats the default twice in three times, or the default."""
    trials = {name: step.trial(name, choice) for name, choice in candidates.items()}
    for name in list(trials):
        took = _first_run(trials[name], timer)
        spent += passed(took)
        if took == math.inf and name != DEFAULT:
            del trials[name]
    seconds_left = max(0.0, seconds * _STEPS - spent)
    timings = _rounds(list(trials.values()), seconds_left, timer)
    medians = {name: timings.median(name) for name in trials}
    winner = max(trials, key=lambda name: timings.ratio(DEFAULT, name))
    if winner == DEFAULT or timings.ratio(DEFAULT, winner) < LEAST_GAIN:
        return Choice(step_seconds=medians)
    seconds_left = max(seconds - spent - timings.spent_seconds, seconds * (1 - _STEPS))
    for _ in range(_VOTES):
        again = _rounds([trials[DEFAULT], trials[winner]], seconds_left, timer)
        gain = again.ratio(DEFAULT, winner)
        if gain >= LEAST_GAIN:
            return Choice(candidates[winner], winner, gain, medians)
    return Choice(step_seconds=medians)


def _rounds(trials: list[TimedTrial], seconds: float, timer: Timer) -> Timings:
    return interleave(
        trials, repeats=_MOST_ROUNDS, least_repeats=_LEAST_ROUNDS, seconds=seconds, warm_ups=0, pruned_ratio=2.5,
        timer=timer,
    )  # fmt: skip


def _first_run(trial: TimedTrial, timer: Timer) -> float:
    """Return the seconds of a first run; infinite where an operator of the network refuses the format."""
    try:
        return timer(trial)
    except RuntimeError:
        if trial.name == DEFAULT:
            raise
        return math.inf


@dataclass(frozen=True)
class _Path:
    """The cheapest way to arrive in a format: its cost, and the last choice with what led to it."""

    seconds: float
    last: tuple[str, Kernel] | None = None
    before: _Path | None = None

    def then(self, name: str, kernel: Kernel, seconds: float) -> _Path:
        return _Path(self.seconds + seconds, (name, kernel), self)

    def choices(self) -> dict[str, Kernel]:
        chosen: dict[str, Kernel] = {}
        path: _Path | None = self
        while path is not None:
            if path.last is not None:
                chosen[path.last[0]] = path.last[1]
            path = path.before
        return chosen


def cheapest_path(graph: Graph, samples: int, measured: OperatorSeconds, *, training: bool = True) -> dict[str, Kernel]:
    """Return a kernel per measured operator, by dynamic programming over (operator, format of the tensor at hand).

    Branches are taken in topological order as if they were a chain; whole steps check the result afterwards.
    """
    paths = {False: _Path(0.0)}
    for node in graph.nodes:
        seconds = measured.by_kernel.get(node.name)
        if not seconds:
            continue
        seconds = {
            kernel: kernel_seconds * (1.0 if kernel.is_plain else FLAGS_PRICE)
            for kernel, kernel_seconds in seconds.items()
        }
        if takes_format(graph, node) and not is_pixel(graph, node):
            each = measured.convert_seconds_per_byte
            paths = _through_convolution(graph, node, samples, paths, seconds, each, training)
        elif follows_format(graph, node):
            paths = {
                last: _Path(path.seconds + seconds.get(Kernel(last), math.inf), None, path)
                for last, path in paths.items()
            }
        else:
            best = min(seconds, key=seconds.__getitem__)
            paths = {last: path.then(node.name, best, seconds[best]) for last, path in paths.items()}
    chosen = min(paths.values(), key=lambda path: path.seconds).choices()
    return chosen if any(kernel != Kernel() for kernel in chosen.values()) else {}


def _through_convolution(
    graph: Graph,
    node: Node,
    samples: int,
    paths: dict[bool, _Path],
    seconds: dict[Kernel, float],
    convert_seconds_per_byte: float,
    training: bool,
) -> dict[bool, _Path]:
    spec = graph.network.tensors[values_of(node)[0]]
    # There and back: the input in forward, its gradient in backward.
    has_gradient = training and spec.differentiable
    convert = convert_seconds_per_byte * spec.bytes_for(samples) * (1.0 if has_gradient else 0.5)
    arrived: dict[bool, _Path] = {}
    for last in (False, True):
        kernels = [kernel for kernel in seconds if kernel.channels_last == last]
        if kernels:
            best = min(kernels, key=seconds.__getitem__)
            ways = (path.then(node.name, best, seconds[best] + (convert if came != last else 0.0))
                    for came, path in paths.items())  # fmt: skip
            arrived[last] = min(ways, key=lambda path: path.seconds)
    return arrived

"""Measures seconds of single operators by kernel: forward and, in training, backward; each distinct operator once."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.convolution_kernels import has_acl, takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, packable, store_weights, takes_flags, takes_product
from manyhands.graph.memory_formats import reformat
from manyhands.graph.nodes import Argument, Node, Value, Weight, values_of, weights_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.profiler.clock import TimedTrial, Timer, interleave, stopwatch
from manyhands.profiler.steps import random_tensor

PRUNED_RATIO = 1.6
"""A kernel this many times slower than the best in a first round is not measured further."""
SMALL_SECONDS = 2e-3
"""Operators faster than this may be faster still on one thread."""
REPEATS = (3, 15)
"""The fewest and the most rounds: small operators, which noise hits hardest, get more of them."""
REPEAT_SECONDS = 0.15

_FOLLOWS = ops.POOLING | ops.RESAMPLING | {"aten.batch_norm.default", "aten.group_norm.default"}


@dataclass
class OperatorSeconds:
    """The measurements: seconds of each kernel by operator name, and seconds per byte of a change of format,
    both ways."""

    by_kernel: dict[str, dict[Kernel, float]] = field(default_factory=dict)
    convert_seconds_per_byte: float = 0.0
    spent_seconds: float = 0.0


def signature(graph: Graph, node: Node) -> tuple[Any, ...]:
    """Return a key: operators with equal keys take equal time."""

    def plain(argument: Argument) -> Any:
        if isinstance(argument, Value):
            spec = graph.network.tensors[argument.name]
            return ("value", spec.shape, spec.dtype, spec.batch_axis, spec.second_batch_axis, spec.differentiable)
        if isinstance(argument, Weight):
            weight = graph.network.weights[argument.name]
            return ("weight", weight.shape, weight.dtype, weight.trainable)
        return tuple(plain(item) for item in argument) if isinstance(argument, (list, tuple)) else argument

    options = tuple((name, plain(value)) for name, value in sorted(node.options.items()))
    return (node.target, plain(node.arguments), options)


def follows_format(graph: Graph, node: Node) -> bool:
    """Return whether an operator takes its format from its input, at a cost that depends on it."""
    shapes = [graph.network.tensors[name].shape for name in values_of(node)]
    return node.target in _FOLLOWS and bool(shapes) and len(shapes[0]) in (4, 5)


def is_pixel(graph: Graph, node: Node) -> bool:
    """Return whether a convolution's input and output have one place only: then both formats are the same."""
    names = [*values_of(node), *(spec.name for spec in node.outputs)]
    return all(math.prod(graph.network.tensors[name].shape[2:]) == 1 for name in names)


def kernels_for(graph: Graph, node: Node, may_be_packed: Container[str] = ()) -> list[Kernel]:
    """Return the kernels worth measuring on the threads at hand, PyTorch's default first.

    `may_be_packed`: operators whose weights may be packed for inference.
    """
    if takes_format(graph, node):
        formats = (False,) if is_pixel(graph, node) else (False, True)
        kernels = [Kernel(channels_last, onednn) for onednn in (True, False) for channels_last in formats]
        if takes_product(graph, node):
            kernels.append(Kernel(channels_last=True, product=True))
        if node.name in may_be_packed:
            kernels.append(Kernel(channels_last=True, packed=True))
        return kernels
    # oneDNN multiplies float32 matrices on Arm only (by the Arm Compute Library).
    if node.target == "aten.linear.default" and not has_acl():
        return []
    if takes_flags(graph, node):
        return [Kernel(), Kernel(onednn=False)]
    return [Kernel(), Kernel(channels_last=True)] if follows_format(graph, node) else []


def measure_operators(
    graph: Graph, samples: int, *, seconds: float, training: bool = True, timer: Timer = stopwatch
) -> OperatorSeconds:
    """Measure every distinct operator that has a choice, the largest first, until `seconds` are spent."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    may_be_packed = frozenset[str]() if training else packable(graph)
    for index, node in enumerate(graph.nodes):
        if kernels_for(graph, node):
            groups.setdefault(signature(graph, node), []).append(index)
    result = OperatorSeconds()
    order = sorted(groups.values(), key=lambda group: -len(group) * _weight(graph, group[0]))
    if order:
        result.convert_seconds_per_byte = _convert_seconds_per_byte(graph, samples, timer)
    for group in order:
        if result.spent_seconds >= seconds:
            break
        kernels = kernels_for(graph, graph.nodes[group[0]], may_be_packed)
        measured = _measure(graph, group[0], samples, kernels, result, seconds, timer, training)
        for index in group:
            result.by_kernel[graph.nodes[index].name] = measured
    return result


def _weight(graph: Graph, index: int) -> int:
    """Return the operator's arithmetic or, where it has none, the bytes that it moves."""
    return graph.network.ops[index].macs + graph.network.ops[index].moved_bytes


def _measure(
    graph: Graph, index: int, samples: int, kernels: list[Kernel], result: OperatorSeconds, seconds: float,
    timer: Timer, training: bool,
) -> dict[Kernel, float]:  # fmt: skip
    node = graph.nodes[index]
    seconds_left = seconds - result.spent_seconds
    first = _time(graph, index, samples, kernels, seconds_left, timer, result, training)
    best = min(first, key=first.__getitem__)
    small = first[best] < SMALL_SECONDS and torch.get_num_threads() > 1
    if small and takes_flags(graph, node) and node.target not in ops.RECURRENT:
        single = Kernel(best.channels_last, best.onednn, threads=1)
        first.update(_time(graph, index, samples, [best, single], seconds_left, timer, result, training))
    return {kernel: kernel_seconds for kernel, kernel_seconds in first.items() if kernel_seconds < math.inf}


def _time(
    graph: Graph, index: int, samples: int, kernels: list[Kernel], seconds_left: float, timer: Timer,
    result: OperatorSeconds, training: bool,
) -> dict[Kernel, float]:  # fmt: skip
    trials = dict(zip(kernels, _trials(graph, index, samples, kernels, training)))
    least, most = REPEATS
    timings = interleave(
        list(trials.values()), repeats=most, least_repeats=least if seconds_left > 0 else 1,
        seconds=min(seconds_left, REPEAT_SECONDS), pruned_ratio=PRUNED_RATIO, timer=timer,
    )  # fmt: skip
    result.spent_seconds += timings.spent_seconds
    return {kernel: timings.least(trial.name) for kernel, trial in trials.items()}


def _trials(graph: Graph, index: int, samples: int, kernels: list[Kernel], training: bool) -> Iterator[TimedTrial]:
    """Yield a trial for each kernel: one operator as a piece of its own."""
    node = graph.nodes[index]
    for kernel in kernels:
        choice = {node.name: kernel} if takes_flags(graph, node) else {}
        weights = Weights.copied(graph, weights_of(node))
        store_weights(graph, weights, choice)
        piece = Piece(graph, weights, index, index + 1, kernels=_calls(graph, node, choice))
        if not training:
            piece.rest(samples)
        inputs = {}
        for name in piece.inputs:
            spec = graph.network.tensors[name]
            tensor = random_tensor(spec, samples)
            tensor = reformat(tensor, kernel.channels_last) if tensor.dim() in (4, 5) else tensor
            inputs[name] = tensor.requires_grad_(spec.differentiable and training)
        yield TimedTrial(f"{node.name}: {kernel}", _Run(piece, inputs, samples, training))


def _calls(graph: Graph, node: Node, choice: Mapping[str, Kernel]) -> dict[str, Any]:
    calls = kernel_calls(graph, choice)
    return {node.name: calls[node.name]} if node.name in calls else {}


class _Run:
    """Forward and, in training, backward of a piece; gradients are made, not accumulated."""

    def __init__(self, piece: Piece, inputs: dict[str, torch.Tensor], samples: int, training: bool) -> None:
        self.piece, self.inputs, self.context = piece, inputs, Context(training=training, samples=samples)
        leaves = [*inputs.values(), *piece.weights.tensors.values()]
        self.leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self.seeds: list[torch.Tensor] = []

    def __call__(self) -> None:
        if not self.context.training:
            with torch.no_grad():
                self.piece(self.inputs, self.context)
            return
        roots = [output for output in self.piece(self.inputs, self.context).values() if output.requires_grad]
        if not self.seeds:
            self.seeds = [torch.ones_like(root) for root in roots]
        if roots and self.leaves:
            torch.autograd.grad(roots, self.leaves, self.seeds, allow_unused=True)


def _convert_seconds_per_byte(graph: Graph, samples: int, timer: Timer) -> float:
    """Return the cost per byte of a change of format, there and back, on the median convolution's input."""
    specs = [graph.network.tensors[values_of(node)[0]] for node in graph.nodes if takes_format(graph, node)]
    specs = sorted((s for s in specs if math.prod(s.shape[2:]) > 1), key=lambda spec: spec.elements)
    if not specs:
        return 0.0
    spec = specs[len(specs) // 2]
    data = random_tensor(spec, samples)
    timings = interleave([TimedTrial("convert", lambda: reformat(reformat(data, True), False))], repeats=5, timer=timer)
    return timings.least("convert") / spec.bytes_for(samples)

"""Measures a network within a limit of seconds, whatever its size, so that a run can begin.

Each layer is run forward and at once backward, so that the time is looked at between any two:

    layer      1    2    3    4    5    6    7
    measured   x    x    .    x    x    =    =      3 is like 2: it takes as long, and is not run
                                        |
                                        the time is over: 6 and 7 are estimated from their arithmetic and bytes, at the
                                        rate of the layers that were measured

One sample goes first, then a device's share where there is time for it, then both again: the least of several passes
counts, since other work of the machine only ever adds. At least one layer is run, on one sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.facts.device import Device
from manyhands.facts.network import Layer
from manyhands.facts.profile import DeviceProfile, Kernel, LayerTiming, Timing, op_seconds
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, store_weights
from manyhands.graph.nodes import Argument, Value, Weight
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import backward_piece
from manyhands.graph.weights import Weights
from manyhands.profiler.host_copies import measure_host_copies
from manyhands.profiler.layer_clocks import layer_clock
from manyhands.profiler.steps import borrowed_state, random_inputs
from manyhands.profiler.this_machine import identify

LEAST_PASSES, MOST_PASSES = 3, 5
"""Passes of each size: with fewer the profile is coarse; more are not made."""
_TYPICAL = Device(
    name="typical", kind="local", gflops=30.0, memory_bytes=1, memory_bytes_per_second=5e9, cores=1,
    operator_seconds=2e-5,
)  # fmt: skip
"""Only the ratio of two layers' estimates counts: that of arithmetic, bytes and operators of a usual processor."""

MOST_PAUSED = 4.0
"""Real seconds for each second of the limit, where only the seconds that a thread computes count: other work may pause
it for as long."""

Clock = Callable[[], float]
Seconds = tuple[float, float]
"""Of a layer, forward and backward."""


@dataclass(frozen=True)
class QuickSettings:
    """The settings of measuring a network in little time."""

    seconds: float
    """The limit: no layer is begun after it."""
    device: str = "local"
    torch_device: str = "cpu"
    alone: bool = False
    """Measure as if this machine did nothing else: the seconds that the one thread computed, in place of those that
    passed."""
    clock: Clock = time.perf_counter
    """What the limit is measured by; tests give another."""


def computing_clock() -> Clock:
    """Return a clock of the seconds that this thread computes, for the limit where others' work pauses it.

    By real seconds a thread that has a tenth of a core would make a single pass of one sample, its first, which takes
    many times as long as any later one. The clock runs at 1/MOST_PAUSED of real time at least.
    """
    began, computed = time.perf_counter(), time.thread_time()
    return lambda: max(time.thread_time() - computed, (time.perf_counter() - began) / MOST_PAUSED)


def measure_quickly(
    graph: Graph, ladder: Sequence[int], kernels: Mapping[str, Kernel], settings: QuickSettings
) -> DeviceProfile:
    """Return the profile of training `graph` on this machine, made within the limit of seconds.

    `ladder`: sizes, the most important first. The profile is coarse unless there was time for LEAST_PASSES passes of
    each size.
    """
    passes = _Passes(graph, kernels, settings)
    least = _climbed(passes, ladder, settings)
    whole: dict[int, list[Seconds]] = {}
    for samples in sorted(least):
        below = whole[max(whole)] if whole else [passes.estimate(layer, samples) for layer in graph.layers]
        whole[samples] = _completed(least[samples].seconds, below)
    network = graph.network
    layers = tuple(
        LayerTiming(layer.name, tuple(Timing(samples, *seconds[place]) for samples, seconds in whole.items()))
        for place, layer in enumerate(network.layers)
    )
    copies = measure_host_copies(torch.device(settings.torch_device))
    repeats = min(rung.whole_passes for rung in least.values())
    launches = [passes.launches.get(passes.first[place], (0.0, 0.0)) for place in range(len(network.layers))]
    return DeviceProfile(
        network=network.name, fingerprint=network.fingerprint, input=network.input_text,
        granularity=network.granularity, device=settings.device, source="measured", layers=layers,
        kernels=dict(kernels), machine=identify().text, repeats=repeats,
        launch_seconds=tuple(launches) if any(map(any, launches)) else (),
        host_copy_seconds=copies.seconds, host_copy_seconds_per_gigabyte=copies.seconds_per_gigabyte,
        is_coarse=repeats < LEAST_PASSES or set(least) != set(ladder),
    )  # fmt: skip


@dataclass
class _Rung:
    """The measurements with one number of samples."""

    seconds: dict[int, Seconds] = field(default_factory=dict)
    """Layer -> the least seconds of any pass."""
    whole_passes: int = 0
    pass_seconds: float = 0.0
    """What the last pass took by the clock."""


def _climbed(passes: _Passes, ladder: Sequence[int], settings: QuickSettings) -> dict[int, _Rung]:
    """Return what could be measured until the limit: the first two sizes as far as time allows, any other pass where
    all of it is likely to fit."""
    end = settings.clock() + settings.seconds
    rungs: dict[int, _Rung] = {}
    for number in range(MOST_PASSES):
        for place, samples in enumerate(ladder):
            below = max((size for size in rungs if size <= samples), default=0)
            guess = rungs[below].pass_seconds * samples / below if below else 0.0
            must_begin = number == 0 and place < 2
            began = settings.clock()
            if began + (0.0 if must_begin else guess) >= end and rungs:
                continue
            timed = passes.run(samples, end)
            rung = rungs.setdefault(samples, _Rung())
            rung.pass_seconds = settings.clock() - began
            rung.whole_passes += len(timed) == len(passes.graph.layers)
            for layer, seconds in timed.items():
                before = rung.seconds.get(layer, seconds)
                rung.seconds[layer] = min(seconds[0], before[0]), min(seconds[1], before[1])
    return rungs


def _completed(timed: Mapping[int, Seconds], below: Sequence[Seconds]) -> list[Seconds]:
    """Return the seconds of all layers: those that were not reached take as many times those `below`, of fewer samples
    or estimated, as the others do."""
    rates = [
        sum(timed[layer][way] for layer in timed) / max(sum(below[layer][way] for layer in timed), 1e-12)
        for way in (0, 1)
    ]
    return [timed.get(layer, (rates[0] * ahead, rates[1] * back)) for layer, (ahead, back) in enumerate(below)]


def alike(graph: Graph) -> list[int]:
    """Return for each layer the first one that runs the same operators on tensors of the same shapes."""
    first: dict[Any, int] = {}
    return [first.setdefault(_key(graph, layer), place) for place, layer in enumerate(graph.layers)]


def _key(graph: Graph, layer: Layer) -> tuple[Any, ...]:
    numbers: dict[str, int] = {}
    network = graph.network

    def plain(argument: Argument) -> Any:
        if isinstance(argument, (Value, Weight)):
            number = numbers.setdefault(argument.name, len(numbers))
            if isinstance(argument, Weight):
                weight = network.weights[argument.name]
                return ("weight", number, weight.shape, weight.dtype, weight.trainable)
            spec = network.tensors[argument.name]
            return ("value", number, spec.shape, spec.dtype, spec.batch_axis, spec.second_batch_axis,
                    spec.differentiable)  # fmt: skip
        return tuple(plain(item) for item in argument) if isinstance(argument, (list, tuple)) else argument

    nodes = [
        (
            node.target,
            plain(node.arguments),
            tuple((name, plain(value)) for name, value in sorted(node.options.items())),
            tuple(numbers.setdefault(spec.name, len(numbers)) for spec in node.outputs),
            (bool(node.updates), node.in_place, node.without_gradient),
        )
        for node in graph.nodes[layer.first : layer.last]
    ]
    return repr(nodes), tuple(numbers[name] for name in layer.outputs)


@dataclass
class _Passes:
    """A graph's layers as pieces over made-up weights, run one after another."""

    graph: Graph
    kernels: Mapping[str, Kernel]
    settings: QuickSettings
    pieces: dict[int, Piece] = field(default_factory=dict)
    launches: dict[int, Seconds] = field(default_factory=dict)
    """Layer -> what Python took to launch it last."""
    _loaded: set[tuple[int, int]] = field(default_factory=set)
    """Layers and numbers of samples that a GPU has computed: it has loaded their kernels."""

    def __post_init__(self) -> None:
        graph, device = self.graph, torch.device(self.settings.torch_device)
        state = borrowed_state(graph)
        for spec in graph.weights:
            if spec.buffer:  # written by running statistics, so that it shares no memory with what autograd keeps
                state[spec.name] = torch.ones(spec.shape, dtype=getattr(torch, spec.dtype))
        tensors = {s.name: state[s.name].to(device).detach().requires_grad_(s.trainable) for s in graph.weights}
        self.device, self.weights, self.first = device, Weights(tensors, device), alike(graph)
        store_weights(graph, self.weights, self.kernels)
        self._calls = kernel_calls(graph, self.kernels)
        self._unread_after = self._last_reads()

    def _last_reads(self) -> dict[int, list[str]]:
        """Return layer -> the tensors that no later layer reads."""
        last = {name: place for place, layer in enumerate(self.graph.layers) for name in layer.inputs}
        unread: dict[int, list[str]] = {}
        for name, place in last.items():
            unread.setdefault(place, []).append(name)
        return unread

    def _piece(self, place: int) -> Piece:
        if place not in self.pieces:
            layer = self.graph.layers[place]
            self.pieces[place] = Piece(self.graph, self.weights, layer.first, layer.last, kernels=self._calls)
        return self.pieces[place]

    def run(self, samples: int, end: float) -> dict[int, Seconds]:
        """Return layer -> its seconds, of those layers that are reached in time; each kind of layer is run once."""
        context = Context(samples=samples)
        values = random_inputs(self.graph, samples, self.device)
        timed: dict[int, Seconds] = {}
        made: dict[int, list[torch.Tensor]] = {}
        """What the first layer of each kind returned: another of its kind returns as much."""
        for place, layer in enumerate(self.graph.layers):
            if timed and self.settings.clock() >= end:
                break
            first = self.first[place]
            if first != place:
                timed[place] = timed[first]
                values.update(zip(layer.outputs, made[first], strict=True))
            else:
                piece = self._piece(place)
                if self.device.type != "cpu" and (place, samples) not in self._loaded:
                    self._timed(piece, values, context)
                    self._loaded.add((place, samples))
                outputs, timed[place], self.launches[place] = self._timed(piece, values, context)
                made[place] = [outputs[name] for name in layer.outputs]
                values.update(outputs)
                for name in piece.weight_names:
                    self.weights.tensors[name].grad = None
            for name in self._unread_after.get(place, ()):
                values.pop(name, None)
        return timed

    def _timed(
        self, piece: Piece, values: Mapping[str, torch.Tensor], context: Context
    ) -> tuple[dict[str, torch.Tensor], Seconds, Seconds]:
        """Return what a layer returned, its seconds, and those that Python took to launch it."""
        entering = {name: values[name].detach() for name in piece.inputs}
        for name, tensor in entering.items():
            if self.graph.network.tensors[name].differentiable:
                tensor.requires_grad_()
        forward, backward = (layer_clock(self.device, self.settings.alone) for _ in range(2))
        forward.start()
        outputs = piece(entering, context)
        forward.stop()
        gradients = {name: torch.ones_like(made) for name, made in outputs.items() if made.is_floating_point()}
        backward.start()
        backward_piece(entering, outputs, gradients)
        backward.stop()
        seconds = forward.seconds()[0], backward.seconds()[0]
        launches = forward.launch_seconds()[0], backward.launch_seconds()[0]
        return {name: made.detach() for name, made in outputs.items()}, seconds, launches

    def estimate(self, layer: Layer, samples: int) -> Seconds:
        """Return the seconds that a layer takes on a typical processor, by its arithmetic and its bytes."""
        network = self.graph.network
        forward = backward = 0.0
        for op in network.ops[layer.first : layer.last]:
            if op.moved_bytes or op.macs:
                seconds = op_seconds(op, _TYPICAL, samples)
                forward += seconds
                backward += network.backward_passes(op) * seconds
        return forward, backward

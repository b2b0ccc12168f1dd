"""Measure a network on this machine: forward and backward seconds of every layer over a ladder of batch sizes.

Each layer is a piece of its own with detached inputs, as if they had come over a wire (graph/tape.py), and the layers
run in order, so that each finds the caches as it would in training. The gradient of the first layer's input is not
computed. The loss is not included: outputs get a gradient of ones.

For inference only the forward pass counts: in evaluation mode, without autograd, and a tensor is dropped when no later
layer reads it. Backward then takes no time, and kernels are chosen by the forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypedDict, Unpack

import msgspec
import psutil
import torch

from manyhands.facts.errors import BadValue
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.profile import DeviceProfile, Kernel, LayerTiming, Timing
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, store_weights
from manyhands.graph.peak_bytes import PeakBytes
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import backward_piece
from manyhands.graph.weights import Weights
from manyhands.profiler.bands import (
    band_inputs,
    fitting_parts,
    is_measured_by_layers,
    possible_parts,
    whole_seconds,
)
from manyhands.profiler.host_copies import measure_host_copies
from manyhands.profiler.kernels import choose_kernels
from manyhands.profiler.layer_clocks import LayerClock, layer_clock
from manyhands.profiler.steps import borrowed_state
from manyhands.profiler.this_machine import identify
from manyhands.profiler.threads import with_threads

LADDER = (1, 2, 4, 8, 16, 32)
REPEATS = 3
_KERNELS = 0.4
"""The fraction of the time budget for choosing kernels."""
_KERNEL_SAMPLES = 4
_MOST_OF_MEMORY = 0.8
_MOST_REPEATS = 15

Progress = Callable[[str], None]


@dataclass
class _Pass:
    """Seconds of every layer in one step, forward and backward."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class PlaceSettings:
    """The place where a network is measured: device, name, memory."""

    device: str = "local"
    """The device's name in the profile."""
    torch_device: str = "cpu"
    alone: bool = False
    """Measure as if this machine did nothing else: the seconds that the one thread computed, in place of those that
    passed."""
    free_bytes: int | None = None
    """The memory that may be taken. Where the first rung would take more, it is measured on a band of its rows
    (bands.py), or one layer at a time, by PyTorch's default kernels unless others are given."""


class PlaceOptions(TypedDict, total=False):
    """The fields of `PlaceSettings`, as keywords."""

    device: str
    torch_device: str
    alone: bool
    free_bytes: int | None


@takes_settings(PlaceSettings)
def measure_network(
    graph: Graph,
    *,
    ladder: Sequence[int] = LADDER,
    threads: int | None = None,
    seconds: float = 45.0,
    repeats: int = REPEATS,
    kernels: Mapping[str, Kernel] | None = None,
    training: bool = True,
    on_progress: Progress | None = None,
    **options: Unpack[PlaceOptions],
) -> DeviceProfile:
    """Return the profile of `graph` on this machine with `threads` threads (None: torch's setting), in about `seconds`.

    Kernels are chosen first unless given. The ladder is climbed as far as time and free memory allow; its first rung
    is always measured. `training`: False for inference. `options`: the fields of `PlaceSettings`.
    """
    place = settings_from(PlaceSettings, "measure_network", options)
    torch_device, alone, free_bytes = place.torch_device, place.alone, place.free_bytes
    _check_ladder(ladder)
    _check_alone(alone, threads or torch.get_num_threads(), torch_device)
    say = on_progress or (lambda text: None)
    with with_threads(threads):
        start = time.perf_counter()
        parts = fitting_parts(graph.network, ladder[0], free_bytes) if free_bytes is not None else 1
        by_layers = is_measured_by_layers(graph.network, ladder[0], free_bytes)
        if by_layers:
            say(f"{graph.name} does not fit here: measuring one layer of it at a time")
            ladder = ladder[:1]
        if kernels is None and (torch_device != "cpu" or parts > 1 or by_layers):
            kernels = {}  # what there is to choose from is the CPU's, and is tried on whole maps
        if kernels is None:
            say(f"choosing kernels for {graph.name}")
            samples = max([n for n in ladder if n <= _KERNEL_SAMPLES] or [ladder[0]])
            kernels = choose_kernels(graph, samples, seconds=seconds * _KERNELS, training=training).kernels
        layers = _Layers(graph, kernels, torch.device(torch_device), training, alone, by_layers=by_layers)
        left = seconds - (time.perf_counter() - start)
        if parts > 1:
            layers.parts = _quick_parts(layers, ladder[0], parts, left / (repeats + 2))
            say(f"{graph.name} does not fit here: measuring one of {layers.parts} bands of it")
            ladder = ladder[:1]
        passes, peaks = _climb(layers, ladder, left, repeats, say)
        profile = _profile(graph, passes, peaks, kernels, place.device, identify().text)
        copies = measure_host_copies(layers.device)
        return msgspec.structs.replace(
            profile, launch_seconds=layers.launch_seconds(), host_copy_seconds=copies.seconds,
            host_copy_seconds_per_gigabyte=copies.seconds_per_gigabyte,
        )  # fmt: skip


def _check_ladder(ladder: Sequence[int]) -> None:
    if not ladder or ladder[0] < 1 or list(ladder) != sorted(set(ladder)):
        raise BadValue(f"The ladder of batch sizes is {list(ladder)}; it must increase from 1 or more.")


def _check_alone(alone: bool, threads: int, torch_device: str) -> None:
    if alone and (threads != 1 or torch_device != "cpu"):
        raise BadValue(
            f"What {threads} thread(s) on {torch_device} compute cannot be told from what else goes on.",
            hint="Measure with threads=1 on cpu, or leave out alone=True.",
        )


def _quick_parts(layers: _Layers, samples: int, least: int, seconds: float) -> int:
    """Return the fewest bands, at least `least`, of which one takes no longer than `seconds`."""
    possible = possible_parts(layers.graph.network)
    layers.parts = possible[-1]
    timed = layers.run(layers.inputs(samples), samples)
    pass_seconds = sum(timed.forward) + sum(timed.backward)
    return next((parts for parts in possible if parts >= least and pass_seconds <= seconds * parts), possible[-1])


def _climb(
    layers: _Layers, ladder: Sequence[int], seconds: float, repeats: int, say: Progress
) -> tuple[dict[int, list[_Pass]], dict[int, int]]:
    """Return passes and peak bytes by batch size, as far up as time and memory allow."""
    passes: dict[int, list[_Pass]] = {}
    peaks: dict[int, int] = {}
    pass_seconds = 0.0
    start = time.perf_counter()
    below = 0
    for samples in ladder:
        seconds_left = seconds - (time.perf_counter() - start)
        if below:
            growth = samples / below
            # One pass that also counts bytes and warms up, then as many as there is time for.
            affordable = int(seconds_left / (pass_seconds * growth)) - 1
            if affordable < 1 or peaks[below] * growth > _MOST_OF_MEMORY * psutil.virtual_memory().available:
                say(f"the ladder ends at {below} samples")
                break
        else:
            affordable = repeats
        say(f"measuring {samples} samples")
        inputs = layers.inputs(samples)
        peaks[samples] = layers.peak_bytes(inputs, samples)
        began = time.perf_counter()
        passes[samples] = [layers.run(inputs, samples)]
        pass_seconds, below = time.perf_counter() - began, samples
        passes[samples] += [layers.run(inputs, samples) for _ in range(min(repeats, affordable) - 1)]
    _go_round(layers, passes, start + seconds)
    return passes, peaks


def _go_round(layers: _Layers, passes: dict[int, list[_Pass]], end: float) -> None:
    """Measure rung after rung again while there is time: a machine whose speed drifts then drifts on all of them."""
    pass_seconds = {samples: sum(runs[-1].forward) + sum(runs[-1].backward) for samples, runs in passes.items()}
    while min(map(len, passes.values())) < _MOST_REPEATS:
        for samples, runs in passes.items():
            if time.perf_counter() + 1.5 * pass_seconds[samples] > end:
                return
            runs.append(layers.run(layers.inputs(samples), samples))


def _profile(
    graph: Graph,
    passes: dict[int, list[_Pass]],
    peaks: dict[int, int],
    kernels: Mapping[str, Kernel],
    device: str,
    machine: str,
) -> DeviceProfile:
    network = graph.network
    timings = []
    for index, layer in enumerate(network.layers):
        ladder = tuple(
            Timing(
                samples, median(timed.forward[index] for timed in runs), median(timed.backward[index] for timed in runs)
            )
            for samples, runs in passes.items()
        )
        timings.append(LayerTiming(layer.name, ladder))
    return DeviceProfile(
        network=network.name,
        fingerprint=network.fingerprint,
        input=network.input_text,
        granularity=network.granularity,
        device=device,
        source="measured",
        layers=tuple(timings),
        kernels=dict(kernels),
        peak_bytes={str(samples): count for samples, count in peaks.items()},
        machine=machine,
        repeats=min(len(runs) for runs in passes.values()),
    )


class _Layers:
    """A graph's layers as pieces over one set of weights."""

    def __init__(
        self,
        graph: Graph,
        kernels: Mapping[str, Kernel],
        device: torch.device,
        training: bool = True,
        alone: bool = False,
        *,
        by_layers: bool = False,
    ) -> None:
        self.graph, self.device, self.training, self.alone = graph, device, training, alone
        self.parts, self.by_layers = 1, by_layers
        self._launches: tuple[list[float], list[float]] = ([], [])
        """What Python took to launch every layer in the last pass, forward and backward in the layers' order."""
        if by_layers:
            state = borrowed_state(graph)
            tensors = {s.name: state[s.name].to(device).detach().requires_grad_(s.trainable) for s in graph.weights}
            self.weights = Weights(tensors, device)
        else:
            self.weights = Weights.copied(graph, device=device)
            store_weights(graph, self.weights, kernels)
        calls = kernel_calls(graph, kernels)
        self.pieces = [Piece(graph, self.weights, layer.first, layer.last, kernels=calls) for layer in graph.layers]
        last_readers = {name: index for index, piece in enumerate(self.pieces) for name in piece.inputs}
        self._unread_after = [
            [name for name, last in last_readers.items() if last == index and name not in graph.outputs]
            for index in range(len(self.pieces))
        ]

    def inputs(self, samples: int) -> dict[str, torch.Tensor]:
        """Return random inputs, or one band of them where the network is measured in bands."""
        return band_inputs(self.graph, samples, self.device, self.parts)

    def peak_bytes(self, inputs: dict[str, torch.Tensor], samples: int) -> int:
        """Return the most tensor bytes alive at once in a step: weights, inputs, activations, in training gradients. A
        band's are multiplied by the number of bands."""
        self._rest(samples)
        peak = PeakBytes([*self.weights.tensors.values(), *inputs.values()])
        with peak:
            self.run(inputs, samples)
        return peak.most_bytes * self.parts

    def run(self, inputs: dict[str, torch.Tensor], samples: int) -> _Pass:
        """Run one training step without the optimiser, or one inference, with each layer timed; a band's times are
        scaled to the whole."""
        self._rest(samples)
        timed = self._training(inputs, samples) if self.training else self._inference(inputs, samples)
        network = self.graph.network
        return _Pass(
            *(whole_seconds(network, layer_seconds, self.parts) for layer_seconds in (timed.forward, timed.backward))
        )

    def _rest(self, samples: int) -> None:
        if not self.training:
            for piece in self.pieces:
                piece.rest(samples)

    def _training(self, inputs: dict[str, torch.Tensor], samples: int) -> _Pass:
        for tensor in self.weights.tensors.values():
            tensor.grad = None
        if self.by_layers:
            return self._training_by_layers(inputs, samples)
        timed = _Pass()
        clock = layer_clock(self.device, self.alone)
        values, context = dict(inputs), Context(samples=samples)
        entered: list[dict[str, torch.Tensor]] = []
        produced: list[dict[str, torch.Tensor]] = []
        for piece in self.pieces:
            inputs_here = self._entering(piece, values)
            clock.start()
            outputs = piece(inputs_here, context)
            clock.stop()
            entered.append(inputs_here)
            produced.append(outputs)
            values.update({name: tensor.detach() for name, tensor in outputs.items()})
        seeds = {n: torch.ones_like(values[n]) for n in self.graph.outputs if values[n].is_floating_point()}
        del values
        timed.forward = clock.seconds()
        back = layer_clock(self.device, self.alone)
        timed.backward = _backward(entered, produced, seeds, back)
        self._launches = clock.launch_seconds(), back.launch_seconds()[::-1]
        return timed

    def launch_seconds(self) -> tuple[tuple[float, float], ...]:
        """Return what Python takes to launch each layer, forward and backward; empty where it computes them."""
        return tuple(zip(*self._launches)) if any(map(any, self._launches)) else ()

    def _entering(self, piece: Piece, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what enters a layer, detached; a gradient is wanted of what has one in training."""
        entering = {name: values[name].detach() for name in piece.inputs}
        for name, tensor in entering.items():
            if self.graph.network.tensors[name].differentiable:
                tensor.requires_grad_()
        return entering

    def _training_by_layers(self, inputs: dict[str, torch.Tensor], samples: int) -> _Pass:
        """Run each layer forward and at once backward, so that only one keeps what its backward pass needs."""
        forward, backward = layer_clock(self.device, self.alone), layer_clock(self.device, self.alone)
        values, context = dict(inputs), Context(samples=samples)
        for piece, unread in zip(self.pieces, self._unread_after):
            inputs_here = self._entering(piece, values)
            forward.start()
            outputs = piece(inputs_here, context)
            forward.stop()
            gradients = {name: torch.ones_like(made) for name, made in outputs.items() if made.is_floating_point()}
            backward.start()
            backward_piece(inputs_here, outputs, gradients)
            backward.stop()
            values.update({name: tensor.detach() for name, tensor in outputs.items()})
            for name in unread:
                values.pop(name, None)
            for name in piece.weight_names:
                self.weights.tensors[name].grad = None
        return _Pass(forward.seconds(), backward.seconds())

    @torch.no_grad()
    def _inference(self, inputs: dict[str, torch.Tensor], samples: int) -> _Pass:
        clock = layer_clock(self.device, self.alone)
        values, context = dict(inputs), Context(training=False, samples=samples)
        for piece, unread in zip(self.pieces, self._unread_after):
            clock.start()
            outputs = piece(values, context)
            clock.stop()
            values.update(outputs)
            for name in unread:
                del values[name]
        return _Pass(clock.seconds(), [0.0] * len(self.pieces))


def _backward(
    entered: list[dict[str, torch.Tensor]],
    produced: list[dict[str, torch.Tensor]],
    gradients: dict[str, torch.Tensor],
    clock: LayerClock,
) -> list[float]:
    """Return the seconds of every layer's backward pass, in the layers' order. Empties the lists, so that memory falls
    as in training."""
    while produced:
        inputs, outputs = entered.pop(), produced.pop()
        clock.start()
        backward_piece(inputs, outputs, gradients)
        clock.stop()
        for name in outputs:
            gradients.pop(name, None)
    return clock.seconds()[::-1]

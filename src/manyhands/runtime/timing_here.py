"""The timing of a network on this worker's device, for the planner."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from manyhands.executor.optimizers import build, passed_bytes, step_bytes_per_second
from manyhands.executor.update_rate import quick_bytes_per_second
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import DeviceProfile
from manyhands.graph import accelerators
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.planner.split_profile import slowed
from manyhands.profiler.bands import is_measured_by_layers, needed_bytes
from manyhands.profiler.measure import measure_network
from manyhands.profiler.quick import QuickSettings, computing_clock, measure_quickly
from manyhands.profiler.steps import random_state
from manyhands.profiler.this_machine import copy_bytes_per_second
from manyhands.profiler.whole import LEAST_STEPS, scaled_to_steps
from manyhands.runtime.control_messages import Measure, Measured
from manyhands.runtime.gpu_settings import use
from manyhands.runtime.joining import Joining
from manyhands.runtime.memory_kills import free_bytes
from manyhands.runtime.processes import give_back_memory
from manyhands.runtime.received_graph import graph_of

_LAYERS = 0.7
"""The part of a limit of seconds for timing layers one by one; the rest is for whole steps, where some fit in."""
_GPU_SECONDS = 5.0
"""The least limit of measuring quickly on a GPU, which loads every kernel before it runs it for the first time."""


def measured(command: Measure, device: str, joining: Joining) -> Measured:
    """Return the times of a network's layers on this device, measured with made-up weights."""
    graph = graph_of(command.graph, command.network)
    if joining.compute != "cpu":
        use(command.gpu_math)
    if command.is_quick:
        return _measured_quickly(command, graph, device, joining)
    free = _free_bytes(joining.compute)
    by_layers = is_measured_by_layers(command.network, command.ladder[0], free)
    if not by_layers:
        graph.state.update(random_state(graph))
    profile = measure_network(
        graph, ladder=command.ladder, seconds=command.seconds, kernels=command.kernels, device=device,
        torch_device=joining.compute, training=command.training, free_bytes=free,
    )  # fmt: skip
    fits = needed_bytes(command.network, command.ladder[-1]) <= free
    rate = 0.0
    if command.optimizer is not None and command.training and fits:
        optimizer = Optimizer.from_dict(command.optimizer)
        profile, update_seconds = scaled_to_steps(
            graph, profile, command.ladder[-1], lambda weights: _update(optimizer, weights),
            torch_device=joining.compute,
        )  # fmt: skip
        rate = passed_bytes(graph, optimizer) / max(update_seconds, 1e-9)
    if not by_layers:
        rate = rate or step_bytes_per_second(graph, command.optimizer, joining.compute)
    rate = rate or copy_bytes_per_second()
    slowdown = joining.slowdown
    if by_layers:
        give_back_memory()  # the network takes nearly all of this device's memory
    return Measured(command.generation, slowed(profile, slowdown), rate / slowdown)


def _measured_quickly(command: Measure, graph: Graph, device: str, joining: Joining) -> Measured:
    """Return the times of the layers as far as the limit of seconds allows, and the rate of the optimiser's steps."""
    seconds = command.seconds if joining.compute == "cpu" else max(command.seconds, _GPU_SECONDS)
    clock = computing_clock() if command.alone else time.perf_counter
    settings = QuickSettings(_LAYERS * seconds, device, joining.compute, command.alone, clock)
    profile = measure_quickly(graph, command.ladder, command.kernels or {}, settings)
    samples = command.ladder[min(1, len(command.ladder) - 1)]
    step_seconds = sum(sum(profile.layer_seconds(layer, samples)) for layer in range(len(profile.layers)))
    if command.optimizer is not None and (2 + LEAST_STEPS) * step_seconds <= (1 - _LAYERS) * seconds:
        profile = _scaled_quickly(command, graph, profile, samples, joining, (1 - _LAYERS) * seconds)
    rate = 0.0
    if command.optimizer is not None:
        rate = quick_bytes_per_second(graph.network, Optimizer.from_dict(command.optimizer), joining.compute)
    give_back_memory()
    slowdown = joining.slowdown
    return Measured(command.generation, slowed(profile, slowdown), (rate or copy_bytes_per_second()) / slowdown)


def _scaled_quickly(
    command: Measure, graph: Graph, profile: DeviceProfile, samples: int, joining: Joining, seconds: float
) -> DeviceProfile:
    """Return the profile with its layers scaled to whole steps, as a thorough measurement has them."""
    assert command.optimizer is not None
    optimizer = Optimizer.from_dict(command.optimizer)
    graph.state.update(random_state(graph))
    scaled, _ = scaled_to_steps(
        graph, profile, samples, lambda weights: _update(optimizer, weights), torch_device=joining.compute,
        seconds=seconds, alone=command.alone, is_quick=True,
    )  # fmt: skip
    return scaled


def _update(optimizer: Optimizer, weights: Weights) -> Callable[[], None]:
    stepper = build(optimizer, weights.trainable())

    def update() -> None:
        stepper.step()
        stepper.zero()

    return update


def _free_bytes(compute: str) -> int:
    """Return the bytes that this process may still take on the device where it computes."""
    return accelerators.free_bytes(torch.device(compute)) or free_bytes()

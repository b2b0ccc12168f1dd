"""Scales layer times so that they agree with whole training steps.

Layers are timed one by one, with weights that no optimiser touches in between. In training every step finds the weights
written anew, and workers on one machine are all busy all the time. So whole steps are timed too, for a while, and every
layer is scaled by the ratio of the measured seconds to the sum over layers. The spread of the steps is kept too:
devices that wait for each other in every step take as long as the slowest of them. And updates are timed in between:
on their own they would find weights and gradients in the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from manyhands.facts.profile import DeviceProfile, LayerTiming, Timing, spread_of
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls, store_weights
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights
from manyhands.profiler.layer_clocks import CallTimer
from manyhands.profiler.steps import random_inputs

SECONDS = 1.0
LEAST_STEPS = 4
_BOUNDS = (0.5, 3.0)
"""A factor beyond these is an accident, not a property of the machine."""
_MOST_SPREAD = 0.3

Update = Callable[[], None]


def scaled_to_steps(
    graph: Graph,
    profile: DeviceProfile,
    samples: int,
    make_update: Callable[[Weights], Update],
    *,
    torch_device: str = "cpu",
    seconds: float = SECONDS,
    alone: bool = False,
    is_quick: bool = False,
) -> tuple[DeviceProfile, float]:
    """Return the profile with every layer scaled to forward and backward passes of whole steps on `samples` samples,
    and the seconds of an update.

    `make_update` returns the function that updates the weights between two steps. `alone`: what the one thread
    computes counts, not the time for which others pause it. `is_quick`: in so little time other work of the machine
    may go on from the first step to the last but one, so that the least step counts, in place of the median.
    """
    device = torch.device(torch_device)
    weights = Weights.copied(graph, device=device)
    store_weights(graph, weights, profile.kernels)
    piece = Piece(graph, weights, kernels=kernel_calls(graph, profile.kernels))
    inputs, update = random_inputs(graph, samples, device), make_update(weights)
    step_seconds: list[float] = []
    updates: list[float] = []
    end = time.perf_counter() + seconds
    step_timer, update_timer = CallTimer(device, alone), CallTimer(device, alone)

    def passes() -> None:
        outputs = piece(inputs, Context(samples=samples))
        roots = [outputs[name] for name in graph.outputs if outputs[name].requires_grad]
        torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    while len(step_seconds) < LEAST_STEPS or time.perf_counter() < end:
        step_seconds.append(step_timer(passes))
        updates.append(update_timer(update))
    promised = sum(sum(profile.layer_seconds(layer, samples)) for layer in range(len(profile.layers)))
    usual = min(step_seconds[1:]) if is_quick else statistics.median(step_seconds[1:])
    factor = min(max(usual / promised, _BOUNDS[0]), _BOUNDS[1]) if promised else 1.0
    scaled = msgspec.structs.replace(_scaled(profile, factor), spread=min(spread_of(step_seconds[1:]), _MOST_SPREAD))
    return scaled, statistics.median(updates[1:])


def _scaled(profile: DeviceProfile, factor: float) -> DeviceProfile:
    layers = tuple(
        LayerTiming(
            layer.layer,
            tuple(Timing(t.samples, t.forward_seconds * factor, t.backward_seconds * factor) for t in layer.ladder),
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)

"""What a pipeline's planner asks of a profile: seconds by batch size, bytes by layer, the optimiser's state."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from manyhands.executor.optimizers import build, slots
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import DeviceProfile, LayerTiming, Timing
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.peak_bytes import PeakBytes
from manyhands.graph.weights import Weights
from manyhands.models.registry import build as build_model
from manyhands.models.registry import example_batch
from manyhands.profiler.measure import LADDER, measure_network


def test_every_layer_has_seconds_both_ways_and_bytes(tiny: Graph) -> None:
    profile = measure_network(tiny, ladder=(1, 4), threads=1, repeats=1, kernels={})
    network = tiny.network
    for layer, timing in zip(network.layers, profile.layers, strict=True):
        assert [one.samples for one in timing.ladder] == [1, 4]
        assert all(one.forward_seconds > 0 and one.backward_seconds > 0 for one in timing.ladder)
        weights = [network.weights[name] for name in layer.weights]
        assert layer.parameter_bytes == sum(one.bytes for one in weights if not one.buffer)
        made = [name for op in network.ops[layer.first : layer.last] for name in op.outputs]
        assert 0 < layer.activation_bytes <= sum(network.tensors[name].bytes_per_sample for name in made)  # less views
        assert layer.output_bytes == sum(network.tensors[name].bytes_per_sample for name in layer.outputs)
    assert sum(layer.parameter_bytes for layer in network.layers) == network.parameter_bytes


def test_seconds_between_the_rungs_follow_the_curve() -> None:
    """Not linear (ASTEROID Fig. 6): twice the samples need not take twice the time."""
    ladder = (Timing(1, 1.0, 2.0), Timing(4, 1.5, 3.0), Timing(8, 4.0, 9.0))
    profile = DeviceProfile("n", "f", "x", "blocks", "d", "measured", (LayerTiming("a", ladder),))
    assert profile.layer_seconds(0, 2) == pytest.approx((1.0 + 0.5 / 3, 2.0 + 1.0 / 3))
    assert profile.layer_seconds(0, 6) == pytest.approx((2.75, 6.0))
    assert profile.layer_seconds(0, 10) == pytest.approx((5.25, 12.0))


def test_saved_bytes_are_those_autograd_keeps() -> None:
    """Counted over a forward pass of eight samples; weights and the input are there before it."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    x = torch.randn(8, 3, 16, 16)
    graph = capture(module, x, name="convs")
    peak = PeakBytes([x, *module.parameters()])
    with peak:
        before = peak.bytes
        made = module(x)
        kept = peak.bytes - before
    assert made.requires_grad
    saved = sum(layer.saved_bytes for layer in graph.network.layers)
    own_input = graph.network.tensors[graph.network.inputs[0]].bytes_per_sample
    assert kept == 8 * (saved - own_input)


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [(Optimizer("SGD", lr=0.1), 0), (Optimizer("SGD", lr=0.1, momentum=0.9), 1), (Optimizer("Adam", lr=0.1), 2)],
    ids=["SGD", "momentum", "Adam"],
)
def test_an_optimisers_state_is_so_many_times_the_weights(tiny: Graph, optimizer: Optimizer, count: int) -> None:
    weights = Weights.copied(tiny)
    stepper = build(optimizer, weights.trainable())
    for tensor in weights.trainable().values():
        tensor.grad = torch.ones_like(tensor)
    stepper.step()
    held = sum(tensor.nbytes for tensor in stepper.state_tensors() if tensor.dim())
    assert slots(optimizer) == count
    assert held == count * sum(tensor.nbytes for tensor in weights.trainable().values())


@pytest.mark.slow
def test_mobilenetv2_takes_less_than_a_minute() -> None:
    """Kernels are chosen and the default ladder is climbed to its end, on one thread."""
    graph = capture(build_model("mobilenetv2"), example_batch("mobilenetv2", 2), name="mobilenetv2")
    start = time.perf_counter()
    profile = measure_network(graph, threads=1)
    assert time.perf_counter() - start < 60
    assert {timing.samples for timing in profile.layers[0].ladder} <= set(LADDER)
    assert [timing.samples for timing in profile.layers[0].ladder][:3] == [1, 2, 4]

"""Measured profiles: every layer, every rung, as far as the budget goes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from manyhands.facts.errors import BadValue
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.models.registry import build, example_batch
from manyhands.profiler.measure import _Layers, measure_network
from manyhands.profiler.this_machine import identify


@pytest.mark.slow
def test_every_layer_of_tiny_takes_time(tiny: Graph) -> None:
    said: list[str] = []
    profile = measure_network(tiny, ladder=(1, 2, 4), threads=1, seconds=6.0, on_progress=said.append)
    profile.check_matches(tiny.network)
    assert profile.source == "measured"
    assert profile.machine == identify(1).text
    assert profile.repeats >= 3
    for layer in profile.layers:
        assert [timing.samples for timing in layer.ladder] == [1, 2, 4]
        assert all(timing.forward_seconds > 0 and timing.backward_seconds > 0 for timing in layer.ladder)
    assert said[0] == "choosing kernels for tiny"


def test_the_given_kernels_are_used_and_kept(tiny: Graph) -> None:
    kernels = {n.name: Kernel(channels_last=True, onednn=False) for n in tiny.nodes if takes_format(tiny, n)}
    profile = measure_network(tiny, ladder=(2,), kernels=kernels, threads=1)
    assert profile.kernels == kernels


def test_the_ladder_ends_where_time_does(tiny: Graph) -> None:
    profile = measure_network(tiny, ladder=(1, 2, 4), seconds=0.0, threads=1)
    assert [timing.samples for timing in profile.layers[0].ladder] == [1]
    assert profile.kernels == {}


@pytest.mark.parametrize("ladder", [(), (0, 1), (2, 1), (1, 1)])
def test_a_ladder_must_increase(tiny: Graph, ladder: tuple[int, ...]) -> None:
    with pytest.raises(BadValue, match="must increase"):
        measure_network(tiny, ladder=ladder)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("model", ["bilstm", "din"])
def test_networks_of_words_and_tables_are_measured_too(model: str) -> None:
    graph = capture(build(model), example_batch(model, 2, input_shape=(8,)), name=model)
    profile = measure_network(graph, ladder=(1,), kernels={}, threads=1, repeats=1)
    assert sum(one.ladder[0].backward_seconds for one in profile.layers) > 0


def test_weights_of_the_graph_are_left_alone(tiny: Graph) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state.items()}
    measure_network(tiny, ladder=(2,), kernels={}, threads=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state.items())


def test_a_machine_measured_as_if_alone_is_as_fast_however_busy(tiny: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is stopped for a while, as by other processes; that counts only in what passes."""
    real = Piece.__call__

    def stopped(self: Piece, *given: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return real(self, *given, **options)

    monkeypatch.setattr(Piece, "__call__", stopped)
    found = {
        alone: measure_network(tiny, ladder=(1,), kernels={}, threads=1, repeats=1, seconds=0.1, alone=alone)
        for alone in (False, True)
    }
    seconds = {alone: sum(layer.ladder[0].forward_seconds for layer in one.layers) for alone, one in found.items()}
    assert seconds[False] >= 0.02 * len(tiny.network.layers)
    assert seconds[True] < 0.5 * seconds[False]


def test_only_one_thread_can_be_measured_as_if_alone(tiny: Graph) -> None:
    with pytest.raises(BadValue, match=r"2 thread\(s\) on cpu"):
        measure_network(tiny, ladder=(1,), kernels={}, threads=2, alone=True)


@pytest.mark.parametrize("by_layers", [False, True])
def test_frozen_layers_below_all_that_trains_take_no_time_on_the_way_back(by_layers: bool) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    module[:3].requires_grad_(False)
    graph = capture(module, torch.zeros(4, 256), granularity="operators", name="frozen")
    layers = _Layers(graph, {}, torch.device("cpu"), by_layers=by_layers)
    inputs = layers.inputs(256)
    layers.run(inputs, 256)
    timed = layers.run(inputs, 256)
    assert len(timed.backward) == 6
    assert max(timed.backward[:3]) < 0.2 * min(timed.backward[3:])


def test_a_training_steps_peak_holds_weights_gradients_and_activations(tiny: Graph) -> None:
    profile = measure_network(tiny, ladder=(1, 8), kernels={}, threads=1, repeats=1)
    one, eight = profile.peak_bytes["1"], profile.peak_bytes["8"]
    saved = sum(layer.saved_bytes for layer in tiny.layers)
    assert one > tiny.network.parameter_bytes
    assert 0.8 * 7 * saved < eight - one < 3 * 7 * saved

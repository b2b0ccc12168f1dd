"""A network measured within a limit of seconds, whatever it takes to run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from manyhands.executor.update_rate import quick_bytes_per_second
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.models.registry import build, example_batch
from manyhands.profiler import quick
from manyhands.profiler.quick import (
    LEAST_PASSES,
    MOST_PASSES,
    MOST_PAUSED,
    QuickSettings,
    alike,
    computing_clock,
    measure_quickly,
)

LADDER = (1, 4, 2, 8)


class SlowLayers:
    """Every layer takes a second by the clock, forward and backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, 0
        real = Piece.__call__

        def slow(piece: Piece, *given: Any, **options: Any) -> Any:
            self.now += 1.0
            self.runs += 1
            return real(piece, *given, **options)

        monkeypatch.setattr(Piece, "__call__", slow)

    def __call__(self) -> float:
        return self.now


def test_a_small_network_is_measured_thoroughly(tiny: Graph) -> None:
    profile = measure_quickly(tiny, LADDER, {}, QuickSettings(30.0))
    profile.check_matches(tiny.network)
    assert not profile.is_coarse
    assert LEAST_PASSES <= profile.repeats <= MOST_PASSES
    for layer in profile.layers:
        assert [timing.samples for timing in layer.ladder] == sorted(LADDER)
        assert all(timing.forward_seconds > 0 and timing.backward_seconds > 0 for timing in layer.ladder)


@pytest.mark.parametrize("limit", [0.0, 1.0, 3.0, 7.0, 20.0])
def test_no_layer_is_begun_after_the_limit(tiny: Graph, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowLayers(monkeypatch)
    profile = measure_quickly(tiny, LADDER, {}, QuickSettings(limit, clock=clock))
    assert clock.runs <= max(1, limit) + 1, "the second size is begun too"
    assert profile.is_coarse
    for layer in profile.layers:
        assert all(timing.forward_seconds > 0 and timing.backward_seconds > 0 for timing in layer.ladder)


@pytest.mark.slow
@pytest.mark.quick("bilstm")
@pytest.mark.parametrize("model", ["mobilenetv2", "bilstm"])
def test_layers_that_were_not_reached_are_estimated_at_the_rate_of_the_others(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"bilstm": (8,), "mobilenetv2": (3, 64, 64)}[model]
    graph = capture(build(model), example_batch(model, 2, input_shape=shape), name=model)
    whole = measure_quickly(graph, (2,), {}, QuickSettings(60.0, alone=True))
    clock = SlowLayers(monkeypatch)
    part = measure_quickly(graph, (2,), {}, QuickSettings(len(graph.layers) / 2, clock=clock, alone=True))
    total, guessed = (
        sum(sum(one.layer_seconds(layer, 2)) for layer in range(len(one.layers))) for one in (whole, part)
    )
    assert total / 8 < guessed < total * 8


def test_layers_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU()) for _ in range(5)]
    wider = [torch.nn.Sequential(torch.nn.Conv2d(8, 9, 3, padding=1), torch.nn.ReLU())]
    graph = capture(torch.nn.Sequential(*blocks, *wider), torch.zeros(2, 8, 8, 8), name="alike")
    first = alike(graph)
    assert first[0] == 0, "its input has no gradient"
    assert first[1:5] == [1, 1, 1, 1]
    assert first[5] == 5
    clock = SlowLayers(monkeypatch)
    profile = measure_quickly(graph, (1,), {}, QuickSettings(1000.0, clock=clock))
    assert clock.runs == 3 * MOST_PASSES
    assert profile.layers[1].ladder == profile.layers[4].ladder


def test_other_work_of_the_machine_does_not_count(tiny: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Piece.__call__

    def stopped(self: Piece, *given: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return real(self, *given, **options)

    monkeypatch.setattr(Piece, "__call__", stopped)
    found = {alone: measure_quickly(tiny, (1,), {}, QuickSettings(0.2, alone=alone)) for alone in (False, True)}
    seconds = {alone: sum(layer.ladder[0].forward_seconds for layer in one.layers) for alone, one in found.items()}
    assert seconds[False] >= 0.01 * len(tiny.network.layers)
    assert seconds[True] < 0.5 * seconds[False]


@pytest.mark.parametrize("part", [1.0, 0.5, 0.1])
def test_the_limit_counts_what_a_paused_thread_computes(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real, computed = 100.0, 7.0

    class Time:
        perf_counter = staticmethod(lambda: real)
        thread_time = staticmethod(lambda: computed)

    monkeypatch.setattr(quick, "time", Time)
    clock = computing_clock()
    assert clock() == 0.0
    real, computed = real + 8.0, computed + 8.0 * part
    assert clock() == pytest.approx(8.0 * max(part, 1 / MOST_PAUSED))


def test_a_paused_worker_still_passes_over_a_whole_share(tiny: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others' work a second of the clock is a tenth of a second of computing."""
    real = Piece.__call__

    def paused(self: Piece, *given: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return real(self, *given, **options)

    monkeypatch.setattr(Piece, "__call__", paused)
    limit = 0.05 * len(tiny.network.layers)
    by_clock = measure_quickly(tiny, (1, 4), {}, QuickSettings(0.9 * limit, alone=True))
    by_computing = measure_quickly(tiny, (1, 4), {}, QuickSettings(0.9 * limit, alone=True, clock=computing_clock()))
    assert [timing.samples for timing in by_clock.layers[0].ladder] == [1]
    assert [timing.samples for timing in by_computing.layers[0].ladder] == [1, 4]


def test_weights_of_the_graph_are_left_alone(tiny: Graph) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state.items()}
    measure_quickly(tiny, (1,), {}, QuickSettings(0.1))
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state.items())


def test_the_rate_of_updates(tiny: Graph) -> None:
    assert quick_bytes_per_second(tiny.network, Optimizer("Adam", lr=1e-3)) > 1e6
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    graph = capture(frozen, torch.zeros(2, 3), name="frozen")
    assert quick_bytes_per_second(graph.network, Optimizer("SGD", lr=1e-3)) == 0.0

"""Layer times scaled to whole steps."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch

from manyhands.facts.profile import LayerTiming, Timing
from manyhands.graph.capture import capture
from manyhands.models.registry import build, example_batch
from manyhands.profiler.measure import measure_network
from manyhands.profiler.whole import scaled_to_steps


@pytest.mark.slow
def test_every_layer_is_scaled_alike_to_what_steps_take() -> None:
    graph = capture(build("tiny"), example_batch("tiny", 4), name="tiny")
    measured = measure_network(graph, ladder=(4, 8), seconds=30, kernels={}, threads=1)
    updates = 0

    def make_update(weights: object) -> object:
        def update() -> None:
            nonlocal updates
            updates += 1
            time.sleep(0.002)

        return update

    torch.set_num_threads(1)
    scaled, update_seconds = scaled_to_steps(graph, measured, 8, make_update, seconds=0.3)  # type: ignore[arg-type]
    assert updates >= 4
    assert 0.002 <= update_seconds < 0.02
    factors = {
        round(a.ladder[rung].forward_seconds / b.ladder[rung].forward_seconds, 6)
        for a, b in zip(scaled.layers, measured.layers)
        for rung in (0, 1)
    }
    assert len(factors) == 1


def test_an_absurd_factor_is_bounded() -> None:
    graph = capture(build("tiny"), example_batch("tiny", 4), name="tiny")
    measured = measure_network(graph, ladder=(4,), seconds=30, kernels={}, threads=1)
    absurd = msgspec.structs.replace(
        measured, layers=tuple(LayerTiming(layer.layer, (Timing(4, 100.0, 100.0),)) for layer in measured.layers)
    )
    scaled, _ = scaled_to_steps(graph, absurd, 4, lambda weights: lambda: None, seconds=0.05)
    assert scaled.layers[0].ladder[0].forward_seconds == pytest.approx(50.0)

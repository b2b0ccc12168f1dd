"""Weights that a stage lays out for its kernels once: the same answers for every way of sharing, the same bytes."""

from __future__ import annotations

import pytest
import torch

from channel_networks import Decoupled, settled
from harness import relative, run
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.profile import Kernel
from manyhands.graph.capture import capture
from manyhands.graph.convolution_kernels import takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import packable
from manyhands.graph.tape import outputs_of

SAMPLES, BATCHES = 4, 2


def plan_called(kind: str, graph: Graph) -> Plan:
    layers = len(graph.network.layers)
    cut = next(n for n, layer in enumerate(graph.network.layers) if "depthwise" in layer.name)
    stages = {
        "single": (Stage((0, layers), ("a",)),),
        "samples": (Stage((0, layers), ("a", "b"), BySamples((3, 1))),),
        "pipeline": (Stage((0, cut), ("a",)), Stage((cut, layers), ("b",))),
        "tiles": (Stage((0, cut), ("a", "b"), ByTiles((1, 1))), Stage((cut, layers), ("b",))),
        "channels": (Stage((0, layers), ("a", "b"), ByChannels((3, 1))),),
    }
    return Plan(graph.network.name, SAMPLES, stages[kind], order="stream")


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("kind", ["single", "samples", "pipeline", "tiles", "channels"])
def test_packed_weights_answer_alike(kind: str) -> None:
    model = settled(Decoupled().double()).float().eval()
    graph = capture(model, torch.zeros(2, 3, 8, 8), granularity="operators")
    plan = plan_called(kind, graph)
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(SAMPLES, 3, 8, 8, generator=generator), None) for _ in range(BATCHES)]
    peaks = {}
    for packed in (False, True):
        choice = {
            node.name: Kernel(channels_last=True, packed=packed) for node in graph.nodes if takes_format(graph, node)
        }
        ran = run(
            graph, plan, batches, kernels=dict.fromkeys(plan.devices, choice), stored=choice, memory_step=BATCHES - 1
        )
        ran.assert_as_planned(BATCHES)
        for (given, _), outputs in zip(batches, ran.outputs, strict=True):
            with torch.no_grad():
                assert relative(outputs_of(graph, outputs), model(given)) <= 1e-5
        held = {name for own in ran.weights.values() for name, tensor in own.items() if tensor.is_mkldnn}
        expected = {node.arguments[1].name for node in graph.nodes if node.name in packable(graph)} if packed else set()
        assert held == expected
        peaks[packed] = {device: log.peak_bytes for device, log in ran.logs.items()}
    assert peaks[True] == peaks[False]  # one in place of the other

"""Stages shared by channels (DECNN §3.2), executed: what one device answers, each device with its own weights only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from channel_networks import Drawn, Mixed, decoupled, graph_of, settled
from harness import Ran, relative, run
from manyhands.executor.channels import empty_like
from manyhands.executor.local_graph import LocalGraph
from manyhands.facts.boxes import cut_points
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.graph.tape import outputs_of
from manyhands.graph.weights import Weights
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.sharing import geometry_of

SAMPLES = 3
BATCHES = 2


def inputs(side: int = 8) -> list[tuple[torch.Tensor, None]]:
    torch.manual_seed(5)
    return [(torch.randn(SAMPLES, 3, side, side, dtype=torch.float64), None) for _ in range(BATCHES)]


def by_channels(graph: Graph, groups: tuple[int, ...], **share: Any) -> Plan:
    devices = tuple(f"d{number}" for number in range(len(groups)))
    stage = Stage((0, len(graph.network.layers)), devices, ByChannels(groups, **share))
    return Plan(graph.network.name, SAMPLES, (stage,), order="stream")


def assert_answers(model: nn.Module, graph: Graph, plan: Plan, tolerance: float = 1e-12) -> Ran:
    """What the model answers, done as planned: bytes between devices, operators, elements."""
    batches = inputs(graph.inputs[0].shape[-1])
    ran = run(graph, plan, batches)
    ran.assert_as_planned(len(batches))
    for (given_, _), outputs in zip(batches, ran.outputs):
        with torch.no_grad():
            expected = model(given_)
        got = outputs_of(graph, outputs)
        pairs = zip(got, expected) if isinstance(expected, tuple) else [(got, expected)]
        for one, other in pairs:
            assert relative(one, other) <= tolerance
    return ran


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ((1, 1), {}),
        ((1, 1, 1, 1), {}),
        ((3, 1), {}),
        ((1, 2, 1), {"input_based": ()}),
        ((2, 2), {"input_based": ("linear",)}),
        ((1, 1, 1, 1), {"everywhere": ("conv2d_3", "linear")}),
        ((1, 2), {}),  # groups are not whole: computed by everybody
        ((1, 1, 1), {"everywhere": ("linear",)}),
    ],
)
def test_a_decoupled_network_answers_as_one_device(groups: tuple[int, ...], share: dict[str, Any]) -> None:
    model, graph = decoupled()
    assert_answers(model, graph, by_channels(graph, groups, **share))


def test_weights_of_other_groups_are_never_on_a_device() -> None:
    model, graph = decoupled()
    ran = assert_answers(model, graph, by_channels(graph, (1, 1, 1, 1)))
    whole = {name: spec.elements for name, spec in graph.network.weights.items() if spec.elements > 1}
    held = {device: {n: t.numel() for n, t in own.items() if n in whole} for device, own in ran.weights.items()}
    for name, elements in whole.items():
        assert sum(own[name] for own in held.values()) == elements, name
        assert max(own[name] for own in held.values()) <= elements // 4 + max(1, elements // 10), name  # 10 classes


def test_in_single_precision() -> None:
    model, _ = decoupled()
    single = type(model)()
    single.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in model.state_dict().items()})
    graph = graph_of_single(single.eval())
    batches = [(given_.float(), None) for given_, _ in inputs()]
    ran = run(graph, by_channels(graph, (1, 1)), batches)
    ran.assert_as_planned(BATCHES)
    for (given_, _), outputs in zip(batches, ran.outputs):
        with torch.no_grad():
            assert relative(outputs_of(graph, outputs), single(given_)) <= 1e-5


def graph_of_single(model: nn.Module) -> Graph:
    from manyhands.graph.capture import capture

    return capture(model, torch.zeros(2, 3, 8, 8), granularity="operators")


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 1, 1)])
def test_any_network_can_be_shared(groups: tuple[int, ...]) -> None:
    model = settled(Mixed())
    assert_answers(model, graph := graph_of(model, 13), by_channels(graph, groups))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_drawn_networks_and_shares(data: st.DataObject) -> None:
    kinds = [
        "grouped",
        "dense",
        "depthwise",
        "norm",
        "group norm",
        "pool",
        "shuffle",
        "dealt",
        "residual",
        "concatenate",
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    convolution_groups = data.draw(st.sampled_from((1, 2, 4)))
    width = convolution_groups**2 * data.draw(st.integers(1, 3))
    model = settled(Drawn(chosen, width, convolution_groups, classes=data.draw(st.integers(1, 7))))
    graph = graph_of(model)
    groups = tuple(data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4)))
    dense = [op.name for op in graph.network.ops if op.channels == "dense"]
    some = st.lists(st.sampled_from(dense), unique=True).map(tuple)
    share = {"input_based": data.draw(st.none() | some), "everywhere": data.draw(some)}
    assert_answers(model, graph, by_channels(graph, groups, **share))


class Sliced(nn.Module):
    """Slices along channels, which devices that have some of them cannot take: of every second one, and of the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([x[:, 1::2], x[:, ::2]], 1)
        return self.last(torch.cat([x[:, 1:], torch.relu(x[:, :1])], 1)).mean((2, 3))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1)])
def test_slices_along_channels(width: int, groups: tuple[int, ...]) -> None:
    graph = graph_of(model := settled(Sliced(width)))
    assert_answers(model, graph, by_channels(graph, groups))


def test_next_to_other_shares() -> None:
    """Tiles feed channels, channels feed samples, on the same devices and on others."""
    model, graph = decoupled()
    network = graph.network
    cuts = [0, network.find_layer("grouped"), network.find_layer("hidden"), len(network.layers)]
    two, others = ("d0", "d1"), ("d2", "d3")
    shares = [ByTiles((1, 1)), ByChannels((1, 3)), BySamples((1, 2))]
    for devices in ((two, two, two), (two, others, two), (others, two, ("d1", "d4"))):
        stages = tuple(Stage((a, b), names, share) for (a, b), names, share in zip(pairwise(cuts), devices, shares))
        assert_answers(model, graph, Plan(network.name, SAMPLES, stages, order="stream"))
    fully_connected = (Stage((0, cuts[2]), two, ByTiles((2, 1))), Stage((cuts[2], cuts[3]), two, ByChannels((1, 1))))
    ran = assert_answers(model, graph, Plan(network.name, SAMPLES, fully_connected, order="stream"))
    assert all(log.sent_kinds["partial"] for log in ran.logs.values())  # as MoDNN and Coates are run in the paper


def test_what_nobody_reads_any_more_is_let_go() -> None:
    _, graph = decoupled()
    plan = by_channels(graph, (1, 1, 1, 1))
    ran = run(graph, plan, inputs(), memory_step=1)
    ran.raise_first()
    alone = run(graph, Plan(graph.network.name, SAMPLES, (Stage(plan.stages[0].layers, ("d0",)),), order="stream"),
                inputs(), memory_step=1)  # fmt: skip
    whole = alone.logs["d0"].peak_bytes
    for log in ran.logs.values():
        assert 0 < log.peak_bytes < 0.45 * whole
    weights = {device: sum(t.numel() for t in own.values()) for device, own in ran.weights.items()}
    quarter = sum(spec.elements for spec in graph.network.weights.values()) / 4
    assert max(weights.values()) < 1.1 * quarter


def test_shares_are_by_groups() -> None:
    _, graph = decoupled()
    plan = by_channels(graph, (3, 1))
    ran = run(graph, plan, inputs())
    shares = [log.elements for log in ran.logs.values()]
    assert shares[0] == pytest.approx(3 * shares[1], rel=0.01)
    assert cut_points(16, (3, 1)) == (0, 12, 16)


@pytest.mark.parametrize("kernel", [Kernel(channels_last=True), Kernel(onednn=False)], ids=str)
def test_by_kernels_of_ones_choice(kernel: Kernel) -> None:
    """Also those that read a convolution's groups when they are made."""
    model, graph = decoupled()
    chosen = {op.name: kernel for op in graph.network.ops if op.target.startswith("aten.conv")}
    plan = by_channels(graph, (3, 1))
    ran = run(graph, plan, inputs(), kernels=dict.fromkeys(plan.devices, chosen))
    ran.assert_as_planned(BATCHES)
    for (given_, _), outputs in zip(inputs(), ran.outputs):
        with torch.no_grad():
            assert relative(outputs_of(graph, outputs), model(given_)) <= 1e-12


def test_activations_are_made_in_place_and_formats_are_kept() -> None:
    """As on one device: a device's own part of the network is no slower for being a part."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(inplace=True)]
    graph = graph_of(settled(nn.Sequential(*layers, nn.Conv2d(8, 8, 1, groups=4))))
    plan = by_channels(graph, (2, 2))
    geometry = geometry_of(plan, 0, graph.network)
    assert isinstance(geometry, ChannelGeometry)
    local = LocalGraph(graph, geometry, "d0")
    piece = Piece(local.graph, Weights.copied(graph), *local.range(geometry.first, geometry.last))
    calls = [str(step.call) for step in piece.steps(training=False) if step.node.in_place]
    assert calls == ["aten.relu_.default"] * 2
    held = torch.empty(1, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert empty_like(held, (1, 6, 3, 3)).is_contiguous(memory_format=torch.channels_last)
    assert empty_like(held.contiguous(), (1, 6, 3, 3)).is_contiguous()
    assert empty_like(held[:, :, 0, 0], (1, 6)).shape == (1, 6)

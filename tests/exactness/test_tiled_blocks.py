"""Tiles of networks with computed weights, maps in parts, padding by own elements and places as channels: trained as on
one device, to 1e-10, and so by samples and in pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from harness import relative, run
from manyhands.facts.cluster import Cluster
from manyhands.facts.plan import BySamples, ByTiles, Single, Stage
from manyhands.facts.profile import Kernel
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.plans.planning import plan as make_plan
from manyhands.schedule.tileable import maps_of
from tiled_cases import Case, small_case, unwritten_memory_noticed
from tiled_networks import Shape, same

SAMPLES = 4


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised, and scaled by a gain: NFNet's; without a gain BiT's."""

    def __init__(self, *arguments: int, gain: bool = True, padding: int = 1, groups: int = 1) -> None:
        super().__init__(*arguments, padding=padding, groups=groups)
        self.gain = nn.Parameter(torch.rand(self.out_channels) + 0.5) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = None if self.gain is None else self.gain * 0.7
        weight = functional.batch_norm(rows, None, None, gain, training=True).reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Centred(nn.ConvTranspose2d):
    """A transposed convolution with a computed weight and bias."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert self.bias is not None
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv_transpose2d(x, weight / (weight.std() + 0.1), self.bias * 2, self.stride, 1)


class Gated(nn.Module):
    """A norm with a computed weight, then a part of the channels as a gate for another."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(9) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.batch_norm(x, None, None, torch.exp(self.factor), self.factor, training=True)
        kept, _, gate = x.chunk(3, 1)
        return kept * torch.sigmoid(gate)


class Hierarchical(nn.Module):
    """Res2Net's block: each part of the channels is convolved with what was made of the part before; one is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm2d(9), same(3, 3), nn.Conv2d(3, 3, (1, 5), padding=(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.split(torch.relu(self.norm(x)), 3, 1)
        made = self.first(first)
        return x + torch.cat([made, self.second(made + second), third], 1)


class ChannelAttention(nn.Module):
    """ECA: a convolution along the channels of what is pooled, spread over the map."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.mix(x.mean((2, 3)).view(x.shape[0], 1, -1))).view(x.shape[0], -1, 1, 1)
        return x * gate.expand_as(x)


class Blurred(nn.Module):
    """Blur pooling: reflected at the edges, and one binomial kernel for all channels, kept as a buffer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([0.25, 0.5, 0.25])
        self.register_buffer("kernel", (row[:, None] * row).expand(channels, 1, 3, 3).clone())
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(functional.pad(x, (1,) * 4, "reflect"), self.kernel, stride=2, groups=self.channels)


class Padded(nn.Module):
    def __init__(self, *amounts: int, mode: str) -> None:
        super().__init__()
        self.amounts, self.mode = list(amounts), mode

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x, self.amounts, self.mode)


class Focus(nn.Module):
    """Every second row and column, four times, one after the other along the channels: YOLO's first layer."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return torch.cat(parts, 1)


class SpaceToDepth(nn.Module):
    """TResNet's first layer: 2x2 places as channels, place by place."""

    def forward(self, x: Tensor) -> Tensor:
        samples, channels, rows, columns = x.shape
        blocks = x.view(samples, channels, rows // 2, 2, columns // 2, 2).permute(0, 3, 5, 1, 2, 4).contiguous()
        return blocks.view(samples, channels * 4, rows // 2, columns // 2)


class Selective(nn.Module):
    """A selective kernel: two paths stacked, added up and pooled, and weighted by a softmax over the paths."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.wide = same(channels, channels), same(channels, channels, dilation=2)
        self.choose = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        paths = torch.stack([self.narrow(x), self.wide(x)], 1)
        pooled = paths.sum(1).mean((2, 3), keepdim=True)
        shares = torch.softmax(self.choose(pooled).view(x.shape[0], 2, x.shape[1], 1, 1), 1)
        return (paths * shares).sum(1)


class Shuffled(nn.Module):
    """ShuffleNet's unit: half of the channels passed, then dealt out; and an attention of places by their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Sequential(same(3, 3), nn.BatchNorm2d(3)), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        x = torch.cat([first, self.inner(second)], 1)
        samples, channels, rows, columns = x.shape
        x = (
            x.view(samples, 2, channels // 2, rows, columns)
            .transpose(1, 2)
            .contiguous()
            .view(samples, -1, rows, columns)
        )
        places = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.gate(places))


def standardised() -> nn.Module:
    return nn.Sequential(
        Standardised(3, 4, 3, 2), nn.ReLU(), Standardised(4, 6, 3, gain=False, groups=2), nn.BatchNorm2d(6), nn.SiLU(),
        Centred(6, 4, 3, 2), Standardised(4, 2, 2, padding=0),
    )  # fmt: skip


def parametrised() -> nn.Module:
    """Weight norm, and spectral norm with the vectors that it follows from step to step."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 4, (3, 5), padding=(1, 2))), nn.Tanh(),
        parametrizations.spectral_norm(nn.Conv2d(4, 3, 3)),
    )  # fmt: skip


def in_parts() -> nn.Module:
    return nn.Sequential(same(3, 9), Hierarchical(), ChannelAttention(), Gated(), same(3, 9), Hierarchical())


def in_groups() -> nn.Module:
    return nn.Sequential(same(3, 6), Shuffled(), nn.BatchNorm2d(6), Selective(6), nn.Conv2d(6, 2, 3, 2))


def at_edges() -> nn.Module:
    return nn.Sequential(
        same(3, 4), nn.ReLU(), Blurred(4), Padded(1, 2, 3, 1, mode="reflect"), nn.Conv2d(4, 3, 3, 2),
        Padded(2, 0, 1, 2, mode="replicate"), same(3, 2),
    )  # fmt: skip


def places_as_channels() -> nn.Module:
    return nn.Sequential(same(3, 2), Focus(), same(8, 3), SpaceToDepth(), nn.Conv2d(12, 3, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "standardised": (standardised, (3, 17, 23)),
    "parametrised": (parametrised, (3, 9, 11)),
    "in parts": (in_parts, (3, 11, 13)),
    "in groups": (in_groups, (3, 11, 13)),
    "at edges": (at_edges, (3, 17, 22)),
    "places as channels": (places_as_channels, (3, 20, 24)),
}
SHARES: dict[str, ByTiles] = {
    "rows": ByTiles((1, 2)),
    "columns, groups each way": ByTiles((1,), (3, 1), (0,), (0,)),
    "grid": ByTiles((2, 1, 1), (1, 2)),
    "one group forward": ByTiles((1, 3), (1, 1), (0,)),
    "one group backward": ByTiles((2, 1, 3), (1,), None, (0,)),
    "many": ByTiles((1, 1, 1, 1, 1)),
}


def case_named(name: str) -> Case:
    return small_case(*NETWORKS[name], SAMPLES)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.quick("standardised-rows-1")
def test_by_tiles(name: str, share: str, micro_batches: int) -> None:
    case = case_named(name)
    maps, obstacle = maps_of(case.network, 0, len(case.network.ops))
    assert obstacle is None
    assert maps.issuperset(case.network.outputs)
    case.check(case.plan(case.tiled(SHARES[share]), micro_batches=micro_batches))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.quick("standardised", "parametrised")
def test_by_samples_and_in_pipelines(name: str) -> None:
    case = case_named(name)
    half = case.count // 2
    case.check(case.plan(Stage((0, case.count), ("a", "b"), BySamples((3, 1)))))
    first, second = Stage((0, half), ("a",), Single()), Stage((half, case.count), ("b",), Single())
    case.check(case.plan(first, second, micro_batches=2, order="1f1b"))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.quick("standardised")
def test_at_rest(name: str) -> None:
    case = case_named(name)
    ran = run(case.graph, case.plan(case.tiled(SHARES["grid"]), order="stream"), case.batches, seed=7)
    ran.assert_as_planned(len(case.batches))
    piece = Piece(case.graph, Weights.copied(case.graph))
    for outputs, (x, _) in zip(ran.outputs, case.batches, strict=True):
        with torch.no_grad():
            whole = piece(bind_inputs(case.graph, x), Context(training=False))
        for output in case.graph.outputs:
            assert relative(outputs[output], whole[output]) <= 1e-10


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kernel", [Kernel(channels_last=True), Kernel(onednn=False)])
def test_any_kernel_takes_a_computed_weight(kernel: Kernel) -> None:
    case = case_named("standardised")
    plan = case.plan(case.tiled(SHARES["rows"]))
    kernels = {node.name: kernel for node in case.graph.nodes if "conv" in node.target}
    case.check(plan, kernels=dict.fromkeys(plan.devices, kernels))


def test_tiles_are_planned_where_weights_are_computed_first() -> None:
    case = case_named("standardised")
    assert not case.network.ops[0].inputs
    made = make_plan(case.network, Cluster.local(2, memory_bytes=10**10), batch_size=SAMPLES, strategy="tiles").plan
    assert isinstance(made.stages[0].share, ByTiles)
    case.check(made)


def test_weights_are_computed_whole_on_every_tile() -> None:
    """What tiles repeat is known: to the planner as work, to the memory model as bytes."""
    case = case_named("standardised")
    plan = case.plan(case.tiled(SHARES["rows"]))
    ran = case.check(plan)
    for device, log in ran.executors.items():
        geometry = log.schedule.lowering.work[device].geometries[0]
        fractions = dict(zip((op.name for op in geometry.ops), geometry.fractions(device)))
        assert {fractions[op.name] for op in geometry.ops if op.is_fixed} == {1.0}
        assert any(0 < fractions[op.name] < 1 for op in geometry.ops)

"""Training by tiles of volumes and video is training on one device: maps with a depth, cut in any direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drawn_plans import drawn_groups
from harness import relative, run
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import ByTiles, Stage
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.tileable import tileable_layers
from tiled_cases import DRAWN, Case, case_of, small_case, tail_of, tiled, unwritten_memory_noticed

VOLUMES = ((7, 9, 6), (8, 6, 11), (5, 12, 8))
GRIDS: tuple[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]], ...] = (
    ((1,), (1,), (2, 1)), ((1, 1), (1,), (1,)), ((2, 1), (1,), (1, 1)), ((1, 2), (1, 1), (1,)), ((1, 1, 1), (1,), (1,)),
    ((1, 1), (2, 1), (1, 1)), ((1,), (1, 1), (1, 2)),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


def same(inputs: int, outputs: int, kernel: int | tuple[int, ...] = 3, **options: Any) -> nn.Conv3d:
    sizes = (kernel,) * 3 if isinstance(kernel, int) else kernel
    return nn.Conv3d(inputs, outputs, sizes, padding=tuple(size // 2 for size in sizes), **options)


class UNet(nn.Module):
    """Down, up and across: a small one for volumes."""

    def __init__(self, up: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.down = nn.Sequential(same(2, 4), nn.BatchNorm3d(4), nn.LeakyReLU(0.1))
        self.deep = nn.Sequential(nn.MaxPool3d(2), same(4, 6), nn.InstanceNorm3d(6, affine=True), nn.ELU())
        self.up, self.out = up(), same(4 + 3, 2, (1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        up = self.up(self.deep(wide))
        depth, rows, columns = (a - b for a, b in zip(wide.shape[2:], up.shape[2:]))
        out: Tensor = self.out(torch.cat((wide, F.pad(up, (0, columns, 0, rows, 0, depth))), 1))
        return out


def unet() -> nn.Module:
    return UNet(lambda: nn.ConvTranspose3d(6, 3, 2, 2))


class Factored(nn.Module):
    """A convolution over rows and columns, then one over the depth, as R(2+1)D has them, around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.flat, self.norm = same(channels, 3, (1, 3, 3), bias=False), nn.BatchNorm3d(3)
        self.deep = same(3, channels, (3, 1, 1), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.deep(F.relu(self.norm(self.flat(x))))


class Gate(nn.Module):
    """Squeeze and excitation of volumes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(x.mean((2, 3, 4))))
        return x * gate.view(*gate.shape, 1, 1, 1)


class ChannelsLast(nn.Module):
    """A layer norm over the channels of volumes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.permute(0, 2, 3, 4, 1))
        return y.permute(0, 4, 1, 2, 3)


class Standardised(nn.Conv3d):
    """A convolution whose weight is standardised, and whose bias is computed."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        rows = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv3d(x, rows.reshape_as(self.weight), self.bias * 2, self.stride, self.padding)


class InParts(nn.Module):
    """Channels in parts, one of them a gate; the rest every second place along the depth, twice."""

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = x.split((3, 1), 1)
        kept = kept * torch.sigmoid(gate).expand_as(kept)
        kept = kept[:, :, 1::2]
        return torch.stack((kept, -kept), 1).sum(1) + torch.cat((kept.amax(1, True), kept[:, ::2]), 1)


def standardised() -> nn.Module:
    return nn.Sequential(
        Standardised(2, 4, 3, 1, 1), nn.ReLU(), InParts(), nn.ReflectionPad3d((1, 2, 0, 1, 1, 1)),
        Standardised(3, 4, (3, 1, 3), (1, 2, 1)), InParts(), nn.ReplicationPad3d(1), nn.Conv3d(3, 2, 2),
    )  # fmt: skip


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: same(4, 4), "wide": lambda: same(4, 4, (5, 3, 1)), "dilated": lambda: nn.Conv3d(
        4, 4, 3, padding=2, dilation=2, groups=2), "strided": lambda: nn.Conv3d(4, 4, 3, (1, 2, 2), 1),
    "transposed": lambda: nn.ConvTranspose3d(4, 4, 3, 1, 1), "factored": lambda: Factored(4), "gate": lambda: Gate(4),
    "batch norm": lambda: nn.BatchNorm3d(4), "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm3d(4), "layer norm": lambda: ChannelsLast(4), "relu": nn.ReLU,
    "gelu": nn.GELU, "dropout": lambda: nn.Dropout3d(0.3), "slopes": lambda: nn.PReLU(4),
    "largest": lambda: nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)), "mean": lambda: nn.AvgPool3d(3, 1, 1),
    "larger": lambda: nn.Upsample(scale_factor=(1, 2, 1), mode="trilinear"),
    "by fractions": lambda: nn.Upsample(scale_factor=(1.5, 1, 1.3)),
    "adapted": lambda: nn.AdaptiveAvgPool3d((4, 5, 3)), "padded": lambda: nn.ConstantPad3d((1, 0, 0, 1, 2, 0), 0.5),
}  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    names = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=4))
    return nn.Sequential(same(2, 4), *(BLOCKS[name]() for name in names))


@pytest.mark.slow
@settings(DRAWN, max_examples=5)
@given(st.data())
def test_any_network_over_volumes_by_any_tiles(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.sampled_from(VOLUMES)))
    case = case_of(data.draw(networks()), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    for _ in range(2):
        depths, rows, columns = data.draw(st.sampled_from(GRIDS))
        forward, backward = (data.draw(drawn_groups(case.network, 0, case.count)) for _ in range(2))
        early = data.draw(st.sampled_from((0, 0, 1))) * tuple(range(case.count))
        share = ByTiles(rows, columns, forward, backward, early, depths)
        case.check(case.plan(case.tiled(share), micro_batches=data.draw(st.sampled_from((1, 2)))))


@tiled("volumes")
@pytest.mark.quick(every=10)
@pytest.mark.parametrize("groups", [(None, None), ((0,), (0,)), (None, (0, 4))], ids=str)
@pytest.mark.parametrize("sizes", [((2, 1), (1,), (1, 1)), ((1, 1), (1, 2), (1,)), ((1,), (1, 2), (2, 1))], ids=str)
def test_a_u_net_over_volumes(sizes: Any, groups: Any) -> None:
    case = small_case(unet, (2, 9, 8, 10))
    assert tileable_layers(case.network)[0] == case.count
    depths, rows, columns = sizes
    case.check(case.plan(case.tiled(ByTiles(rows, columns, *groups, depths=depths))))


@tiled("volumes")
@pytest.mark.quick(every=6)
@pytest.mark.parametrize("groups", [(None, None), ((0,), (0,)), ((0,), None)], ids=str)
@pytest.mark.parametrize("sizes", [((2, 1), (1,), (1, 1)), ((1,), (1, 2), (2, 1))], ids=str)
def test_computed_weights_and_parts_of_volumes(sizes: Any, groups: Any) -> None:
    case = small_case(standardised, (2, 9, 8, 10))
    assert tileable_layers(case.network)[0] == case.count
    depths, rows, columns = sizes
    case.check(case.plan(case.tiled(ByTiles(rows, columns, *groups, depths=depths)), micro_batches=2))


@tiled("volumes")
def test_a_u_net_computed_inside_first() -> None:
    case = small_case(unet, (2, 9, 8, 10))
    ran = case.check(case.plan(case.tiled(ByTiles((1,), (1, 1), depths=(2, 1), interior_first=tuple(range(8))))))
    assert any("interior" in text for text in ran.logs["t0"].actions)


class Classifier(nn.Module):
    """As torchvision's video networks end: the mean of everything, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(same(3, 4, (3, 5, 5), stride=(1, 2, 2)), nn.BatchNorm3d(4), nn.ReLU(), Factored(4))
        self.pool, self.head = nn.AdaptiveAvgPool3d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.maps(x)).flatten(1))
        return out


@pytest.mark.quick(every=2)
@tiled("video")
@pytest.mark.parametrize("cut", [False, True])
def test_a_classifier_of_video(cut: bool) -> None:
    case = small_case(Classifier, (3, 6, 12, 10))
    end = tail_of(case) if cut else case.count
    rest = (Stage((end, case.count), ("t1",)),) if cut else ()
    case.check(case.plan(case.tiled(ByTiles((1, 2), depths=(1, 1)), 0, end), *rest))


@tiled("video")
def test_a_stream_of_video() -> None:
    case = small_case(Classifier, (3, 6, 12, 10))
    plan = case.plan(case.tiled(ByTiles((1,), (1, 1), depths=(2, 1))), order="stream")
    ran = run(case.graph, plan, case.batches, seed=7)
    piece = Piece(case.graph, Weights.copied(case.graph))
    for step, (outputs, (x, _)) in enumerate(zip(ran.outputs, case.batches, strict=True)):
        with torch.no_grad():
            whole = piece(bind_inputs(case.graph, x), Context(False, 7, step, 0, len(x)))
        for name in case.graph.outputs:
            assert relative(outputs[name], whole[name]) <= 1e-10


def pictures() -> Case:
    return small_case(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), (2, 8, 6))


def test_pictures_have_no_depth_to_cut() -> None:
    case = pictures()
    with pytest.raises(BadPlan, match=r"depths is \[1.0, 1.0\], but .* has rows and columns only"):
        case.check(case.plan(case.tiled(ByTiles((1,), depths=(1.0, 1.0)))))


@pytest.mark.slow
def test_a_tile_of_no_depth_is_refused() -> None:
    case = small_case(unet, (2, 9, 8, 10))
    with pytest.raises(BadPlan, match=r"share.depths is \[1.0, 30.0\]: a tile would have 0 of the 9 depths of"):
        case.check(case.plan(case.tiled(ByTiles((1,), depths=(1.0, 30.0)))))

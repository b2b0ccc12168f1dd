"""Training by tiles is training on one device whatever order a network puts its axes in: layer norms and linear layers
between permutes, as in ConvNeXt and MetaFormer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drawn_plans import drawn_tiles
from manyhands.facts.plan import ByTiles, Stage
from manyhands.schedule.tileable import tileable_layers
from tiled_cases import DRAWN, PICTURES, case_of, small_case, tail_of, unwritten_memory_noticed


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory() -> Iterator[None]:
    with unwritten_memory_noticed():
        yield


class ChannelsLast(nn.Module):
    """What is inside works on (sample, row, column, channel)."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """The gain of the whole block lies along its channels, before or after the permute; samples may skip it."""

    def __init__(self, channels: int, *, early: bool, drop: float = 0.0) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm, self.up, self.down = (
            nn.LayerNorm(channels),
            nn.Linear(channels, 6),
            nn.Linear(6, channels, not early),
        )
        self.gain = nn.Parameter(torch.rand(channels if early else (channels, 1, 1)))
        self.early, self.drop = early, drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y)))
        y = (self.gain * y).permute(0, 3, 1, 2) if self.early else self.gain * y.permute(0, 3, 1, 2)
        if self.drop:
            y = y * y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop).div_(1 - self.drop)
        return x + y


class PoolMixer(nn.Module):
    """PoolFormer's token mixer, between a norm over channels and a gain for every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.scale = nn.GroupNorm(1, channels), nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y
        return x + y * self.scale.view(-1, 1, 1)


class ChannelGate(nn.Module):
    """What every place makes of its own channels: softmax, means and maxima over them."""

    def forward(self, x: Tensor) -> Tensor:
        mean, most = x.mean(1, keepdim=True), x.amax(1, keepdim=True)
        return x * torch.sigmoid(mean + most) + x.softmax(1)


class LateGate(nn.Module):
    """Squeeze and excitation of (sample, row, column, channel): the gate has channels where other maps have columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(0, 2, 3, 1)
        gate = torch.sigmoid(self.linear(y.mean((1, 2), keepdim=True)))
        return (y * gate).permute(0, 3, 1, 2)


class Transposed(nn.Module):
    """Rows and columns change places, and back; the convolution between them reads columns as rows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, (5, 1), padding=(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolution(x.transpose(2, 3))
        return y.swapaxes(-1, -2)


class Heads(nn.Module):
    """Channels as heads beside rows and columns that come before them."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(0, 2, 3, 1).unflatten(3, (2, -1))
        y = y.transpose(-1, -2).flatten(3)
        return y.permute(0, 3, 1, 2)


class GatedLast(nn.Module):
    """MambaOut's and FocalNet's gates: channels that come last in parts, some convolved as channels that come second;
    what was made is stacked behind them, every second row and column, padded around places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(channels, 2 * channels), nn.Conv2d(channels - 1, channels - 1, 3, padding=1)
        self.sizes = (channels, 1, channels - 1)

    def forward(self, x: Tensor) -> Tensor:
        gate, factor, parts = self.up(x.permute(0, 2, 3, 1)).split(self.sizes, -1)
        made = self.inner(parts.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        made = F.gelu(gate) * torch.cat((made, made.amax(-1, True)), -1)
        both = torch.stack((made, factor.expand_as(made)), -1)
        return (x.permute(0, 2, 3, 1) + both.mean(-1)).permute(0, 3, 1, 2)


class Halved(nn.Module):
    """Patch merging: every second row and column of (sample, row, column, channel), four times, along the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2), mode="replicate").permute(0, 2, 3, 1)
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        y: Tensor = self.linear(torch.cat(parts, -1))
        return y.permute(0, 3, 1, 2)


def convnext(early: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1), ChannelsLast(nn.LayerNorm(4)), ConvNextBlock(4, early=early, drop=0.4),
        ChannelsLast(nn.LayerNorm(4)), nn.Conv2d(4, 4, 2, 2), ConvNextBlock(4, early=not early),
    )  # fmt: skip


def metaformer() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), PoolMixer(4), ChannelGate(), LateGate(4), PoolMixer(4))


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), GatedLast(4), Halved(4), nn.BatchNorm2d(4), GatedLast(4))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "convnext": lambda: ConvNextBlock(4, early=False), "gated": lambda: GatedLast(4), "halved": lambda: Halved(4),
    "convnext, early": lambda: ConvNextBlock(4, early=True, drop=0.3),
    "norm": lambda: ChannelsLast(nn.LayerNorm(4)), "plain norm": lambda: ChannelsLast(nn.LayerNorm(4, bias=False)),
    "pool": lambda: PoolMixer(4), "gate": ChannelGate, "transposed": lambda: Transposed(4), "heads": Heads,
    "late gate": lambda: LateGate(4), "convolution": lambda: nn.Conv2d(4, 4, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm2d(4), "relu": nn.ReLU,
    "dropout": lambda: ChannelsLast(nn.Dropout(0.3)), "half": lambda: nn.MaxPool2d(2, ceil_mode=True),
}  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    names = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=5))
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *(BLOCKS[name]() for name in names))


@pytest.mark.slow
@settings(DRAWN, max_examples=5)
@given(st.data())
def test_any_network_with_axes_in_other_orders(data: st.DataObject) -> None:
    shape = (2, *data.draw(st.sampled_from(PICTURES)))
    case = case_of(data.draw(networks()), shape, samples=4, seed=data.draw(st.integers(0, 99)))
    for _ in range(2):
        share = data.draw(drawn_tiles(case.network, 0, case.count))
        case.check(case.plan(case.tiled(share), micro_batches=data.draw(st.sampled_from((1, 2)))))


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("groups", [(None, None), ((0,), (0,)), (None, (0, 4))], ids=str)
@pytest.mark.parametrize("build", [lambda: convnext(True), lambda: convnext(False), metaformer, gated],
                         ids=["convnext", "convnext-late", "metaformer", "gated"])  # fmt: skip
def test_layer_norms_between_permutes(build: Callable[[], nn.Module], groups: Any) -> None:
    torch.manual_seed(3)
    case = case_of(build(), (2, 17, 13))
    assert tileable_layers(case.network)[0] == case.count
    case.check(case.plan(case.tiled(ByTiles((2, 1, 1), (1, 2), *groups))))


def means_of_rows_last() -> nn.Module:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(x.permute(0, 2, 3, 1)).mean((1, 2)))
            return y

    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), Head())


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("cut", [False, True])
def test_the_mean_of_a_map_whose_channels_come_last(cut: bool) -> None:
    case = small_case(means_of_rows_last, (2, 9, 7))
    end = tail_of(case) if cut else case.count
    rest = (Stage((end, case.count), ("t1",)),) if cut else ()
    case.check(case.plan(case.tiled(ByTiles((1, 2), (2, 1)), 0, end), *rest))


def pictures_with_channels_last() -> nn.Module:
    class Entry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 3, 1, 2)

    return nn.Sequential(Entry(), nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1))


@pytest.mark.slow
def test_an_input_whose_channels_come_last() -> None:
    """The spatial axes of a network's input are those that its first convolution expects."""
    case = small_case(pictures_with_channels_last, (9, 8, 2))
    assert case.network.spatial[case.network.inputs[0]] == (1, 2)
    case.check(case.plan(case.tiled(ByTiles((2, 1), (1, 1)))))


@pytest.mark.slow
def test_a_stage_that_begins_where_channels_are_last() -> None:
    torch.manual_seed(2)
    case = case_of(convnext(True), (2, 12, 10))
    names = [op.target for op in case.network.ops]
    start = names.index("aten.layer_norm.default")
    stages = (Stage((0, start), ("t2",)), case.tiled(ByTiles((1, 1), (1, 2)), start))
    case.check(case.plan(*stages))

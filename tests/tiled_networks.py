"""Networks over maps for tiled training: drawn ones, of every operator that tiles have, and small ones of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from manyhands.decoupling.layers import GroupedConcat, GroupShuffle
from manyhands.models.efficientnet import StochasticDepth
from manyhands.models.mobilenet import InvertedResidual, SqueezeExcite, conv_norm
from manyhands.models.resnet import ResidualBlock
from manyhands.models.unet import UNet

Shape = tuple[int, int, int]
"""Channels, rows, columns."""
MOST_ELEMENTS = 6000


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Beside(nn.Module):
    """What it makes, beside what it was given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), x], 1)


class Together(nn.Module):
    """The same in two groups, each of which has its own part of both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.concat = nn.Conv2d(4, 2, 3, padding=1, groups=2), GroupedConcat(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.concat(self.inner(x), x)
        return out


class Gated(nn.Module):
    """The product of two branches that read different surroundings."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.value = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Conv2d(channels, channels, (kernel, 1), padding=(kernel // 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(x) * torch.sigmoid(self.gate(x))
        return out


class LinearExcite(nn.Module):
    """A squeeze-excitation with linear layers, as timm and others write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, 3), nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class Scaled(nn.Module):
    """A weight for each channel, and an offset."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.rand(channels, 1, 1)), nn.Parameter(torch.rand(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset


class Centred(nn.Module):
    """Less its own mean over the map: a pooled tensor meets the map again without anything in between."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((2, 3), keepdim=True)


class Cut(nn.Module):
    """A part of the map, and of its channels twice."""

    def forward(self, x: Tensor) -> Tensor:
        inside = x[:, :, 1:, :-1]
        return torch.cat([inside, inside[:, :1]], 1)


class Resized(nn.Module):
    """Up-sampling, by a factor or to a size."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, **self.options)


class Padded(nn.Module):
    def __init__(self, amounts: Sequence[int], value: float) -> None:
        super().__init__()
        self.amounts, self.value = list(amounts), value

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x, self.amounts, value=self.value)


def same(inputs: int, outputs: int, kernel: int = 3, *, dilation: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2 * dilation, dilation=dilation)


ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, lambda: nn.LeakyReLU(0.1), nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.ReLU6, nn.GELU,
)  # fmt: skip


@st.composite
def convolutions(draw: st.DrawFn, channels: int) -> nn.Module:
    """Any kernel, stride, padding, dilation and number of groups."""
    small = st.integers(1, 3)
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    stride, dilation = (draw(small), draw(small)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding = tuple(draw(st.integers(0, k * d)) for k, d in zip(kernel, dilation))
    outputs = draw(st.integers(2, 6))
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if gcd(channels, outputs) % g == 0]))
    bias = draw(st.booleans())
    return nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups, bias)


@st.composite
def pools(draw: st.DrawFn) -> nn.Module:
    kernel, stride = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    padding, ceil = draw(st.integers(0, 1)), draw(st.booleans())
    if draw(st.booleans()):
        return nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
    return nn.AvgPool2d(kernel, stride, padding, ceil, draw(st.booleans()))


@st.composite
def ups(draw: st.DrawFn) -> nn.Module:
    if draw(st.booleans()):
        return Resized(scale_factor=2, mode="nearest")
    return Resized(scale_factor=2, mode="bilinear", align_corners=draw(st.booleans()))


@st.composite
def resizes(draw: st.DrawFn) -> nn.Module:
    """To any size: up, down, by no whole factor."""
    size = (draw(st.integers(5, 19)), draw(st.integers(5, 19)))
    return Resized(size=size, mode=draw(st.sampled_from(("nearest", "bilinear"))))


@st.composite
def blocks(draw: st.DrawFn, channels: int) -> nn.Module:
    """Something that reads a map of some channels and gives a map."""
    kind = draw(
        st.sampled_from(
            ("conv", "conv", "normed", "normed", "activation", "pool", "residual", "beside", "up", "excite", "linear",
             "group", "instance", "drop", "gated", "pad", "transposed", "depthwise", "shuffle", "adaptive", "resize",
             "scaled", "centred", "cut", "prelu", "dealt", "together")
        )
    )  # fmt: skip
    activation = draw(st.sampled_from(ACTIVATIONS))
    if kind == "conv":
        return draw(convolutions(channels))
    if kind == "normed":
        outputs = draw(st.integers(2, 6))
        return nn.Sequential(nn.Conv2d(channels, outputs, 3, draw(st.integers(1, 2)), 1, bias=False),
                             nn.BatchNorm2d(outputs), activation())  # fmt: skip
    if kind == "residual":
        inner = nn.Sequential(same(channels, 4), activation(), same(4, channels, 3, dilation=draw(st.integers(1, 2))))
        return Residual(inner)
    if kind == "beside":
        return Beside(same(channels, 3, draw(st.sampled_from((1, 3, 5)))))
    if kind == "transposed":
        return nn.ConvTranspose2d(channels, 4, draw(st.integers(2, 3)), 2, draw(st.integers(0, 1)))
    if kind == "shuffle":
        return nn.Sequential(nn.Conv2d(channels, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 4, 3, 2))
    if kind == "dealt":
        return nn.Sequential(nn.Conv2d(channels, 8, 1), GroupShuffle(2), nn.Conv2d(8, 4, 3, padding=1, groups=2))
    if kind == "together":
        return nn.Sequential(nn.Conv2d(channels, 4, 1), Together(), nn.Conv2d(6, 4, 3, padding=1, groups=2))
    made: dict[str, Callable[[], nn.Module]] = {
        "activation": activation,
        "pool": lambda: draw(pools()),
        "up": lambda: draw(ups()),
        "excite": lambda: SqueezeExcite(channels, 3, activation=nn.ReLU(), gate=nn.Sigmoid()),
        "linear": lambda: LinearExcite(channels),
        "group": lambda: nn.GroupNorm(draw(st.sampled_from([g for g in (1, 2, 3) if channels % g == 0])), channels),
        "instance": lambda: nn.InstanceNorm2d(channels, affine=draw(st.booleans())),
        "drop": lambda: draw(st.sampled_from((nn.Dropout, nn.Dropout2d)))(0.3),
        "gated": lambda: Gated(channels, draw(st.sampled_from((3, 5)))),
        "pad": lambda: Padded([draw(st.integers(-1, 2)) for _ in range(4)], draw(st.sampled_from((0.0, 1.5)))),
        "adaptive": lambda: nn.AdaptiveAvgPool2d((draw(st.integers(3, 7)), draw(st.integers(3, 7)))),
        "resize": lambda: draw(resizes()),
        "scaled": lambda: Scaled(channels),
        "centred": Centred,
        "cut": Cut,
        "prelu": lambda: nn.PReLU(draw(st.sampled_from((1, channels)))),
        "depthwise": lambda: nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
    }
    return made[kind]()


@st.composite
def networks(draw: st.DrawFn, shape: Shape, most: int = 7) -> nn.Sequential:
    """A chain of drawn blocks; one that would make a map too small or too large is left out. The first is a
    convolution, so that whatever follows has a gradient to give back."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    x = torch.zeros(2, *shape)
    chosen: list[nn.Module] = []
    for number in range(draw(st.integers(2, most))):
        block = same(shape[0], 4) if number == 0 else draw(blocks(x.shape[1]))
        try:
            with torch.no_grad():
                made = block(x)
        except (RuntimeError, ValueError):  # a window larger than the map
            continue
        if made.shape[2] < 3 or made.shape[3] < 3 or made[0].numel() > MOST_ELEMENTS:
            continue
        chosen.append(block)
        x = made
    return nn.Sequential(*chosen)


class Hourglass(nn.Module):
    """A U-Net of drawn blocks: down, up, and at every level what was there on the way down is joined again."""

    def __init__(self, down: Sequence[nn.Module], up: Sequence[nn.Module], joins: Sequence[str]) -> None:
        super().__init__()
        self.down, self.up, self.joins = nn.ModuleList(down), nn.ModuleList(up), list(joins)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        for block, join in zip(self.up, self.joins):
            fine = skips.pop()
            coarse = functional.interpolate(block(x), size=fine.shape[2:], mode="bilinear")
            x = torch.cat([coarse, fine], 1) if join == "concat" else coarse + fine
        return x


@st.composite
def hourglasses(draw: st.DrawFn, shape: Shape) -> nn.Module:
    """Two levels; blocks are normed, residual, excited or dropped, and some go up by a transposed convolution."""
    torch.manual_seed(draw(st.integers(0, 2**16)))

    def block(inputs: int, outputs: int) -> nn.Module:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "normed": lambda: nn.Sequential(nn.BatchNorm2d(outputs), nn.ReLU()),
            "residual": lambda: Residual(nn.Sequential(same(outputs, outputs), nn.Tanh())),
            "excite": lambda: SqueezeExcite(outputs, 2, activation=nn.ReLU(), gate=nn.Sigmoid()),
            "drop": lambda: nn.Dropout2d(0.3),
        }
        return nn.Sequential(same(inputs, outputs), kinds[draw(st.sampled_from(list(kinds)))]())

    def wider(inputs: int, outputs: int) -> nn.Module:
        if draw(st.booleans()):
            return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 2, 2), nn.SiLU())
        return block(inputs, outputs)

    joins = [draw(st.sampled_from(("concat", "add"))) for _ in range(2)]
    middle = 8 if joins[0] == "concat" else 4
    return Hourglass([block(shape[0], 3), block(3, 4)], [wider(4, 4), wider(middle, 3)], joins)


@st.composite
def mixed_networks(draw: st.DrawFn, shape: Shape) -> nn.Module:
    """A chain of blocks or an hourglass, half of them with a classifier's tail, which cannot be tiled."""
    features = draw(networks(shape, most=5) | hourglasses(shape))
    if draw(st.booleans()):
        return features
    with torch.no_grad():
        channels = features(torch.zeros(2, *shape)).shape[1]
    return nn.Sequential(
        features, nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * channels, 3)
    )


# Small versions of the zoo's


class Classifier(nn.Module):
    """Features over maps, then a mean and a linear layer: the tail that a tiled stage leaves to one device."""

    def __init__(self, features: nn.Module, channels: int, classes: int = 5) -> None:
        super().__init__()
        self.features, self.pool, self.last = features, nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.pool(self.features(x)).flatten(1))
        return out


def small_resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 6, 7, 2, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    rest = [ResidualBlock(6, 4, 1, bottleneck=True), ResidualBlock(16, 4, 1, bottleneck=True),
            ResidualBlock(16, 6, 2, bottleneck=True)]  # fmt: skip
    return Classifier(nn.Sequential(*stem, *rest), 24)


def small_mobilenet_v2() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        return InvertedResidual(inputs, 3 * inputs, outputs, kernel=3, stride=stride, activation=nn.ReLU6)

    stem = [*conv_norm(3, 4, 3, 2), nn.ReLU6(inplace=True)]
    return Classifier(nn.Sequential(*stem, block(4, 6, 2), block(6, 6, 1), block(6, 8, 2)), 8)


def small_mobilenet_v3() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int, kernel: int) -> nn.Module:
        excite = SqueezeExcite(3 * inputs, 4, activation=nn.ReLU(inplace=True), gate=nn.Hardsigmoid())
        return InvertedResidual(
            inputs, 3 * inputs, outputs, kernel=kernel, stride=stride, activation=nn.Hardswish, excite=excite
        )

    stem = [*conv_norm(3, 4, 3, 2), nn.Hardswish(inplace=True)]
    return Classifier(nn.Sequential(*stem, block(4, 6, 2, 5), block(6, 6, 1, 3), block(6, 6, 1, 5)), 6)


def small_efficientnet() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int, kernel: int) -> nn.Module:
        excite = SqueezeExcite(2 * inputs, 2, activation=nn.SiLU(inplace=True), gate=nn.Sigmoid())
        return InvertedResidual(
            inputs, 2 * inputs, outputs, kernel=kernel, stride=stride, activation=nn.SiLU, excite=excite,
            drop=StochasticDepth(0.3),
        )  # fmt: skip

    stem = [*conv_norm(3, 4, 3, 2), nn.SiLU(inplace=True)]
    return Classifier(nn.Sequential(*stem, block(4, 4, 1, 3), block(4, 6, 2, 5), block(6, 6, 1, 5)), 6)


def small_vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (4, 6, 6):
        for _ in range(2):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return Classifier(nn.Sequential(*layers), 6)


class SmallYolo(nn.Module):
    """YOLOv2's shape: finer features passed through, reorganised and joined with the coarse ones."""

    def __init__(self) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int, kernel: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
                                 nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1, inplace=True))  # fmt: skip

        self.fine = nn.Sequential(layer(3, 4, 3), nn.MaxPool2d(2), layer(4, 8, 3), layer(8, 4, 1), layer(4, 8, 3))
        self.coarse = nn.Sequential(nn.MaxPool2d(2), layer(8, 12, 3), layer(12, 6, 1), layer(6, 12, 3))
        self.passthrough, self.reorganise = layer(8, 2, 1), nn.PixelUnshuffle(2)
        self.joined, self.detector = layer(20, 12, 3), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        joined = torch.cat((self.reorganise(self.passthrough(fine)), self.coarse(fine)), dim=1)
        out: Tensor = self.detector(self.joined(joined))
        return out


ZOO: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "resnet": (small_resnet, (3, 36, 44)),
    "mobilenetv2": (small_mobilenet_v2, (3, 34, 30)),
    "mobilenetv3": (small_mobilenet_v3, (3, 34, 30)),
    "efficientnet": (small_efficientnet, (3, 26, 30)),
    "vgg": (small_vgg, (3, 27, 22)),
    "yolov2": (SmallYolo, (3, 24, 28)),
    "unet": (lambda: UNet(width=2), (3, 32, 32)),
}

"""MobileNetV2 and MobileNetV3-Large.

Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018 (arXiv:1801.04381).
Howard et al., "Searching for MobileNetV3", ICCV 2019 (arXiv:1905.02244).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Activation = Callable[..., nn.Module]
Norm = Callable[[int], nn.Module]


def round_channels(channels: float, divisor: int = 8) -> int:
    """Return the nearest multiple of `divisor`, but never more than a tenth below `channels`."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


def conv_norm(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, groups: int = 1, norm: Norm = nn.BatchNorm2d
) -> list[nn.Module]:
    """Return a convolution without bias that keeps the size at stride 1, and its normalisation."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
    return [convolution, norm(outputs)]


class SqueezeExcite(nn.Module):
    """A layer that scales each channel by a gate computed from all channels' means."""

    def __init__(self, channels: int, squeezed: int, *, activation: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.activation = activation
        self.excite = nn.Conv2d(squeezed, channels, 1)
        self.gate = gate
        for convolution in (self.squeeze, self.excite):
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.gate(self.excite(self.activation(self.squeeze(self.pool(x)))))
        return scale * x


class InvertedResidual(nn.Module):
    """A block that widens by 1x1, filters each channel and narrows by 1x1; added to the input where the shapes
    agree."""

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        *,
        kernel: int,
        stride: int,
        activation: Activation,
        norm: Norm = nn.BatchNorm2d,
        excite: nn.Module | None = None,
        drop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers += [*conv_norm(inputs, expanded, norm=norm), activation(inplace=True)]
        layers += [
            *conv_norm(expanded, expanded, kernel, stride, groups=expanded, norm=norm),
            activation(inplace=True),
        ]
        if excite is not None:
            layers.append(excite)
        layers += conv_norm(expanded, outputs, norm=norm)
        self.adds_input = stride == 1 and inputs == outputs
        if drop is not None and self.adds_input:
            layers.append(drop)
        self.residual = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        return x + out if self.adds_input else out


class ConvClassifier(nn.Module):
    """A stack of blocks, the mean over the picture, and a head."""

    def __init__(self, blocks: list[nn.Module], head: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(*head)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.pool(self.blocks(x))
        out: Tensor = self.head(features.flatten(1))
        return out


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer initialised as in both papers' code."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


# Table 2 of the V2 paper: expansion, output channels, repeats, stride of the first.
_V2_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(num_classes: int = 1000, *, dropout: float = 0.2, small_images: bool = False) -> ConvClassifier:
    """Return MobileNetV2; `small_images` keeps full size for two more stages, as is usual for 32x32 pictures."""
    blocks: list[nn.Module] = [*conv_norm(3, 32, 3, 1 if small_images else 2), nn.ReLU6(inplace=True)]
    inputs = 32
    for stage, (expansion, outputs, repeats, stage_stride) in enumerate(_V2_STAGES):
        for index in range(repeats):
            stride = stage_stride if index == 0 and not (small_images and stage == 1) else 1
            blocks.append(
                InvertedResidual(inputs, inputs * expansion, outputs, kernel=3, stride=stride, activation=nn.ReLU6)
            )
            inputs = outputs
    blocks += [*conv_norm(inputs, 1280), nn.ReLU6(inplace=True)]
    return ConvClassifier(blocks, [nn.Dropout(dropout), linear(1280, num_classes)])


def mobilenet_v2_32(num_classes: int = 10, *, dropout: float = 0.2) -> ConvClassifier:
    """Return MobileNetV2 for the 32x32 pictures of CIFAR-10."""
    return mobilenet_v2(num_classes, dropout=dropout, small_images=True)


# Table 1 of the V3 paper: kernel, expanded channels, output channels, squeeze-and-excite, hard-swish, stride.
_V3_LARGE_BLOCKS = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def mobilenet_v3_large(num_classes: int = 1000, *, dropout: float = 0.2, small_images: bool = False) -> ConvClassifier:
    """Return MobileNetV3-Large; `small_images` keeps full size for two more stages, as is usual for 32x32 pictures."""
    # Eps and momentum are torchvision's for this model.
    norm: Norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
    blocks: list[nn.Module] = [*conv_norm(3, 16, 3, 1 if small_images else 2, norm=norm), nn.Hardswish(inplace=True)]
    inputs = 16
    for index, (kernel, expanded, outputs, squeezes, swishes, stride) in enumerate(_V3_LARGE_BLOCKS):
        excite = None
        if squeezes:
            excite = SqueezeExcite(
                expanded, round_channels(expanded / 4), activation=nn.ReLU(inplace=True), gate=nn.Hardsigmoid()
            )
        blocks.append(
            InvertedResidual(
                inputs,
                expanded,
                outputs,
                kernel=kernel,
                stride=1 if small_images and index == 1 else stride,
                activation=nn.Hardswish if swishes else nn.ReLU,
                norm=norm,
                excite=excite,
            )
        )
        inputs = outputs
    blocks += [*conv_norm(inputs, 960, norm=norm), nn.Hardswish(inplace=True)]
    head = [linear(960, 1280), nn.Hardswish(inplace=True), nn.Dropout(dropout, inplace=True), linear(1280, num_classes)]
    return ConvClassifier(blocks, head)

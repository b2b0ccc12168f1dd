"""ResNet-18, -34 and -50: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv:1512.03385).

The 50-layer one has its stride on the 3x3 convolution ("v1.5"), as torchvision's does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]


class ResidualBlock(nn.Module):
    """A block of two 3x3 convolutions, or a 1x1-3x3-1x1 bottleneck, added to a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            layers = [
                *_convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
                *_convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *_convolution(width, outputs, 1),
            ]
        else:
            layers = [
                *_convolution(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                *_convolution(width, width, 3),
            ]
        self.residual = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, average pooling and a linear classifier.

    `small_images` gives the stem usual for CIFAR: one 3x3 convolution of stride 1 and no pooling.
    """

    def __init__(
        self, blocks: Sequence[int], *, bottleneck: bool, num_classes: int = 1000, small_images: bool = False
    ) -> None:
        super().__init__()
        stem = [*_convolution(3, 64, 3 if small_images else 7, 1 if small_images else 2), nn.ReLU(inplace=True)]
        if not small_images:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        inputs = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            stage_blocks: list[nn.Module] = []
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                stage_blocks.append(ResidualBlock(inputs, width, stride, bottleneck=bottleneck))
                inputs = width * 4 if bottleneck else width
            stages.append(nn.Sequential(*stage_blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.pool(self.stages(self.stem(x)))
        out: Tensor = self.classifier(features.flatten(1))
        return out


def resnet18(num_classes: int = 1000, *, small_images: bool = False) -> ResNet:
    return ResNet((2, 2, 2, 2), bottleneck=False, num_classes=num_classes, small_images=small_images)


def resnet34(num_classes: int = 1000, *, small_images: bool = False) -> ResNet:
    return ResNet((3, 4, 6, 3), bottleneck=False, num_classes=num_classes, small_images=small_images)


def resnet50(num_classes: int = 1000, *, small_images: bool = False) -> ResNet:
    return ResNet((3, 4, 6, 3), bottleneck=True, num_classes=num_classes, small_images=small_images)

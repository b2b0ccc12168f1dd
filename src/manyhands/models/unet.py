"""U-Net: Ronneberger et al., MICCAI 2015 (arXiv:1505.04597).

As later practice has it: padded convolutions, so the output is as large as the input, and batch normalisation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Up(nn.Module):
    """A block that doubles the size, joins the skipped features and convolves twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convolutions = _double_convolution(2 * outputs, outputs)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        out: Tensor = self.convolutions(torch.cat((skipped, self.up(x)), dim=1))
        return out


class UNet(nn.Module):
    """A network of five levels of features, the first `width` channels wide. Sides must be multiples of 16."""

    def __init__(self, num_classes: int = 2, *, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.stem = _double_convolution(channels, width)
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _double_convolution(inputs, outputs)) for inputs, outputs in pairwise(widths)
        )
        self.ups = nn.ModuleList(Up(inputs, outputs) for inputs, outputs in pairwise(reversed(widths)))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = [self.stem(x)]
        for down in self.downs:
            skipped.append(down(skipped[-1]))
        out = skipped.pop()
        for up in self.ups:
            out = up(out, skipped.pop())
        result: Tensor = self.head(out)
        return result


def unet(num_classes: int = 2, *, channels: int = 3, width: int = 64) -> UNet:
    return UNet(num_classes, channels=channels, width=width)


def example_labels(
    batch_size: int, input_shape: tuple[int, ...], num_classes: int, generator: torch.Generator
) -> Tensor:
    """Return a random class for each pixel."""
    return torch.randint(0, num_classes, (batch_size, *input_shape[1:]), generator=generator)

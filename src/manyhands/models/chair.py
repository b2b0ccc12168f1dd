"""A generator of pictures of chairs.

Dosovitskiy et al., "Learning to Generate Chairs, Tables and Cars with Convolutional Networks", TPAMI 2017
(arXiv:1411.5928): style, viewpoint and transformation pass through linear layers, then through unpoolings and
5x5 convolutions. The widths follow the feature sizes that the SPLIT paper (edge-cloud pipeline training; its Table 3,
batch 32) gives for its cuts: 384, 256, 256, 4096, then 8x8x256, 16x16x92 and 32x32x48, twice each. Its pictures are
128x128, so the last step here enlarges four times; the table lists no mask, so neither does this output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# 809 chair styles, sine and cosine of two view angles, and 12 numbers of colour and shape changes: 825.
INPUT_PARTS = (809, 4, 12)
_SLOPE = 0.2


def _linear(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LeakyReLU(_SLOPE, inplace=True))


def _unpool_convolution(inputs: int, outputs: int, scale: int) -> nn.ConvTranspose2d:
    """Return unpooling (each value in the corner of an empty scale x scale square) and a 5x5 convolution, as one
    layer."""
    return nn.ConvTranspose2d(inputs, outputs, 5, stride=scale, padding=2, output_padding=scale - 1)


class Chair(nn.Module):
    """A network that draws a picture of 3x128x128 from a description of 825 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_linear(part, 128) for part in INPUT_PARTS)
        self.joined = nn.Sequential(_linear(3 * 128, 256), _linear(256, 256), _linear(256, 256 * 4 * 4))
        layers: list[nn.Module] = []
        inputs = 256
        for outputs in (256, 92, 48):
            layers += [
                _unpool_convolution(inputs, outputs, 2),
                nn.LeakyReLU(_SLOPE, inplace=True),
                nn.Conv2d(outputs, outputs, 5, padding=2),
                nn.LeakyReLU(_SLOPE, inplace=True),
            ]
            inputs = outputs
        self.convolutions = nn.Sequential(*layers)
        self.picture = _unpool_convolution(inputs, 3, 4)

    def forward(self, description: Tensor) -> Tensor:
        parts = torch.split_with_sizes(description, INPUT_PARTS, dim=1)
        joined = torch.cat([branch(part) for branch, part in zip(self.branches, parts, strict=True)], dim=1)
        features: Tensor = self.joined(joined)
        out: Tensor = self.picture(self.convolutions(torch.unflatten(features, 1, (256, 4, 4))))
        return out


def chair() -> Chair:
    return Chair()


def example_inputs(batch_size: int, input_shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a style for each sample as a one-hot vector, and random view and transformation."""
    styles = torch.randint(0, INPUT_PARTS[0], (batch_size,), generator=generator)
    view_and_transformation = torch.randn(batch_size, input_shape[0] - INPUT_PARTS[0], generator=generator)
    return torch.cat(
        (nn.functional.one_hot(styles, INPUT_PARTS[0]).to(view_and_transformation.dtype), view_and_transformation),
        dim=1,
    )


def example_pictures(
    batch_size: int, input_shape: tuple[int, ...], num_classes: int, generator: torch.Generator
) -> Tensor:
    return torch.rand(batch_size, 3, 128, 128, generator=generator)

"""A small convolutional classifier of our own: one of each common layer, and quick to train on handwritten digits."""

from __future__ import annotations

from torch import Tensor, nn


class Tiny(nn.Module):
    """A network of three convolutions and two linear layers, for pictures of 16x16 to 32x32."""

    def __init__(self, num_classes: int = 10, *, channels: int = 1, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(4 * width * 4, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        out: Tensor = self.classifier(features.flatten(1))
        return out


def tiny(num_classes: int = 10, *, channels: int = 1, width: int = 16, dropout: float = 0.1) -> Tiny:
    return Tiny(num_classes, channels=channels, width=width, dropout=dropout)

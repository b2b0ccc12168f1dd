"""VGG-16 and VGG-19 (configurations D and E): Simonyan and Zisserman, ICLR 2015 (arXiv:1409.1556)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class VGG(nn.Module):
    """A network of five groups of 3x3 convolutions, each closed by a max-pool, and three linear layers."""

    def __init__(
        self, group_sizes: Sequence[int], *, num_classes: int = 1000, batch_norm: bool = False, dropout: float = 0.5
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for size, outputs in zip(group_sizes, (64, 128, 256, 512, 512), strict=True):
            for _ in range(size):
                layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(outputs))
                layers.append(nn.ReLU(inplace=True))
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # Changes nothing at 224x224; lets other sizes reach the classifier.
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.pool(self.features(x))
        out: Tensor = self.classifier(features.flatten(1))
        return out


def vgg16(num_classes: int = 1000, *, batch_norm: bool = False, dropout: float = 0.5) -> VGG:
    return VGG((2, 2, 3, 3, 3), num_classes=num_classes, batch_norm=batch_norm, dropout=dropout)


def vgg19(num_classes: int = 1000, *, batch_norm: bool = False, dropout: float = 0.5) -> VGG:
    return VGG((2, 2, 4, 4, 4), num_classes=num_classes, batch_norm=batch_norm, dropout=dropout)

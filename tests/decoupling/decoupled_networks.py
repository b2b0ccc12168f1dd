"""Small networks of every kind that decoupling must understand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual paths, a shortcut with a convolution, functional calls, and a view made of sizes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.third = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.shortcut = nn.Conv2d(width, 2 * width, 1, stride=2)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.second(torch.relu(self.first(x)))
        y = self.third(F.leaky_relu(self.down(x), 0.1))
        y += self.shortcut(x)
        y = F.dropout(F.adaptive_avg_pool2d(F.relu(y), 1), 0.2, training=self.training)
        return self.head(y.view(y.size(0), -1))


class Joined(nn.Module):
    """Concatenations of maps of unequal widths, resampling, and an up-convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 24, 1)
        self.mixed = nn.Conv2d(32, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(40, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        both = torch.cat([self.left(x), self.right(x)], 1)
        small = self.mixed(F.max_pool2d(torch.sigmoid(both), 2))
        x = self.last(torch.cat((self.up(small), both), dim=1))
        return self.head(F.relu(x))


class Excited(nn.Module):
    """Depthwise convolutions and a gate of linear layers, as squeeze and excitation is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.squeeze = nn.Linear(12, 3)
        self.excite = nn.Linear(3, 12)
        self.out = nn.Conv2d(12, 20, 1)
        self.next = nn.Conv2d(20, 20, 3, padding=1, groups=2)
        self.act = nn.PReLU(20)
        self.norm = nn.GroupNorm(2, 20)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 20).view(20, 1, 1))
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.deep(F.silu(self.stem(x))))
        b, c, _, _ = x.size()
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        x = x * gate.view(b, c, 1, 1)
        x = self.scale * self.norm(self.act(self.next(self.out(x))))
        return F.log_softmax(self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), dim=1)


class Flattened(nn.Module):
    """No pooling before the linear layer, whose size is written out; places become channels and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.fold = nn.PixelUnshuffle(2)
        self.inner = nn.Conv2d(32, 16, 3, padding=1)
        self.unfold = nn.PixelShuffle(2)
        self.last = nn.Conv2d(4, 12, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm1d(12 * 16)
        self.head = nn.Sequential(nn.Linear(12 * 4 * 4, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.unfold(F.relu(self.inner(self.fold(self.stem(x)))))
        return self.head(self.bn(F.relu(self.last(x)).view(-1, 12 * 4 * 4)))


NETWORKS = {"residual": Residual, "joined": Joined, "excited": Excited, "flattened": Flattened}
SHAPE = (3, 8, 8)


def network(name: str, *, seed: int = 0) -> nn.Module:
    """In double precision, with statistics that are not the ones batch norm starts with."""
    torch.manual_seed(seed)
    module = NETWORKS[name]().double()
    module.train()
    with torch.no_grad():
        for _ in range(3):
            module(pictures(6))
    return module.eval()


def pictures(count: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(count))

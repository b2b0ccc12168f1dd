"""Networks that each have something a share by channels could get wrong, in float64."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph


def shuffled(x: Tensor, groups: int) -> Tensor:
    return torch.channel_shuffle(x, groups)


def dealt(x: Tensor, groups: int) -> Tensor:
    """The same, as it is often written."""
    samples, channels, rows, columns = x.shape
    return x.view(samples, groups, channels // groups, rows, columns).transpose(1, 2).flatten(1, 2)


class Decoupled(nn.Module):
    """Grouped, depthwise and transposed convolutions, two shuffles, squeeze-and-excitation, two linear layers."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.grouped, self.activation = nn.Conv2d(16, 32, 3, padding=1, groups=groups), nn.PReLU(32)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.up = nn.ConvTranspose2d(32, 32, 2, stride=2, groups=groups)
        self.hidden, self.classifier = nn.Linear(32 * 16, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = shuffled(torch.relu(self.norm(self.first(x))), self.groups)
        grouped = self.grouped(x)
        x = self.depthwise(self.activation(grouped)) + grouped
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = F.adaptive_avg_pool2d(torch.relu(shuffled(self.up(x * gate), self.groups)), 4)
        out: Tensor = self.classifier(F.dropout(torch.relu(self.hidden(x.flatten(1))), 0.5, self.training))
        return out


class Mixed(nn.Module):
    """Not decoupled: strided, dilated, grouped, a residual, a gate, a concatenation, up-sampling; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.d = nn.Conv2d(4, 4, 5, padding=4, dilation=2)
        self.e = nn.Conv2d(8, 3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.b(self.a(x)))
        y = torch.relu(F.max_pool2d(x, 3, 2, 1) + self.c(x))
        gated = self.d(y) * torch.sigmoid(y)
        wide = F.interpolate(torch.cat([gated, y], 1), scale_factor=2, mode="nearest")
        out = self.e(F.avg_pool2d(wide, 3, 2))
        return out, F.log_softmax(out, 1)


class Drawn(nn.Module):
    """A chain of drawn operators over maps, then a linear layer."""

    def __init__(self, kinds: list[str], width: int, groups: int, classes: int) -> None:
        super().__init__()
        self.kinds, self.groups = kinds, groups
        self.layers = nn.ModuleList()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        for kind in kinds:
            made: nn.Module = nn.Identity()
            if kind == "grouped":
                made = nn.Conv2d(width, width, 3, padding=1, groups=groups)
            elif kind == "dense":
                made = nn.Conv2d(width, width, 1)
            elif kind == "depthwise":
                made = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
            elif kind == "norm":
                made = nn.BatchNorm2d(width)
            elif kind == "group norm":
                made = nn.GroupNorm(groups, width)
            elif kind == "pool":
                made = nn.AvgPool2d(3, 1, 1)
            self.layers.append(made)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for kind, layer in zip(self.kinds, self.layers):
            if kind == "shuffle":
                x = shuffled(x, self.groups)
            elif kind == "dealt":
                x = dealt(x, self.groups)
            elif kind == "residual":
                x = x + torch.tanh(x)
            elif kind == "concatenate":
                x = torch.cat([x[:, ::2], x[:, 1::2]], 1)
            else:
                x = layer(x)
        out: Tensor = self.classifier(x.mean((2, 3)))
        return out


def settled(model: nn.Module) -> nn.Module:
    """In float64, in evaluation mode, with running statistics that are not trivial."""
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.double().eval()


def graph_of(model: nn.Module, side: int = 8, granularity: str = "operators") -> Graph:
    return capture(model, torch.zeros(2, 3, side, side, dtype=torch.float64), granularity=granularity, name="drawn")


@cache
def decoupled() -> tuple[nn.Module, Graph]:
    model = settled(Decoupled())
    return model, graph_of(model)

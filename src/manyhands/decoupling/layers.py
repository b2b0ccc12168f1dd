"""The two layers that a decoupled network has besides those of PyTorch. Neither has weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupShuffle(nn.Module):
    """A layer that deals every group's channels out to all groups: the only place where groups exchange anything."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return torch.channel_shuffle(x, self.groups)

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


class GroupedConcat(nn.Module):
    """A concatenation along channels within each group: a group's channels are its own part of every input."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, *parts: Tensor) -> Tensor:
        samples, _, *places = parts[0].shape
        split = [part.view(samples, self.groups, part.shape[1] // self.groups, *places) for part in parts]
        return torch.cat(split, 2).reshape(samples, sum(part.shape[1] for part in parts), *places)

    def extra_repr(self) -> str:
        return f"groups={self.groups}"


def dealt_order(channels: int, groups: int) -> list[int]:
    """Return the previous place of each channel of a shuffled tensor."""
    size = channels // groups
    return [group * size + place for place in range(size) for group in range(groups)]

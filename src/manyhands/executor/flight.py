"""One micro-batch under way on one device: its tensors, and what its backward pass needs.

The stage's operators are cut into segments wherever any action begins or ends, so that each can be run forward and
backward by itself: autograd records inside a segment, and what crosses from one to the next is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from manyhands.executor.statistics import Moments


@dataclass
class Flight:
    """Tensors by name; of a shared tensor, this device's box of it."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    entered: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Segment (by its first operator) -> the detached tensors it was given."""
    left: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    moments: dict[int, Moments] = field(default_factory=dict)
    scaled: dict[int, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    """Batch norm -> what the way back through it was prepared with."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        known = self.gradients.get(name)
        self.gradients[name] = gradient if known is None else known + gradient

    def add_gradients(self, found: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in found.items():
            self.add_gradient(name, gradient)

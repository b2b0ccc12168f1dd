"""One in-flight micro-batch in a stage of whole samples: its tensors, and what its backward pass needs.

The stage's operators are cut into segments wherever any action begins or ends, so that each can be run forward and
backward by itself: autograd records inside a segment, and what crosses from one to the next is known here by name. A
tape keeps what its operators save for backward and nothing else: neither what entered the segment nor what left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.executor.statistics import Moments


class SegmentTape:
    """The record that one segment's forward pass leaves for its backward pass."""

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self.left: dict[str, torch.Tensor] = {}
        """Tensor that left the segment -> a number to begin backward at, where gradients go on from it; else
        nothing."""
        self.given: dict[str, torch.Tensor] = {}
        self.found: dict[str, torch.Tensor] = {}
        """Gradients of what left, and of what entered."""
        self.data = data
        """The input of a batch norm over several devices, which autograd does not record."""

    def entering(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the segment's operators may read it, its gradient to be found by name."""
        made: torch.Tensor = _Enter.apply(_token(), tensor, name, self.found)  # type: ignore[no-untyped-call]
        return made

    def leaving(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Note the tensors that left the segment."""
        for name, tensor in outputs.items():
            if tensor.requires_grad:
                self.left[name] = _Leave.apply(tensor, name, self.given)  # type: ignore[no-untyped-call]

    def backward(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients of what entered, from those of what left; gradients of weights are added to theirs."""
        self.given.update({name: gradients[name] for name in self.left if name in gradients})
        roots = [self.left[name] for name in self.given]
        self.left = {}
        if roots:
            torch.autograd.backward(roots)
        return self.found


def _token() -> torch.Tensor:
    """Return something to be differentiated by, so that autograd records."""
    return torch.empty((), requires_grad=True)


class _Enter(torch.autograd.Function):
    """Hands a tensor on without keeping it, and stores its gradient by name."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, tensor: torch.Tensor, name: str, gradients: dict[str, Any]
    ) -> torch.Tensor:
        ctx.name, ctx.found = name, gradients
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.found[ctx.name] = gradient
        return None, None, None, None


class _Leave(torch.autograd.Function):
    """A number in place of a tensor that is not kept; backward goes on with the gradient given by name."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, gradients: dict[str, Any]) -> torch.Tensor:
        ctx.name, ctx.given = name, gradients
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.given.pop(ctx.name), None, None


@dataclass
class SegmentMicroBatch:
    """The tensors of one in-flight micro-batch by name; of a shared tensor, this device's box of it."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that came in, and those made here that are yet to be read."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    tapes: dict[int, SegmentTape] = field(default_factory=dict)
    """The tapes, by the segment's first operator."""
    moments: dict[int, Moments] = field(default_factory=dict)
    scaled: dict[int, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    """Batch norm -> what its backward pass was prepared with."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        collected = self.gradients.get(name)
        self.gradients[name] = gradient if collected is None else collected + gradient

    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self.add_gradient(name, gradient)

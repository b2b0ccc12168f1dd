"""Memory formats: another order of a tensor's axes in memory, with the same values."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank


def reformat_leaf(tensor: torch.Tensor, memory_format: torch.memory_format) -> None:
    """Put a leaf's memory, and its gradient's, in another order; an optimiser may hold the leaf itself."""
    if tensor.is_contiguous(memory_format=memory_format):
        return
    gradient = tensor.grad
    tensor.grad = None
    tensor.data = tensor.data.contiguous(memory_format=memory_format)
    if gradient is not None:
        tensor.grad = gradient.contiguous(memory_format=memory_format)


def memory_format_of(rank: int, channels_last: bool) -> torch.memory_format:
    return CHANNELS_LAST[rank] if channels_last and rank in CHANNELS_LAST else torch.contiguous_format


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


class _Reformat(torch.autograd.Function):
    """A change of memory format; the gradient comes back in the format that the input had."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, memory_format: torch.memory_format, before: torch.memory_format
    ) -> torch.Tensor:
        ctx.before = before
        return data.contiguous(memory_format=memory_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.contiguous(memory_format=ctx.before), None, None


def reformat(data: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return `data` in the given format, or `data` itself where it already is."""
    memory_format = memory_format_of(data.dim(), channels_last)
    if data.is_contiguous(memory_format=memory_format):
        return data
    return cast(
        torch.Tensor, apply_function(_Reformat, data, memory_format, memory_format_of(data.dim(), not channels_last))
    )

"""Activations that may write over what they read, in training: without the copy that autograd would make of it.

PyTorch's backward of some reads the result, so they overwrite for nothing. That of others reads the input: written in
place, autograd copies it first, and a result of its own is cheaper. A bounded line (ReLU6) is both: whether an input
lay between the bounds, its result tells too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten
_HARDTANH = "aten.hardtanh.default"
_READS_INPUT = frozenset(
    f"aten.{name}.default"
    for name in ("hardtanh", "hardswish", "hardsigmoid", "silu", "mish", "gelu", "softplus", "log_sigmoid", "clamp")
)
_LEAST_ELEMENTS = 2**18
"""From this many elements on, an autograd function of its own costs less than writing elsewhere."""


class _Bounded(torch.autograd.Function):
    """aten.hardtanh over its input; its gradient over its result's, where nothing else holds that one."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, low: float, high: float, is_alone: bool) -> torch.Tensor:
        ctx.mark_dirty(data)
        ctx.low, ctx.high, ctx.is_alone = low, high, is_alone
        result: torch.Tensor = _aten.hardtanh_.default(data, low, high)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        into = gradient if ctx.is_alone else torch.empty_like(gradient)
        _aten.hardtanh_backward.grad_input(gradient, result, ctx.low, ctx.high, grad_input=into)
        return into, None, None, None


def _bounded(is_alone: bool, data: torch.Tensor, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    if data.numel() < _LEAST_ELEMENTS or not low < high:
        return cast(torch.Tensor, _aten.hardtanh.default(data, low, high))
    return cast(torch.Tensor, _Bounded.apply(data, low, high, is_alone))  # type: ignore[no-untyped-call]


def overwriting(target: str, *, is_alone: bool = False) -> Callable[..., Any] | None:
    """What to call for an activation that may overwrite its input where autograd records; None: its in-place form.

    `is_alone`: a convolution alone reads what it makes, so that the gradient comes in memory that nobody else sees.
    """
    if target == _HARDTANH:
        return partial(_bounded, is_alone)
    name = target.split(".")[1]
    return cast("Callable[..., Any]", getattr(_aten, name).default) if target in _READS_INPUT else None

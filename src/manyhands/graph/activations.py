"""Activations that may overwrite their input in training, without the copy that autograd would otherwise make of it.

Where PyTorch's backward reads the result, overwriting the input costs nothing. Where it reads the input, autograd
copies the input before an in-place call, so that a separate result is cheaper. A bounded line (ReLU6) allows both:
its result also tells whether an input lay between the bounds.
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
"""From this many elements on, a separate autograd function costs less than writing the result elsewhere."""


class _Bounded(torch.autograd.Function):
    """The function aten.hardtanh, written over its input; its gradient is written over the result's where nothing else
    holds that."""

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
    """Return what to call for an activation that may overwrite its input where autograd records; None for its in-place
    form.

    `is_alone` says that a single convolution is the only reader of the result, so that nothing else sees the memory of
    the incoming gradient.
    """
    if target == _HARDTANH:
        return partial(_bounded, is_alone)
    name = target.split(".")[1]
    return cast("Callable[..., Any]", getattr(_aten, name).default) if target in _READS_INPUT else None

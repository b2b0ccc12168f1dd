"""The precision that a module computes in: float32, or lower under torch.autocast.

A capture inside `torch.autocast(...)` is of the module as it computes there: the region is put around the module's own
forward and around its loss, so that torch.export keeps it, and its casts become operators (autocast.py). Weights stay
as they are, and so do their gradients: the cast of a weight is an operator, whose gradient is float32 again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from manyhands.facts.errors import BadValue
from manyhands.facts.precision import FLOAT32

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> the type that autocast computes in."""
_DEVICE_TYPES = ("cpu", "cuda")


class Region(NamedTuple):
    """A region under torch.autocast."""

    device_type: str
    dtype: torch.dtype


def surrounding() -> Region | None:
    """Return the region that is entered now; None: there is none."""
    for device_type in _DEVICE_TYPES:
        if torch.is_autocast_enabled(device_type):
            return Region(device_type, torch.get_autocast_dtype(device_type))
    return None


def entered(region: Region | None) -> AbstractContextManager[object]:
    """Return a context that enters a region; None: nothing."""
    return nullcontext() if region is None else torch.autocast(region.device_type, region.dtype)


@contextmanager
def left() -> Iterator[None]:
    """Leave the region that is entered now, within this context: a graph has its casts as operators."""
    region = surrounding()
    with nullcontext() if region is None else torch.autocast(region.device_type, enabled=False):
        yield


def under(precision: str, module: nn.Module | None = None) -> AbstractContextManager[object]:
    """Return a context in which a module computes in a precision. Which operators compute in which type follows from
    the type of the device where the module is."""
    if precision == FLOAT32:
        return nullcontext()
    device_type = "cpu" if module is None else next((p.device.type for p in module.parameters()), "cpu")
    return torch.autocast(device_type if device_type in _DEVICE_TYPES else "cpu", LOWER[precision])


def check_precision(precision: str, module: nn.Module) -> None:
    """Refuse a module whose weights a lower precision does not fit: they are kept, and their gradients added up, in
    float32."""
    if precision == FLOAT32:
        return
    for name, parameter in module.named_parameters():
        is_wide = parameter.dtype == torch.float64 or parameter.is_complex()
        if is_wide or (parameter.requires_grad and parameter.dtype != torch.float32):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadValue(
                f"precision is '{precision}', which keeps weights in float32; the module's {name} is {kind}.",
                hint="Call model.float() first, or leave precision out: the module then computes in its own type.",
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    _check_computes(precision)


def _check_computes(precision: str) -> None:
    """Refuse a precision in which this machine's PyTorch cannot convolve or multiply, forward and backward."""
    try:
        data = torch.ones(1, 1, 2, 2, dtype=LOWER[precision], requires_grad=True)
        torch.conv2d(data, torch.ones(1, 1, 1, 1, dtype=LOWER[precision])).flatten(1).mm(
            torch.ones(4, 1, dtype=LOWER[precision])
        ).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BadValue(
            f"precision is '{precision}', in which PyTorch {torch.__version__} cannot compute here: {error}",
            hint="Use precision='float32', or a newer PyTorch.",
        ) from error

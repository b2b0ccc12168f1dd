"""Conversion of shapes as torch.export gives them, with symbols, or as a trace does (tracing.py), into shapes for one
sample and the axis of the batch."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.facts.errors import CaptureFailed
from manyhands.facts.network import DTYPE_BYTES, TensorSpec
from manyhands.graph.nodes import SampleCount

SIZES = "sizes_by_samples"
"""The attribute of a traced tensor that tells its shape, with multiples of the number of samples (tracing.py)."""


def at(where: str) -> str:
    """Return the line of an error that says where, if that is known."""
    return f"\n  at {where}" if where else ""


def sized(value: Any, where: str) -> int | SampleCount:
    """Return an integer, or a multiple of the number of samples."""
    if isinstance(value, (int, SampleCount)):
        return value
    expression = value.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return int(expression)
    counts = [int(expression.subs(dict.fromkeys(symbols, n))) for n in (1, 2, 3, 7)]
    if len(symbols) > 1 or counts != [n * counts[0] for n in (1, 2, 3, 7)]:
        raise CaptureFailed(
            f"A size ({expression}) is not a multiple of the batch size.{at(where)}",
            hint="Every tensor's axes must be fixed or a multiple of the batch.",
        )
    return SampleCount(counts[0])


def output_specs(name: str, value: Any, where: str) -> tuple[TensorSpec, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(f"{name}:{i}", item, where) for i, item in enumerate(value))
    return (spec_of(name, value, where),)


def spec_of(name: str, value: Any, where: str) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise CaptureFailed(f"An operator returns a {type(value).__name__}, not a tensor.{at(where)}")
    shape: list[int] = []
    growing: list[int] = []
    for axis, size in enumerate(getattr(value, SIZES, value.shape)):
        extent = sized(size, where)
        if isinstance(extent, SampleCount):
            growing.append(axis)
            extent = extent.factor
        shape.append(extent)
    if len(growing) > 2:
        raise CaptureFailed(
            f"A tensor has {len(growing)} axes that grow with the batch: {tuple(value.shape)}.{at(where)}",
            hint="Two are taken, for what is between every two samples; make no more of them at once.",
        )
    first, second = (*growing, None, None)[:2]
    return TensorSpec(name, tuple(shape), dtype_name(value.dtype, where), first, second_batch_axis=second)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise CaptureFailed(f"dtype {text} is not supported.{at(where)}")
    return text

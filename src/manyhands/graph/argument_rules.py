"""Rules that an operator's arguments must fulfil together, where PyTorch's own kernels do not check them.

Most operators check their arguments themselves and raise. The operators here do not, or not on every processor: kernels
of recurrent layers and of attention read beyond the end of a tensor that is too small, and x86 ends a process that
divides by zero. A rule refuses nothing that PyTorch's modules and functions make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from manyhands.facts.errors import BadGraph
from manyhands.graph import ops
from manyhands.graph.argument_types import parameters
from manyhands.graph.recurrent_rules import check_recurrent

LARGEST_WINDOW = 2**24
"""The most elements along an axis that a window spans, moves by or is padded with: kernels count them in 32 bits."""

_POSITIVE = frozenset(
    {"groups", "num_groups", "stride", "dilation", "kernel_size", "upscale_factor", "downscale_factor", "chunks"}
)
"""Arguments by which an operator divides, or with which it counts from 1 on."""
_WINDOW = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding"})
_REDUCTIONS = (0, 1, 2)
"""The valid reductions: none, mean, sum."""

Rule = Callable[[Sequence[Any]], None]


def check_arguments(target: str, arguments: Sequence[Any]) -> None:
    """Raise BadGraph where an operator's kernel could not be trusted with these arguments."""
    positional, _ = parameters(target)
    named = {parameter.name: argument for parameter, argument in zip(positional, arguments, strict=False)}
    for name in _POSITIVE.intersection(named):
        _check_each(name, named[name], 1)
    if target in _WINDOWED:
        _check_window(named)
    if named.get("reduction", 0) not in _REDUCTIONS:
        raise BadGraph(f"reduction is {named['reduction']}; it must be 0 (none), 1 (mean) or 2 (sum)")
    if target in ops.RESAMPLING:
        _check_scales(named)
    if target == "aten.embedding.default":
        _check_padding_index(named)
    if target in EVERY_CALL:
        EVERY_CALL[target](arguments)


def guarded(target: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its arguments checked each time: a share or a tile may bring other tensors than the graph
    says."""
    rule = EVERY_CALL[target]

    @wraps(call, updated=())
    def checked(*arguments: Any, **options: Any) -> Any:
        rule(arguments)
        return call(*arguments, **options)

    return checked


def _check_each(name: str, value: Any, least: int, most: float = math.inf) -> None:
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if not least <= number <= most:
            limits = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise BadGraph(f"{name} is {value!r:.80}; it must be {limits}")


_WINDOWED = ops.CONVOLUTION | ops.POOLING


def _check_window(named: dict[str, Any]) -> None:
    """Refuse a window of a convolution or pooling that spans, or is padded with, too many elements."""
    for name in _WINDOW.intersection(named):
        if not isinstance(named[name], str):  # padding="same"
            _check_each(name, named[name], 0, LARGEST_WINDOW)
    weight = named.get("weight")
    extents = list(weight.shape[2:]) if isinstance(weight, torch.Tensor) else named.get("kernel_size", 1)
    span = _largest(extents) * _largest(named.get("dilation", 1))
    if span > LARGEST_WINDOW:
        raise BadGraph(f"its window spans {span} elements; at most {LARGEST_WINDOW} are taken")


def _largest(value: Any) -> int:
    return max(value, default=1) if isinstance(value, (list, tuple)) else value


def _check_scales(named: dict[str, Any]) -> None:
    """Refuse a scale that contradicts the sizes: kernels turn places into integers with it, whatever it is."""
    data, sizes = named.get("input", named.get("self")), named.get("output_size")
    extents = data.shape[2:] if isinstance(data, torch.Tensor) else ()
    names = ("scales_d", "scales_h", "scales_w")[-len(extents) :]
    scales = named.get("scale_factors") or [named.get(name) for name in names]
    for place, scale in enumerate(scales):
        if scale is None:
            continue
        if not 0 < scale < LARGEST_WINDOW or place >= len(extents):
            raise BadGraph(f"a scale is {scale}; it must be more than 0, and one for each axis that is resampled")
        made = math.floor(extents[place] * scale)
        if sizes and (place >= len(sizes) or abs(made - sizes[place]) > 1):
            raise BadGraph(f"scale {scale} makes {made} of {extents[place]} elements; its sizes are {sizes!r:.80}")


def _check_padding_index(named: dict[str, Any]) -> None:
    rows, index = named["weight"], named.get("padding_idx", -1)
    if isinstance(rows, torch.Tensor) and rows.dim() and not -max(1, rows.shape[0]) <= index < max(1, rows.shape[0]):
        raise BadGraph(f"padding_idx is {index} in a table of {rows.shape[0]} rows")


def _check_attention(arguments: Sequence[Any]) -> None:
    """Refuse attention without a value for each key: the CPU's kernel reads as many keys as there are values."""
    query, key, value = arguments[:3]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
            raise BadGraph(f"its {name} is {_text(tensor)}; it must be floats in 2 axes or more")
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise BadGraph(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: query and key "
            f"must be as wide, key and value as many"
        )


def _text(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.40}"


def _check_division(arguments: Sequence[Any]) -> None:
    """Refuse to divide the smallest integer by -1, which has no result: x86 ends the process."""
    dividend, divisor = arguments[:2]
    if any(
        isinstance(operand, torch.Tensor) and (isinstance(operand, FakeTensor) or not operand.is_cpu)
        for operand in arguments[:2]
    ):
        return  # nothing is computed, or on a processor that has no such trap
    dtype = torch.result_type(dividend, divisor)
    if dtype in (torch.int32, torch.int64) and _has(divisor, -1) and _has(dividend, torch.iinfo(dtype).min):
        raise BadGraph(f"{torch.iinfo(dtype).min} is divided by -1, which no {dtype} holds")


def _has(value: Any, number: int) -> bool:
    return bool((value == number).any()) if isinstance(value, torch.Tensor) else value == number


def _recurrent(target: str) -> Rule:
    return lambda arguments: check_recurrent(target, arguments)


EVERY_CALL: dict[str, Rule] = {
    **{target: _recurrent(target) for target in ops.RECURRENT},
    "aten.scaled_dot_product_attention.default": _check_attention,
    "aten.floor_divide.default": _check_division,
    "aten.div.Tensor_mode": _check_division,
    "aten.remainder.Scalar": _check_division,
    "aten.fmod.Scalar": _check_division,
}
"""Rules of operators that are checked again before every call, on the tensors it is made with."""

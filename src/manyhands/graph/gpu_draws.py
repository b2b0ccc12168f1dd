"""Counter-based random numbers on a GPU, each draw with one kernel: PyTorch's operators would take some 25 for the same
bits (random.py), and read and write them as often.

A dropout draws again in its backward pass instead of keeping its mask, which takes no memory. Where PyTorch cannot
compile a kernel at run time (it came with 2.9; a library may be missing), these functions return None, and draws are
made of PyTorch's operators.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from manyhands.facts.boxes import Box

Keys = tuple[int, int] | torch.Tensor
"""The two keys of a draw: numbers, or a row of int32 in a GPU's memory."""
_AXES = 4
"""The most axes of a box, once those are merged that lie side by side in memory."""
_THREADS = 256
_MOST_ELEMENTS = 2**31 - _THREADS

_SOURCE = """
static __device__ unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

struct Drawn { unsigned place, sample; };

static __device__ void step(Drawn& at, unsigned& rest, int extent, int low, int stride, int rows) {
  unsigned index = low + rest % extent;
  rest /= extent;
  if (rows > 0) {
    at.sample = index / rows;
    index %= rows;
  }
  at.place += index * (unsigned)stride;
}

#define GEOMETRY const int* keys, int in_memory, int key_1, int key_2, int count, \\
  int e0, int l0, int s0, int r0, int e1, int l1, int s1, int r1, \\
  int e2, int l2, int s2, int r2, int e3, int l3, int s3, int r3

static __device__ int drawn(unsigned element, GEOMETRY) {
  Drawn at = {0, 0};
  step(at, element, e3, l3, s3, r3);
  step(at, element, e2, l2, s2, r2);
  step(at, element, e1, l1, s1, r1);
  step(at, element, e0, l0, s0, r0);
  unsigned first = in_memory ? keys[0] : key_1, second = in_memory ? keys[1] : key_2;
  return (int)mix(mix(at.place ^ mix(at.sample ^ first)) + mix(at.sample ^ second));
}

#define DRAW drawn(element, keys, in_memory, key_1, key_2, count, \\
  e0, l0, s0, r0, e1, l1, s1, r1, e2, l2, s2, r2, e3, l3, s3, r3)
#define ELEMENT unsigned element = blockIdx.x * blockDim.x + threadIdx.x; if (element >= count) return

extern "C" __global__ void bits(int* out, GEOMETRY) {
  ELEMENT;
  out[element] = DRAW;
}

extern "C" __global__ void dropout_float(float* out, const float* x, double factor, int limit, GEOMETRY) {
  ELEMENT;
  out[element] = x[element] * (DRAW < limit ? (float)factor : 0.0f);
}

extern "C" __global__ void dropout_double(double* out, const double* x, double factor, int limit, GEOMETRY) {
  ELEMENT;
  out[element] = x[element] * (DRAW < limit ? factor : 0.0);
}

extern "C" __global__ void dropout_bfloat16(
    unsigned short* out, const unsigned short* x, double factor, int limit, GEOMETRY) {
  ELEMENT;
  unsigned bits = __float_as_uint(
    __uint_as_float((unsigned)x[element] << 16) * (DRAW < limit ? (float)factor : 0.0f));
  bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  out[element] = is_nan ? 0x7FFF : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to the nearest, ties to even
}

extern "C" __global__ void dropout_half(
    unsigned short* out, const unsigned short* x, double factor, int limit, GEOMETRY) {
  ELEMENT;
  float value;
  unsigned short rounded;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x[element]));
  value *= DRAW < limit ? (float)factor : 0.0f;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  out[element] = rounded;
}
"""

_DROPOUTS = {
    torch.float32: "dropout_float", torch.float64: "dropout_double", torch.bfloat16: "dropout_bfloat16",
    torch.float16: "dropout_half",
}  # fmt: skip


class _Axis(NamedTuple):
    """An axis of a box: its extent, where it begins, what a step along it adds to the place inside a sample."""

    extent: int = 1
    low: int = 0
    stride: int = 0
    rows: int = 0
    """The rows of a sample, along the axis of samples; elsewhere 0."""


def drawn_bits(
    keys: Keys, box: Box, sample_shape: Sequence[int], batch_axis: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return the bits of a draw, as `random.bits` describes them."""
    axes, kernel = merged_axes(box, sample_shape, batch_axis), _kernel("bits", device.index or 0)
    if axes is None or kernel is None:
        return None
    out = torch.empty(box.shape, dtype=torch.int32, device=device)
    _launch(kernel, out, [out], keys, axes)
    return out


def dropout(
    x: torch.Tensor, keys: Keys, box: Box, sample_shape: Sequence[int], batch_axis: int | None, limit: int,
    factor: float,
) -> torch.Tensor | None:  # fmt: skip
    """Return x, of which elements with bits below `limit` are multiplied by `factor` and the others are 0."""
    if x.dtype not in _DROPOUTS or not x.is_contiguous() or not -(2**31) <= limit < 2**31:
        return None
    axes, kernel = merged_axes(box, sample_shape, batch_axis), _kernel(_DROPOUTS[x.dtype], x.device.index or 0)
    if axes is None or kernel is None:
        return None
    dropped: torch.Tensor = _Dropout.apply(x, kernel, keys, axes, limit, factor)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    """A dropout that draws again in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kernel: Callable[..., None], keys: Keys, axes: Sequence[_Axis], limit: int,
        factor: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.draw = kernel, keys, axes, limit, factor
        return _dropped(x, *ctx.draw)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _dropped(gradients[0].contiguous(), *ctx.draw), None, None, None, None, None


def _dropped(
    x: torch.Tensor, kernel: Callable[..., None], keys: Keys, axes: Sequence[_Axis], limit: int, factor: float
) -> torch.Tensor:
    out = torch.empty_like(x)
    _launch(kernel, out, [out, x, float(factor), limit], keys, axes)
    return out


def _launch(
    kernel: Callable[..., None], out: torch.Tensor, arguments: list[Any], keys: Keys, axes: Sequence[_Axis]
) -> None:
    count = out.numel()
    if not count:
        return
    in_memory = isinstance(keys, torch.Tensor)
    row = keys if in_memory else _no_keys(out.device)
    first, second = (0, 0) if isinstance(keys, torch.Tensor) else keys
    _enter_gpu(out.device)
    with torch.cuda.device(out.device):
        kernel(
            ((count + _THREADS - 1) // _THREADS, 1, 1),
            (_THREADS, 1, 1),
            [*arguments, row, int(in_memory), first, second, count, *itertools.chain.from_iterable(axes)],
        )


class _Entered(threading.local):
    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_entered = _Entered()


def _enter_gpu(device: torch.device) -> None:
    """Make a GPU's context this thread's: PyTorch's own kernels do so, which a thread of autograd may not have launched
    yet, and a compiled kernel does not."""
    if device not in _entered.devices:
        torch.zeros((), device=device)
        _entered.devices.add(device)


@lru_cache(maxsize=1024)
def merged_axes(box: Box, sample_shape: Sequence[int], batch_axis: int | None) -> tuple[_Axis, ...] | None:
    """Return the axes of a box, those merged that the box has whole and that lie side by side; None: there are too
    many axes, or elements."""
    axes: list[_Axis] = []
    stride = 1
    for axis in range(len(sample_shape) - 1, -1, -1):
        low, high = box.intervals[axis]
        extent = sample_shape[axis]
        rows = extent if axis == batch_axis else 0
        inner = axes[-1] if axes else None
        is_whole_inside = (
            inner is not None and not inner.rows and not inner.low and inner.extent * inner.stride == stride
        )
        if inner is not None and is_whole_inside and not rows and (low, high) == (0, extent):
            axes[-1] = inner._replace(extent=inner.extent * extent)
        else:
            axes.append(_Axis(high - low, low, stride, rows))
        stride *= extent
    if len(axes) > _AXES or stride >= 2**31 or box.volume > _MOST_ELEMENTS:
        return None
    return (*(_Axis() for _ in range(_AXES - len(axes))), *reversed(axes))


@lru_cache(maxsize=8)
def _no_keys(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _kernel(name: str, device_index: int) -> Callable[..., None] | None:
    """Return a compiled kernel of _SOURCE for a GPU; None where it cannot be compiled."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None or torch.version.hip is not None:
        return None
    try:
        with torch.cuda.device(device_index):
            kernel: Callable[..., None] = compiler(_SOURCE, name)
    except (RuntimeError, OSError, ValueError, TypeError, AttributeError):
        return None
    return kernel

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
_PER_THREAD = 4
"""Elements side by side that one thread draws: it divides to find its place among the axes once for all of them, and
reads and writes them at once."""
_MOST_ELEMENTS = 2**31 - _THREADS * _PER_THREAD

SOURCE = """
typedef unsigned short Half;
typedef unsigned long long Address;
template <typename T> struct alignas(sizeof(T) * PER_THREAD) Block { T of[PER_THREAD]; };

static __device__ unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

#define GEOMETRY const int* keys, int in_memory, int key_1, int key_2, int count, \\
  int e0, int l0, int s0, int r0, int e1, int l1, int s1, int r1, \\
  int e2, int l2, int s2, int r2, int e3, int l3, int s3, int r3
#define GIVEN keys, in_memory, key_1, key_2, count, e0, l0, s0, r0, e1, l1, s1, r1, e2, l2, s2, r2, e3, l3, s3, r3

// The bits of elements one after the other. Axis 3 is the innermost; the kernel is compiled for AXES of them.
struct Draws {
  unsigned first_key, second_key, place, sample_1, sample_2;
  int left;  // elements up to the end of the innermost axis

  __device__ Draws(GEOMETRY) {
    first_key = in_memory ? keys[0] : key_1;
    second_key = in_memory ? keys[1] : key_2;
    left = 0;
  }

  __device__ void go_to(unsigned element, GEOMETRY) {
    unsigned sample = 0, rest = element;
    place = 0;
    left = r3 > 0 ? 0 : e3 - 1 - rest % e3;
    along(rest, sample, e3, l3, s3, r3);
#if AXES > 1
    along(rest, sample, e2, l2, s2, r2);
#endif
#if AXES > 2
    along(rest, sample, e1, l1, s1, r1);
#endif
#if AXES > 3
    along(rest, sample, e0, l0, s0, r0);
#endif
    sample_1 = mix(sample ^ first_key);
    sample_2 = mix(sample ^ second_key);
  }

  __device__ void along(unsigned& rest, unsigned& sample, int extent, int low, int stride, int rows) {
    unsigned index = low + rest % extent;
    rest /= extent;
    if (rows > 0) {
      sample = index / rows;
      index %= rows;
    }
    place += index * (unsigned)stride;
  }

  __device__ int next(int is_first, unsigned element, GEOMETRY) {
    if (is_first || left == 0) {
      go_to(element, GIVEN);
    } else {
      place += s3;
      --left;
    }
    return (int)mix(mix(place ^ sample_1) + sample_2);
  }
};

struct Bits {
  typedef int Type;
  static __device__ int of(int, int bits, double, int) { return bits; }
};

struct Float {
  typedef float Type;
  static __device__ float of(float x, int bits, double factor, int limit) {
    return x * (bits < limit ? (float)factor : 0.0f);
  }
};

struct Double {
  typedef double Type;
  static __device__ double of(double x, int bits, double factor, int limit) {
    return x * (bits < limit ? factor : 0.0);
  }
};

struct Bfloat16 {
  typedef Half Type;
  static __device__ Half of(Half x, int bits, double factor, int limit) {
    float value = __uint_as_float((unsigned)x << 16) * (bits < limit ? (float)factor : 0.0f);
    unsigned made = __float_as_uint(value);
    bool is_nan = (made & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? 0x7FFF : (made + 0x7FFFu + ((made >> 16) & 1u)) >> 16;  // to the nearest, ties to even
  }
};

struct Float16 {
  typedef Half Type;
  static __device__ Half of(Half x, int bits, double factor, int limit) {
    float value;
    Half rounded;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    value *= bits < limit ? (float)factor : 0.0f;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
  }
};

template <typename Operation, typename T>
static __device__ void fill(T* out, const T* x, double factor, int limit, GEOMETRY) {
  unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) * PER_THREAD;
  if (first >= count) return;
  Draws draws(GIVEN);
  Block<T> block;
  bool is_whole = first + PER_THREAD <= count && ((Address)out | (Address)x) % sizeof(block) == 0;
  if (is_whole && x) block = *(const Block<T>*)(x + first);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    if (first + i >= count) break;
    if (!is_whole && x) block.of[i] = x[first + i];
    block.of[i] = Operation::of(block.of[i], draws.next(i == 0, first + i, GIVEN), factor, limit);
    if (!is_whole) out[first + i] = block.of[i];
  }
  if (is_whole) *(Block<T>*)(out + first) = block;
}

extern "C" __global__ void bits(int* out, GEOMETRY) { fill<Bits>(out, (const int*)0, 0.0, 0, GIVEN); }

#define DROPOUT(NAME, OPERATION) extern "C" __global__ void NAME( \\
  OPERATION::Type* out, const OPERATION::Type* x, double factor, int limit, GEOMETRY) { \\
  fill<OPERATION>(out, x, factor, limit, GIVEN); \\
}
DROPOUT(dropout_float, Float)
DROPOUT(dropout_double, Double)
DROPOUT(dropout_bfloat16, Bfloat16)
DROPOUT(dropout_half, Float16)
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
    axes = merged_axes(box, sample_shape, batch_axis)
    kernel = None if axes is None else _kernel("bits", len(axes), device.index or 0)
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
    axes = merged_axes(box, sample_shape, batch_axis)
    kernel = None if axes is None else _kernel(_DROPOUTS[x.dtype], len(axes), x.device.index or 0)
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
    per_block, all_axes = _THREADS * _PER_THREAD, (*(_Axis() for _ in range(_AXES - len(axes))), *axes)
    with torch.cuda.device(out.device):
        kernel(
            ((count + per_block - 1) // per_block, 1, 1),
            (_THREADS, 1, 1),
            [*arguments, row, int(in_memory), first, second, count, *itertools.chain.from_iterable(all_axes)],
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
    """Return the axes of a box, at least one, those merged that the box has whole and that lie side by side; None:
    there are too many axes, or elements."""
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
    return tuple(reversed(axes)) or (_Axis(),)


def source_for(axes: int) -> str:
    """Return the kernels' source for boxes of so many axes."""
    return f"#define AXES {axes}\n#define PER_THREAD {_PER_THREAD}\n{SOURCE}"


@lru_cache(maxsize=8)
def _no_keys(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _kernel(name: str, axes: int, device_index: int) -> Callable[..., None] | None:
    """Return a compiled kernel of SOURCE for a GPU and so many axes; None where it cannot be compiled."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None or torch.version.hip is not None:
        return None
    try:
        with torch.cuda.device(device_index):
            kernel: Callable[..., None] = compiler(source_for(axes), name)
    except (RuntimeError, OSError, ValueError, TypeError, AttributeError):
        return None
    return kernel

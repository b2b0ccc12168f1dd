"""Draws with one kernel on a GPU give the bits of draws made of PyTorch's operators."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.boxes import Box
from manyhands.graph import gpu_draws, random
from manyhands.graph.gpu_draws import merged_axes
from manyhands.graph.random import Draw, KeyTable, bits, keep_mask, keys_of, limit_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@st.composite
def drawn_boxes(draw: st.DrawFn) -> tuple[Box, tuple[int, ...], int | None]:
    """A box of a tensor, the shape of one sample, and the axis of samples."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    batch_axis = draw(st.none() | st.integers(0, len(shape) - 1))
    intervals = []
    for axis, extent in enumerate(shape):
        most = 4 * extent if axis == batch_axis else extent
        low = draw(st.integers(0, most - 1))
        high = draw(st.integers(low + 1, most))
        intervals.append((0, extent) if axis != batch_axis and draw(st.booleans()) else (low, high))
    return Box(tuple(intervals)), shape, batch_axis


@settings(max_examples=200, deadline=None)
@given(drawn_boxes())
def test_merged_axes_lead_to_the_same_places(drawn: tuple[Box, tuple[int, ...], int | None]) -> None:
    """The kernel's arithmetic, in Python, against the places that numpy's draws use."""
    box, shape, batch_axis = drawn
    axes = merged_axes(box, shape, batch_axis)
    if axes is None:
        assert len(shape) > 4
        return
    place, sample = numpy.zeros(box.volume, numpy.int64), numpy.zeros(box.volume, numpy.int64)
    rest = numpy.arange(box.volume)
    for axis in reversed(axes):
        index, rest = axis.low + rest % axis.extent, rest // axis.extent
        if axis.rows:
            sample, index = index // axis.rows, index % axis.rows
        place += index * axis.stride
    expected_place, expected_sample = random._places.__wrapped__(box, shape, batch_axis)
    assert (place.reshape(box.shape) == expected_place).all()
    assert (sample.reshape(box.shape) == numpy.broadcast_to(expected_sample, box.shape)).all()


def test_axes_that_lie_side_by_side_are_merged() -> None:
    axes = merged_axes(Box(((4, 8), (0, 12), (0, 16), (0, 20))), (1, 12, 16, 20), 0)
    assert axes is not None
    assert [(axis.extent, axis.rows) for axis in axes] == [(4, 1), (12 * 16 * 20, 0)]
    assert merged_axes(Box(((0, 2),) * 6), (4,) * 6, None) is None
    assert merged_axes(Box(((0, 1), (0, 2**31))), (1, 2**31), 0) is None


BOXES = [
    (Box(((0, 8), (0, 70))), (1, 70), 0),
    (Box(((3, 7), (0, 12), (0, 33))), (1, 12, 33), 0),
    (Box(((6, 12), (1, 9))), (3, 10), 0),
    (Box(((2, 5), (4, 10), (1, 30), (0, 31))), (5, 12, 40, 31), None),
    (Box(((0, 7), (0, 2), (2, 6))), (7, 1, 9), 1),
]


_ON_HOST = """
#include <stddef.h>
#include <string.h>
#define __device__
#define __global__
#define asm(...)
static struct { unsigned x; } blockIdx, blockDim, threadIdx;
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
"""
_RUN_ON_HOST = """
#define RUN(KERNEL, TAKEN, GIVEN_FIRST) extern "C" void run_##KERNEL TAKEN { \\
  blockDim.x = 256; \\
  for (blockIdx.x = 0; blockIdx.x * blockDim.x * PER_THREAD < (unsigned)count; ++blockIdx.x) \\
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) KERNEL GIVEN_FIRST; \\
}
RUN(bits, (int* out, GEOMETRY), (out, GIVEN))
RUN(dropout_float, (float* out, const float* x, double factor, int limit, GEOMETRY), (out, x, factor, limit, GIVEN))
RUN(dropout_bfloat16, (Half* out, const Half* x, double factor, int limit, GEOMETRY), (out, x, factor, limit, GIVEN))
"""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    """The kernels' source, compiled for a processor: number of axes -> library."""
    compiler, folder = shutil.which("g++") or shutil.which("clang++"), tmp_path_factory.mktemp("kernels")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")

    def build(axes: int) -> ctypes.CDLL:
        source, library = folder / f"{axes}.cpp", folder / f"{axes}.so"
        source.write_text(_ON_HOST + gpu_draws.source_for(axes) + _RUN_ON_HOST)
        subprocess.run([compiler, "-w", "-O1", "-shared", "-fPIC", source, "-o", library], check=True, timeout=120)
        return ctypes.CDLL(str(library))

    return {axes: build(axes) for axes in range(1, 5)}


def run_on_host(
    libraries: dict[int, ctypes.CDLL], kernel: str, out: torch.Tensor, first: list[object], draw: Draw,
    drawn: tuple[Box, tuple[int, ...], int | None],
) -> bool:  # fmt: skip
    """Fill `out` by a kernel; False: it has too many axes for one."""
    axes, keys = merged_axes(*drawn), keys_of(draw)
    if axes is None:
        return False
    padded = (*(gpu_draws._Axis() for _ in range(4 - len(axes))), *axes)
    assert isinstance(keys, tuple)
    numbers = [0, *(ctypes.c_int(key) for key in keys), out.numel(), *itertools.chain.from_iterable(padded)]
    run = getattr(libraries[len(axes)], f"run_{kernel}")
    run(ctypes.c_void_p(out.data_ptr()), *first, ctypes.c_void_p(0), *numbers)
    return True


def test_the_kernels_arithmetic_gives_the_same_bits(on_host: dict[int, ctypes.CDLL]) -> None:
    @settings(max_examples=200, deadline=None)
    @given(drawn_boxes())
    def check(drawn: tuple[Box, tuple[int, ...], int | None]) -> None:
        draw, (box, shape, batch_axis) = Draw(7, 3, "dropout_1"), drawn
        out = torch.empty(box.shape, dtype=torch.int32)
        if run_on_host(on_host, "bits", out, [], draw, drawn):
            assert torch.equal(out, bits(draw, box, shape, batch_axis, torch.device("cpu")))

    check()


@pytest.mark.parametrize(("box", "shape", "batch_axis"), BOXES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_arithmetic_drops_the_same(
    on_host: dict[int, ctypes.CDLL], box: Box, shape: tuple[int, ...], batch_axis: int | None, offset: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Where blocks of elements lie as the hardware wants them, and where not; memory around stays as it is."""
    draw, p = Draw(1, 2, "dropout"), 0.3
    x = torch.randn(box.volume + offset, generator=torch.Generator().manual_seed(0)).to(dtype)[offset:].view(box.shape)
    memory = torch.full((box.volume + offset + 1,), 7, dtype=dtype)
    out, factor = memory[offset:-1], torch.ones((), dtype=dtype).div_(1 - p)
    first = [ctypes.c_void_p(x.data_ptr()), ctypes.c_double(float(factor)), limit_of(1 - p)]
    kernel = "dropout_float" if dtype == torch.float32 else "dropout_bfloat16"
    assert run_on_host(on_host, kernel, out, first, draw, (box, shape, batch_axis))
    mask = keep_mask(bits(draw, box, shape, batch_axis, torch.device("cpu")), 1 - p, dtype).div_(1 - p)
    assert torch.equal(out.view(box.shape), x * mask)
    assert (memory[:offset] == 7).all()
    assert memory[-1] == 7


@needs_gpu
@pytest.mark.parametrize(("box", "shape", "batch_axis"), BOXES)
def test_bits_on_a_gpu_are_those_on_a_processor(box: Box, shape: tuple[int, ...], batch_axis: int | None) -> None:
    device, draw = torch.device("cuda"), Draw(7, 3, "dropout_1")
    drawn = gpu_draws.drawn_bits(keys_of(draw), box, shape, batch_axis, device)
    expected = bits(draw, box, shape, batch_axis, torch.device("cpu"))
    if drawn is not None:
        assert torch.equal(drawn.cpu(), expected)
    assert drawn is not None or getattr(torch.cuda, "_compile_kernel", None) is None
    assert torch.equal(bits(draw, box, shape, batch_axis, device).cpu(), expected)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_dropout_on_a_gpu_is_the_mask_times_the_tensor(dtype: torch.dtype) -> None:
    """Forward and backward, bit by bit; infinite and undefined numbers as PyTorch multiplies them."""
    box, shape, p = Box(((2, 6), (0, 300))), (1, 300), 0.3
    draw = Draw(1, 2, "dropout")
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :4] = torch.tensor([math.inf, math.nan, -0.0, -math.inf], dtype=dtype)
    x = x.cuda().requires_grad_()
    out = gpu_draws.dropout(
        x, keys_of(draw), box, shape, 0, limit_of(1 - p), float(torch.ones((), dtype=dtype).div_(1 - p))
    )
    if out is None:
        pytest.skip("this PyTorch compiles no kernels")
    gradient = torch.randn(4, 300, device="cuda").to(dtype)
    out.backward(gradient)
    mask = keep_mask(bits(draw, box, shape, 0, torch.device("cuda")), 1 - p, dtype).div_(1 - p)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient * mask)
    torch.testing.assert_close(out.detach(), x.detach() * mask, rtol=0, atol=0, equal_nan=True)


@needs_gpu
def test_a_captured_draw_reads_the_keys_of_its_step() -> None:
    """Of a CUDA graph that draws in its backward pass, too, each step has its own mask."""
    device = torch.device("cuda")
    box, shape = Box(((0, 4), (0, 100))), (1, 100)
    table, x = KeyTable(device), torch.ones(4, 100, device=device, requires_grad=True)

    def passes(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        out = gpu_draws.dropout(x, keys_of(draw), box, shape, 0, limit_of(0.5), 2.0)
        if out is None:
            pytest.skip("this PyTorch compiles no kernels")
        (gradient,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), gradient

    eager = [passes(Draw(5, step, "d"))[0] for step in (0, 1)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with table.recording(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out, gradient = passes(Draw(5, 0, "d"))
    for step, expected in enumerate(eager):
        table.renew(step)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(gradient, expected)
    assert not torch.equal(eager[0], eager[1])

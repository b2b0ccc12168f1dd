"""Read rules against torch: `demand` and `touched` miss no element that matters, and windows are tight.

What matters is found by trying: the Jacobian of a small float64 operator, or, where that is flat (max-pooling), every
input element changed by a lot in both directions at several random inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.facts.boxes import Box
from manyhands.facts.network import TensorSpec
from manyhands.facts.reads import Blocks, Read, Whole, Window
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, values_of
from manyhands.graph.piece import Context, Piece
from manyhands.graph.read_rules import reads_of
from manyhands.graph.weights import Weights

SAMPLES = 2
SLICE, END = torch.ops.aten.slice.Tensor, 2**63 - 1  # x[:, 2:5] would be two operators
SETTINGS = settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)


class Calls(nn.Module):
    """One function as a module, with weights of its own where it needs any."""

    def __init__(self, function: Callable[..., Tensor], **weights: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, **dict(self.named_parameters()))


def one_node(graph: Graph) -> Node:
    (node,) = [node for node in graph.nodes if not node.updates]
    return node


def influence(graph: Graph, inputs: dict[str, Tensor], name: str, output: str) -> Tensor:
    """[output elements, input elements], true where the input element changes the output element."""
    piece = Piece(graph, Weights.copied(graph))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return piece({**inputs, name: x}, Context(training=False))[output].double().flatten()

    x = inputs[name]
    found = torch.zeros(run(x).numel(), x.numel(), dtype=torch.bool)
    for seed in range(2):
        base = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
        plain = run(base)
        for element in range(x.numel()):
            for change in (30.0, -30.0):
                moved = base.clone().flatten()
                moved[element] += change
                found[:, element] |= (run(moved.view(x.shape)) - plain).abs() > 1e-13
    return found


def hull(mask: Tensor) -> Box:
    """The smallest box with all true elements."""
    places = mask.nonzero()
    if not len(places):
        return Box(tuple((0, 0) for _ in mask.shape))
    return Box(tuple((int(p.min()), int(p.max()) + 1) for p in places.T))


def boxes(data: st.DataObject, shape: tuple[int, ...]) -> Box:
    intervals = []
    for extent in shape:
        low = data.draw(st.integers(0, extent - 1))
        intervals.append((low, data.draw(st.integers(low + 1, extent))))
    return Box(tuple(intervals))


def check(function: Callable[..., Tensor], *shapes: tuple[int, ...], data: st.DataObject, tight: bool = False,
          **weights: Tensor) -> Node:  # fmt: skip
    """Compare every input's rule with what matters, for drawn boxes. `tight`: the demand is no larger than needed."""
    module = Calls(function, **weights).double()
    example = tuple(torch.randn(SAMPLES, *shape, dtype=torch.float64) for shape in shapes)
    graph = capture(module, example)
    node = one_node(graph)
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in (*graph.inputs, *node.outputs)}
    inputs = dict(zip((spec.name for spec in graph.inputs), example, strict=True))
    output = node.outputs[0]
    shape = output.shape_for(SAMPLES)
    reads = reads_of(node, specs, {spec.name: spec for spec in graph.weights})
    assert [read.tensor for read in reads] == list(values_of(node))
    for read in reads:
        matters = influence(graph, inputs, read.tensor, output.name).view(*shape, *inputs[read.tensor].shape)
        _check_read(read, matters, shape, tuple(inputs[read.tensor].shape), data, tight)
    return node


def _check_read(
    read: Read, matters: Tensor, shape: tuple[int, ...], source: tuple[int, ...], data: st.DataObject, tight: bool
) -> None:
    for _ in range(4):
        box = boxes(data, shape)
        needed = hull(matters[box.slices()].flatten(0, len(shape) - 1).any(0))
        demand = read.demand(box, source)
        assert demand.contains(needed), f"output {box} needs {needed} of {read.tensor}, but {demand} is demanded"
        if tight:
            assert demand == needed or (demand.is_empty and needed.is_empty), f"{demand} is more than {needed}"
        box = boxes(data, source)
        index = (..., *box.slices())
        reached = hull(matters[index].flatten(len(shape)).any(-1))
        touched = read.touched(box, shape)
        assert touched.contains(reached), f"input {box} reaches {reached}, but only {touched} is touched"
    assert read.demand(Box.whole(shape), source).contains(hull(matters.flatten(0, len(shape) - 1).any(0)))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@st.composite
def windows(draw: st.DrawFn) -> dict[str, int]:
    kernel = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 2))
    return {
        "kernel": kernel, "stride": draw(st.integers(1, kernel)), "dilation": dilation,
        "padding": draw(st.integers(0, kernel // 2)), "size": draw(st.integers(dilation * (kernel - 1) + 1, 8)),
    }  # fmt: skip


@pytest.mark.slow
@SETTINGS
@given(window=windows(), groups=st.sampled_from([1, 2, 4]), data=st.data())
def test_convolution(window: dict[str, int], groups: int, data: st.DataObject) -> None:
    stride, padding, dilation = window["stride"], window["padding"], window["dilation"]
    weight = randn(4, 4 // groups, window["kernel"], 1)
    # A dilated window has holes; where one lies on the border, a box asks for a little more than matters.
    check(
        lambda x, weight: F.conv2d(x, weight, None, (stride, 1), (padding, 0), (dilation, 1), groups),
        (4, window["size"], 1), data=data, tight=dilation == 1, weight=weight,
    )  # fmt: skip


@pytest.mark.slow
@SETTINGS
@given(kernel=st.integers(1, 4), dilation=st.integers(1, 2), data=st.data())
def test_convolution_with_same_padding(kernel: int, dilation: int, data: st.DataObject) -> None:
    check(
        lambda x, weight: F.conv1d(x, weight, padding="same", dilation=dilation),
        (1, 8), data=data, tight=dilation == 1, weight=randn(1, 1, kernel),
    )  # fmt: skip


@pytest.mark.slow
@SETTINGS
@given(window=windows(), groups=st.sampled_from([1, 2]), extra=st.integers(0, 1), data=st.data())
def test_transposed_convolution(window: dict[str, int], groups: int, extra: int, data: st.DataObject) -> None:
    stride, padding, dilation = window["stride"], window["padding"], window["dilation"]
    assume(extra < max(stride, dilation) and window["size"] < 6)
    check(
        lambda x, weight: F.conv_transpose1d(x, weight, None, stride, padding, extra, groups, dilation),
        (2, window["size"]), data=data, weight=randn(2, 2, window["kernel"]),
    )  # fmt: skip


@pytest.mark.slow
@SETTINGS
@given(window=windows(), ceil=st.booleans(), data=st.data())
def test_pooling(window: dict[str, int], ceil: bool, data: st.DataObject) -> None:
    kernel, stride, padding, dilation, size = (window[k] for k in ("kernel", "stride", "padding", "dilation", "size"))
    check(
        lambda x: F.max_pool2d(x, (kernel, 1), (stride, 1), (padding, 0), (dilation, 1), ceil),
        (2, size, 1), data=data, tight=dilation == 1,
    )  # fmt: skip
    check(lambda x: F.avg_pool1d(x, kernel, stride, padding, ceil), (2, size), data=data, tight=True)


def test_pooling_without_a_stride_steps_by_its_kernel() -> None:
    @settings(SETTINGS, max_examples=3)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check(lambda x: F.max_pool2d(x, 2), (1, 5, 6), data=data, tight=True)

    run()


POINTWISE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "relu": (F.relu, ((2, 3),)),
    "add": (torch.add, ((2, 3), (2, 3))),
    "gate": (torch.mul, ((2, 3, 3), (2, 1, 1))),
    "broadcast over a shorter tensor": (lambda a, b: a * b, ((2, 3), (1, 1))),
}
MOVES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "concat": (lambda a, b, c: torch.cat((a, b, c), 1), ((2, 3), (1, 3), (4, 3))),
    "concat of one twice": (lambda a, b: torch.cat((a, b, a), 1), ((2, 2), (3, 2))),
    "concat from the right": (lambda a, b: torch.cat((a, b), -1), ((2, 3), (2, 4))),
    "slice": (lambda x: SLICE(x, 1, 2, 5), ((6, 2),)),
    "slice from the end": (lambda x: SLICE(x, 1, -3, END), ((6, 2),)),
    "slice to the end": (lambda x: SLICE(x, 2, 0, -2), ((2, 5),)),
    "slice with steps": (lambda x: SLICE(x, 1, 0, END, 2), ((6, 2),)),
    "slice before the start": (lambda x: SLICE(x, 1, -9, 3), ((6, 2),)),
    "select": (lambda x: x.select(1, 3), ((5, 2),)),
    "permute": (lambda x: x.permute(0, 3, 1, 2), ((2, 3, 4),)),
    "transpose": (lambda x: x.transpose(1, -1), ((2, 3, 4),)),
    "flatten": (lambda x: x.flatten(1), ((2, 3, 2),)),
    "view": (lambda x: x.view(x.shape[0], 3, 4), ((2, 6),)),
    "fold": (lambda x: x.reshape(-1, 3), ((2, 3),)),
    "pad": (lambda x: F.pad(x, (1, 2, 2, 0)), ((2, 3, 3),)),
    "pad by less than nothing": (lambda x: F.pad(x, (-1, 2)), ((2, 4),)),
    "reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"), ((2, 4),)),
    "repeat and cut": (lambda x: F.pad(x, (2, -1), mode="replicate"), ((2, 4),)),
    "split": (lambda x: x.split(3, 1), ((7, 2),)),
    "split to sizes": (lambda x: x.split((1, 4), -1), ((2, 5),)),
    "expand as": (lambda a, b: a.expand_as(b), ((2, 1, 1), (2, 3, 2))),
    "roll": (lambda x: torch.roll(x, 1, 2), ((2, 4),)),
    "flip": (lambda x: x.flip(1), ((4, 2),)),
    "chunk": (lambda x: x.chunk(2, 1), ((4, 2),)),
    "stack": (lambda a, b: torch.stack((a, b), 1), ((2, 2), (2, 2))),
    "stack at the end": (lambda a, b: torch.stack((a, b), -1), ((2, 3), (2, 3))),
    "stack of one twice": (lambda a, b: torch.stack((a, b, a), 2), ((2, 2), (2, 2))),
    "expand": (lambda x: x.expand(-1, 4, -1), ((1, 3),)),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), ((4, 2, 2),)),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), ((2, 4, 6),)),
    "channel shuffle": (lambda x: torch.channel_shuffle(x, 2), ((4, 2, 1),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), ((3,),)),
}
SUMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mean of the image": (lambda x: x.mean((2, 3)), ((2, 3, 3),)),
    "mean kept": (lambda x: x.mean((2, 3), keepdim=True), ((2, 3, 3),)),
    "sum of the last": (lambda x: x.sum(-1), ((3, 4),)),
    "largest": (lambda x: x.amax(1), ((3, 4),)),
    "softmax": (lambda x: x.softmax(-1), ((2, 3),)),
    "log softmax": (lambda x: x.log_softmax(1), ((3, 2),)),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), ((2, 3),)),
    "layer norm of two": (lambda x: F.layer_norm(x, (2, 3)), ((2, 2, 3),)),
    "group norm": (lambda x: F.group_norm(x, 2), ((4, 3),)),
    "instance norm": (lambda x: F.instance_norm(x), ((2, 5),)),
    "adaptive to one": (lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 3, 3),)),
    "adaptive to many": (lambda x: F.adaptive_avg_pool2d(x, (2, 5)), ((2, 5, 5),)),
    "adaptive to more": (lambda x: F.adaptive_avg_pool2d(x, (3, 7)), ((1, 7, 5),)),
    "adaptive in one direction": (lambda x: F.adaptive_avg_pool2d(x, (1, 3)), ((1, 4, 7),)),
    "adaptive maximum": (lambda x: F.adaptive_avg_pool1d(x, 3), ((2, 4),)),
    "matmul": (torch.matmul, ((2, 3), (3, 2))),
    "attention": (F.scaled_dot_product_attention, ((2, 3), (4, 3), (4, 3))),
    "cumsum": (lambda x: x.cumsum(1), ((4, 2),)),
    "upsample nearest": (lambda x: F.interpolate(x, scale_factor=2), ((1, 3, 2),)),
    "upsample nearest by three": (lambda x: F.interpolate(x, size=(9, 4)), ((1, 3, 2),)),
    "upsample to an odd size": (lambda x: F.interpolate(x, size=(7, 5)), ((1, 3, 2),)),
    "upsample bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 4, 3),)),
    "upsample bilinear by three": (lambda x: F.interpolate(x, scale_factor=3, mode="bilinear"), ((1, 4, 2),)),
    "upsample bilinear, corners aligned": (
        lambda x: F.interpolate(x, scale_factor=3, mode="bilinear", align_corners=True), ((1, 5, 2),)),
    "upsample volumes": (lambda x: F.interpolate(x, scale_factor=(2, 1, 3)), ((1, 3, 2, 2),)),
    "upsample volumes trilinear": (lambda x: F.interpolate(x, size=(5, 4, 3), mode="trilinear"), ((1, 3, 2, 2),)),
    "upsample nearest by a fraction": (lambda x: F.interpolate(x, scale_factor=1.7), ((1, 7, 4),)),
    "downsample nearest": (lambda x: F.interpolate(x, size=(5, 3)), ((1, 9, 4),)),
    "upsample bilinear by a fraction": (
        lambda x: F.interpolate(x, scale_factor=(1.3, 2.6), mode="bilinear"), ((1, 7, 3),)),
    "upsample bilinear to a size, corners aligned": (
        lambda x: F.interpolate(x, size=(11, 1), mode="bilinear", align_corners=True), ((1, 5, 3),)),
    "downsample bilinear": (lambda x: F.interpolate(x, size=(2, 3), mode="bilinear"), ((1, 4, 3),)),
}  # fmt: skip


@pytest.mark.quick(every=36)
@pytest.mark.parametrize("what", {**POINTWISE, **MOVES, **SUMS})
def test_one_operator(what: str) -> None:
    function, shapes = {**POINTWISE, **MOVES, **SUMS}[what]

    @settings(SETTINGS, max_examples=3)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check(function, *shapes, data=data)

    run()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_by_own_elements(mode: str) -> None:
    @SETTINGS
    @given(rows=st.integers(2, 6), columns=st.integers(2, 4), data=st.data())
    def run(rows: int, columns: int, data: st.DataObject) -> None:
        most = (columns - 1, columns - 1, rows - 1, rows - 1) if mode == "reflect" else (3, 3, 3, 3)
        amounts = [data.draw(st.integers(0, number)) for number in most]
        check(lambda x: F.pad(x, amounts, mode=mode), (1, rows, columns), data=data, tight=True)

    run()


@pytest.mark.slow
@SETTINGS
@given(start=st.integers(-7, 5), end=st.sampled_from([END, 6, -1]), step=st.integers(2, 4), data=st.data())
def test_slices_with_steps(start: int, end: int, step: int, data: st.DataObject) -> None:
    assume(len(range(7)[start:end:step]) > 0)
    check(lambda x: SLICE(x, 2, start, end, step), (1, 7, 2), data=data, tight=True)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_reads_its_row_whole(bias: bool) -> None:
    weights: dict[str, Any] = {"weight": randn(3, 4)} | ({"bias": randn(3)} if bias else {})

    @settings(SETTINGS, max_examples=3)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check(lambda x, weight, bias=None: F.linear(x, weight, bias), (2, 4), data=data, tight=True, **weights)

    run()


@pytest.mark.slow
def test_norms_of_maps_read_rows_and_columns_one_by_one() -> None:
    """What they sum over the map travels apart (Op.tiling), so a tile needs no halo; channels are read as before."""
    for function, channels in ((lambda x: F.group_norm(x, 2), Whole()), (F.instance_norm, Window(1))):
        node = one_node(capture(Calls(function), torch.randn(2, 4, 5, 6)))
        spec = TensorSpec("input_0", (1, 4, 5, 6), "float32", 0)
        (read,) = reads_of(node, {"input_0": spec}, {})
        assert read.rules == (Window(0), channels, Window(2), Window(3))


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("factor", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("extent", [1, 7, 608])
def test_up_sampling_by_whole_factors_reads_no_more_than_blocks(factor: int, extent: int) -> None:
    node = one_node(capture(Calls(lambda x: F.interpolate(x, scale_factor=factor)), torch.randn(2, 1, extent, 2)))
    (read,) = reads_of(node, {"input_0": TensorSpec("input_0", (1, 1, extent, 2), "float32", 0)}, {})
    assert read.rules[2] == (Window(2) if factor == 1 else Blocks(2, 1, factor))

"""Every operator of a tiled stage, on boxes, is the whole operator: values and gradients, to the last digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tile_checks import CONTEXT, Case, check_local, check_sums, held
from torch import Tensor, nn

from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, WeightGradientCall
from manyhands.executor.tile_operators import tile_operator
from manyhands.executor.tile_statistics import StatisticsOperator
from manyhands.facts.boxes import Box
from manyhands.facts.profile import Kernel
from manyhands.graph import convolution_kernels
from manyhands.graph.capture import capture
from manyhands.graph.piece import Context
from manyhands.graph.weights import Weights

SETTINGS = settings(
    max_examples=7, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
FEW = settings(SETTINGS, max_examples=4)
KERNELS = (None, Kernel(), Kernel(channels_last=True), Kernel(onednn=False), Kernel(True, False, 1),
           Kernel(True, product=True))  # fmt: skip
sizes = st.integers(7, 23)


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    return {
        "kernel_size": kernel, "stride": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "padding": (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))),
        "dilation": draw(st.sampled_from([1, 1, 2])),
    }  # fmt: skip


@pytest.mark.slow
@SETTINGS
@given(window=windows(), groups=st.sampled_from([1, 2, 4]), kernel=st.sampled_from(KERNELS), rows=sizes, columns=sizes,
       bias=st.booleans(), data=st.data())  # fmt: skip
def test_convolution(
    window: dict[str, Any], groups: int, kernel: Kernel | None, rows: int, columns: int, bias: bool, data: st.DataObject
) -> None:
    module = nn.Conv2d(4, 8, **window, groups=groups, bias=bias)
    check_local(Case.of(module, (4, rows, columns)), data, kernel=kernel)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("bias", [False, True])
def test_groups_at_rest_are_dense_convolutions_where_onednn_has_no_grouped_ones(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    monkeypatch.setattr(convolution_kernels, "_has_acl", lambda: True)
    case = Case.of(nn.Conv2d(8, 8, 3, 2, groups=4, bias=bias), (8, 9, 7))
    operator: Any = case.operator(Kernel(channels_last=True))
    data = torch.randn(2, 8, 9, 7, dtype=operator.weight.dtype)
    expected = operator._convolved(data, [1, 1], operator._operands(()))
    operator.rest()
    assert operator.goes_by_groups
    monkeypatch.setattr(operator, "_called", None)  # a convolution in groups would be called by this
    torch.testing.assert_close(operator._convolved(data, [1, 1], operator._operands(())), expected)
    depthwise: Any = Case.of(nn.Conv2d(32, 32, 3, groups=32), (32, 9, 7)).operator(Kernel(channels_last=True))
    depthwise.rest()
    assert not depthwise.goes_by_groups


@FEW
@given(bias=st.booleans(), data=st.data())
def test_convolution_of_single_pixels_as_a_product(bias: bool, data: st.DataObject) -> None:
    case = Case.of(nn.Conv2d(4, 6, 1, bias=bias), (4, 7, 9))
    assert case.operator(KERNELS[-1]).is_product  # type: ignore[attr-defined]
    check_local(case, data, kernel=KERNELS[-1])


@FEW
@given(padding=st.sampled_from([5, (0, 3)]), data=st.data())
def test_convolution_with_more_padding_than_kernel(padding: Any, data: st.DataObject) -> None:
    check_local(Case.of(nn.Conv2d(2, 3, 2, padding=padding, stride=2), (2, 7, 9)), data)


@pytest.mark.slow
@FEW
@given(kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), dilation=st.integers(1, 2), data=st.data())
def test_convolution_with_same_padding(kernel: tuple[int, int], dilation: int, data: st.DataObject) -> None:
    case = Case.of(nn.Conv2d(2, 3, kernel, padding="same", dilation=dilation), (2, 9, 11))
    for chosen in (None, Kernel(onednn=False)):
        check_local(case, data, kernel=chosen)


@pytest.mark.slow
@SETTINGS
@given(window=windows(), groups=st.sampled_from([1, 2]), kernel=st.sampled_from(KERNELS), rows=st.integers(4, 9),
       extra=st.booleans(), data=st.data())  # fmt: skip
def test_transposed_convolution(
    window: dict[str, Any], groups: int, kernel: Kernel | None, rows: int, extra: bool, data: st.DataObject
) -> None:
    rows_more, columns_more = (max(s, window["dilation"]) - 1 if extra else 0 for s in window["stride"])
    module = nn.ConvTranspose2d(4, 6, **window, groups=groups, output_padding=(rows_more, columns_more))
    check_local(Case.of(module, (4, rows, 6)), data, kernel=kernel)


class Computed(nn.Module):
    """A convolution whose weight, and bias if it has one, are computed."""

    FUNCTIONS: ClassVar[dict[type[nn.Module], Callable[..., Tensor]]] = {
        nn.Conv2d: F.conv2d, nn.ConvTranspose2d: F.conv_transpose2d, nn.Conv3d: F.conv3d,
        nn.ConvTranspose3d: F.conv_transpose3d,
    }  # fmt: skip

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.inner = convolution

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.inner.weight * 0.5, self.inner.bias
        options = (self.inner.stride, self.inner.padding, *(
            (self.inner.output_padding, self.inner.groups, self.inner.dilation)
            if self.inner.transposed else (self.inner.dilation, self.inner.groups)
        ))  # fmt: skip
        return self.FUNCTIONS[type(self.inner)](x, weight, None if bias is None else bias + 1.0, *options)


@pytest.mark.slow
@SETTINGS
@given(window=windows(), groups=st.sampled_from([1, 2]), transposed=st.booleans(), rows=sizes, bias=st.booleans(),
       data=st.data())  # fmt: skip
def test_convolution_with_a_computed_weight(
    window: dict[str, Any], groups: int, transposed: bool, rows: int, bias: bool, data: st.DataObject
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    case = Case.of(Computed(kind(4, 6, **window, groups=groups, bias=bias)), (4, rows, 9))
    assert len(case.inputs) == 2 + bias
    check_local(case, data)


@pytest.mark.slow
@SETTINGS
@given(window=windows(), ceil=st.booleans(), rows=sizes, columns=sizes, data=st.data())
def test_max_pooling(window: dict[str, Any], ceil: bool, rows: int, columns: int, data: st.DataObject) -> None:
    check_local(Case.of(lambda x: F.max_pool2d(x, **window, ceil_mode=ceil), (2, rows, columns)), data)


@pytest.mark.slow
@SETTINGS
@given(ceil=st.booleans(), rows=sizes, columns=sizes, data=st.data())
def test_halving_takes_the_first_of_equals(ceil: bool, rows: int, columns: int, data: st.DataObject) -> None:
    case = Case.of(lambda x: F.max_pool2d(x, 2, ceil_mode=ceil), (2, rows, columns))
    check_local(case, data)
    whole = case.inputs.popitem()[1].mul(1.5).round()  # many equals
    out = Box.whole(case.made.shape)
    leaf = whole.clone().requires_grad_()
    F.max_pool2d(leaf, 2, ceil_mode=ceil).backward(case.gradient)  # type: ignore[no-untyped-call]
    source = BoxTensor(Box.whole(whole.shape), whole)
    (found,) = case.operator().input_gradients(InputGradientCall([source], None, case.gradient, out, [True], CONTEXT))
    assert found is not None
    covered = found.box.intersect(source.box)
    gradient = torch.zeros_like(whole)
    gradient[covered.slices()] = found.view(covered)
    assert leaf.grad is not None
    assert torch.equal(gradient, leaf.grad)


@pytest.mark.slow
@SETTINGS
@given(window=windows(), ceil=st.booleans(), count=st.booleans(), divisor=st.sampled_from([None, None, 3]), rows=sizes,
       columns=sizes, data=st.data())  # fmt: skip
def test_average_pooling(
    window: dict[str, Any], ceil: bool, count: bool, divisor: int | None, rows: int, columns: int, data: st.DataObject
) -> None:
    window = {name: value for name, value in window.items() if name != "dilation"}
    case = Case.of(
        lambda x: F.avg_pool2d(x, **window, ceil_mode=ceil, count_include_pad=count, divisor_override=divisor),
        (2, rows, columns),
    )
    check_local(case, data)


@pytest.mark.slow
@SETTINGS
@given(size=st.tuples(st.integers(2, 9), st.integers(2, 9)), rows=sizes, columns=sizes, data=st.data())
def test_adaptive_average_pooling(size: tuple[int, int], rows: int, columns: int, data: st.DataObject) -> None:
    check_local(Case.of(lambda x: F.adaptive_avg_pool2d(x, size), (2, rows, columns)), data)


RESAMPLED: dict[str, dict[str, Any]] = {
    "nearest twice": {"scale_factor": 2},
    "nearest by three and two": {"scale_factor": (3, 2)},
    "nearest by a fraction": {"scale_factor": 1.7},
    "nearest to a size": {"size": (19, 13)},
    "nearest down": {"size": (5, 17)},
    "bilinear twice": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear by three": {"scale_factor": 3, "mode": "bilinear"},
    "bilinear by a fraction": {"scale_factor": (1.3, 2.6), "mode": "bilinear"},
    "bilinear to a size": {"size": (19, 14), "mode": "bilinear"},
    "bilinear down": {"size": (4, 9), "mode": "bilinear"},
    "bilinear with corners": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    "bilinear with corners to a size": {"size": (20, 8), "mode": "bilinear", "align_corners": True},
    "bilinear with corners to one": {"size": (1, 12), "mode": "bilinear", "align_corners": True},
}


DEEP_RESAMPLED: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": (2, 1, 3)}, "nearest by a fraction": {"scale_factor": 1.7},
    "trilinear": {"scale_factor": (2, 3, 2), "mode": "trilinear"},
    "trilinear to a size": {"size": (7, 4, 9), "mode": "trilinear"},
    "trilinear with corners": {"scale_factor": 2, "mode": "trilinear", "align_corners": True},
}  # fmt: skip


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("what", DEEP_RESAMPLED)
def test_up_sampling_of_volumes(what: str) -> None:
    case = Case.of(lambda x: F.interpolate(x, **DEEP_RESAMPLED[what]), (2, 4, 5, 3))

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


@pytest.mark.quick(every=14)
@pytest.mark.parametrize("what", RESAMPLED)
def test_up_sampling(what: str) -> None:
    case = Case.of(lambda x: F.interpolate(x, **RESAMPLED[what]), (2, 7, 9))

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


POINTWISE: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky relu, falling": lambda x: F.leaky_relu(x, -0.1),
    "leaky relu in place": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu": F.silu, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7), "relu6": F.relu6, "elu": F.elu,
    "elu, steep": lambda x: F.elu(x, 1.5), "celu": lambda x: F.celu(x, 0.7), "selu": F.selu, "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "mish": F.mish, "softplus": F.softplus, "exp": torch.exp,
    "square": torch.square, "clamp": lambda x: x.clamp(-0.3, 0.4), "negative": torch.neg,
    "plus a number": lambda x: x + 2, "less a number": lambda x: x - 3.0, "a number less": lambda x: 1.5 - x,
    "times a number": lambda x: x * 0.3, "over a number": lambda x: x / 3, "copy": torch.clone,
}  # fmt: skip
COMBINED: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add, "difference": torch.sub, "scaled sum": lambda a, b: torch.add(a, b, alpha=0.5),
    "product": torch.mul, "quotient": torch.div,
    "larger": torch.maximum, "twice": lambda a, b: torch.mul(b, a),
}  # fmt: skip


@pytest.mark.quick(every=30)
@pytest.mark.parametrize("what", POINTWISE)
def test_activation(what: str) -> None:
    case = Case.of(POINTWISE[what], (3, 8, 11))

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


@pytest.mark.quick(every=21)
@pytest.mark.parametrize("second", [(3, 8, 11), (3, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("what", COMBINED)
def test_two_maps_or_a_map_and_what_all_tiles_have(what: str, second: tuple[int, ...]) -> None:
    case = Case.of(COMBINED[what], (3, 8, 11), second)

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("function", [lambda x: x + x, lambda x: x * x])
def test_one_map_twice(function: Callable[[Tensor], Tensor]) -> None:
    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(Case.of(function, (3, 8, 11)), data)

    run()


@FEW
@given(data=st.data())
def test_slopes_of_every_channel(data: st.DataObject) -> None:
    check_local(Case.of(nn.PReLU(3), (3, 8, 11)), data)


WEIGHT = torch.randn(3, 2, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
VOLUME_WEIGHT = WEIGHT.unsqueeze(2)


class Last(nn.Module):
    """What is inside works on (sample, row, column, channel)."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x.permute(0, 2, 3, 1))


BESIDE: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: Last(nn.Linear(4, 6)), "linear without a bias": lambda: Last(nn.Linear(4, 3, bias=False)),
    "layer norm": lambda: Last(nn.LayerNorm(4)),
    "layer norm without weights": lambda: Last(nn.LayerNorm(4, elementwise_affine=False)),
    "softmax": lambda: Last(lambda x: x.softmax(-1)), "logarithm of softmax": lambda: lambda x: x.log_softmax(1),
    "mean of channels": lambda: lambda x: x.mean(1, True), "sum of channels": lambda: lambda x: x.sum((1,), True),
    "largest of channels": lambda: lambda x: x.amax(1, True),
}  # fmt: skip


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("what", BESIDE)
def test_along_axes_that_are_not_cut(what: str) -> None:
    case = Case.of(BESIDE[what](), (4, 7, 9))

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


def test_slopes_of_channels_that_come_last_are_not_tiled() -> None:
    """PReLU has its slopes along the second axis, which is that of rows there."""
    assert Case.of(Last(nn.PReLU(7)), (4, 7, 9)).operator().op.tiling == ""
    assert Case.of(Last(nn.PReLU(1)), (4, 7, 9)).operator().op.tiling == "local"


volumes = st.tuples(st.integers(5, 8), st.integers(5, 9), st.integers(5, 7))


@st.composite
def deep_windows(draw: st.DrawFn) -> dict[str, Any]:
    kernel = draw(st.tuples(*[st.integers(1, 3)] * 3))
    return {
        "kernel_size": kernel, "stride": draw(st.tuples(*[st.integers(1, 2)] * 3)),
        "padding": tuple(draw(st.integers(0, size // 2)) for size in kernel),
    }  # fmt: skip


@pytest.mark.slow
@FEW
@given(window=deep_windows(), groups=st.sampled_from([1, 2]), dilation=st.sampled_from([1, 1, 2]), size=volumes,
       kernel=st.sampled_from((None, Kernel(), Kernel(True), Kernel(onednn=False))), data=st.data())  # fmt: skip
def test_convolution_of_volumes(
    window: dict[str, Any], groups: int, dilation: int, size: tuple[int, ...], kernel: Kernel | None,
    data: st.DataObject,
) -> None:  # fmt: skip
    padding = tuple(pad * dilation for pad in window["padding"])
    module = nn.Conv3d(2, 4, **{**window, "padding": padding}, groups=groups, dilation=dilation)
    check_local(Case.of(module, (2, *size)), data, kernel=kernel)


@pytest.mark.slow
@FEW
@given(window=deep_windows(), extra=st.booleans(), size=volumes, data=st.data())
def test_transposed_convolution_of_volumes(
    window: dict[str, Any], extra: bool, size: tuple[int, ...], data: st.DataObject
) -> None:
    more = tuple(stride - 1 if extra else 0 for stride in window["stride"])
    check_local(Case.of(nn.ConvTranspose3d(2, 3, **window, output_padding=more), (2, *size)), data)


@pytest.mark.slow
@FEW
@given(window=deep_windows(), transposed=st.booleans(), bias=st.booleans(), size=volumes, data=st.data())
def test_convolution_of_volumes_with_a_computed_weight(
    window: dict[str, Any], transposed: bool, bias: bool, size: tuple[int, ...], data: st.DataObject
) -> None:
    kind = nn.ConvTranspose3d if transposed else nn.Conv3d
    case = Case.of(Computed(kind(2, 4, **window, groups=2, bias=bias)), (2, *size))
    assert len(case.inputs) == 2 + bias
    check_local(case, data)


POOLED: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "largest": lambda x, window: F.max_pool3d(x, **window, ceil_mode=True),
    "mean": lambda x, window: F.avg_pool3d(x, **window, count_include_pad=False),
    "mean with padding": lambda x, window: F.avg_pool3d(x, **window, ceil_mode=True),
    "adapted": lambda x, window: F.adaptive_avg_pool3d(x, tuple(1 + size for size in window["kernel_size"])),
}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("what", POOLED)
def test_pooling_of_volumes(what: str) -> None:
    @FEW
    @given(window=deep_windows(), size=volumes, data=st.data())
    def run(window: dict[str, Any], size: tuple[int, ...], data: st.DataObject) -> None:
        check_local(Case.of(lambda x: POOLED[what](x, window), (2, *size)), data)

    run()


MOVES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "concatenation": (lambda a, b, c: torch.cat((a, b, c), 1), ((2, 7, 9), (1, 7, 9), (4, 7, 9))),
    "channels": (lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, 3), ((4, 7, 9),)),
    "rows": (lambda x: torch.ops.aten.slice.Tensor(x, 2, 1, -2), ((4, 9, 9),)),
    "every third column": (lambda x: torch.ops.aten.slice.Tensor(x, 3, 1, 9, 3), ((4, 7, 11),)),
    "every second row from the end": (lambda x: torch.ops.aten.slice.Tensor(x, -2, -6, 2**62, 2), ((4, 9, 5),)),
    "every second channel": (lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 2**62, 2), ((5, 7, 9),)),
    "mirrored": (lambda x: F.pad(x, (1, 2, 6, 0), mode="reflect"), ((2, 7, 9),)),
    "mirrored and mirrored": (lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"), ((2, 3, 3),)),
    "edges repeated": (lambda x: F.pad(x, (3, 1, 0, 9), mode="replicate"), ((2, 7, 9),)),
    "mirrored by its own operator": (lambda x: torch.ops.aten.reflection_pad2d(x, (1, 0, 2, 3)), ((2, 7, 9),)),
    "stacked": (lambda a, b: torch.stack((a, b), 1), ((2, 7, 9), (2, 7, 9))),
    "stacked inside": (lambda a, b: torch.stack((a, b), -3), ((2, 7, 9), (2, 7, 9))),
    "sum of groups": (lambda x: x.sum(1), ((3, 2, 7, 9),)),
    "mean of channels in groups": (lambda x: x.mean(2, keepdim=True), ((3, 2, 7, 9),)),
    "sum of channels": (lambda x: x.sum(1, keepdim=True), ((3, 7, 9),)),
    "largest channel": (lambda x: x.amax(-3, keepdim=True), ((3, 7, 9),)),
    "product in groups": (lambda a, b: a * b, ((3, 2, 7, 9), (3, 2, 1, 1))),
    "activation in groups": (F.silu, ((3, 2, 7, 9),)),
    "copy in groups": (lambda x: x.transpose(1, 2).contiguous(), ((3, 2, 7, 9),)),
    "spread over a map": (lambda a, b: a.expand_as(b), ((2, 1, 1), (2, 7, 9))),
    "padding": (lambda x: F.pad(x, (1, 2, 3, 0)), ((2, 7, 9),)),
    "padding with a number": (lambda x: F.pad(x, (1, 2, 3, 0), value=1.5), ((2, 7, 9),)),
    "padding by less than nothing": (lambda x: F.pad(x, (-1, 2, 1, -3)), ((2, 7, 9),)),
    "wide padding": (lambda x: F.pad(x, (0, 9)), ((2, 7, 9),)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 3), ((9, 4, 5),)),
    "channel shuffle": (lambda x: torch.channel_shuffle(x, 3), ((6, 4, 5),)),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), ((2, 14, 10),)),
    "channels in groups": (lambda x: x.view(x.shape[0], 3, 2, *x.shape[2:]), ((6, 7, 9),)),
    "groups and channels change places": (lambda x: x.transpose(2, 1), ((3, 2, 7, 9),)),
    "groups and channels in another order": (lambda x: x.permute(0, 2, 1, -2, 4), ((3, 2, 7, 9),)),
    "groups as channels": (lambda x: x.reshape(x.shape[0], 6, *x.shape[3:]), ((2, 3, 7, 9),)),
    "concatenation in groups": (lambda a, b: torch.cat((a, b), 2), ((3, 1, 7, 9), (3, 2, 7, 9))),
    "dropout": (lambda x: F.dropout(x, 0.3), ((2, 7, 9),)),
    "dropout of everything": (lambda x: F.dropout(x, 1.0), ((2, 7, 9),)),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0), ((2, 7, 9),)),
    "dropout of channels": (lambda x: F.dropout2d(x, 0.3), ((5, 7, 9),)),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), ((2, 7, 9),)),
    "padding of channels": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), ((2, 7, 9),)),
    "padding of volumes": (lambda x: F.pad(F.conv3d(x, VOLUME_WEIGHT), (1, 0, 0, 2, 1, -1)), ((2, 5, 6, 4),)),
    "channels last": (lambda x: F.conv2d(x, WEIGHT).permute(0, 2, 3, 1), ((2, 7, 9),)),
    "columns before rows": (lambda x: x.transpose(2, 3), ((2, 7, 9),)),
    "slice of volumes with a step": (
        lambda x: torch.ops.aten.slice.Tensor(F.conv3d(x, VOLUME_WEIGHT), 2, 1, 5, 2),
        ((2, 6, 5, 4),),
    ),
    "mirrored volumes": (
        lambda x: F.pad(F.conv3d(x, VOLUME_WEIGHT), (1, 2, 0, 3, 2, 1), mode="reflect"),
        ((2, 4, 5, 3),),
    ),
    "edges of volumes repeated": (
        lambda x: F.pad(F.conv3d(x, VOLUME_WEIGHT), (0, 2, 3, 0, 1, 1), mode="replicate"),
        ((2, 4, 5, 3),),
    ),
    "stacked volumes": (
        lambda a, b: torch.stack((F.conv3d(a, VOLUME_WEIGHT), F.conv3d(b, VOLUME_WEIGHT)), 1),
        ((2, 4, 5, 3),) * 2,
    ),
    "every second of channels that come last": (
        lambda x: torch.ops.aten.slice.Tensor(F.conv2d(x, WEIGHT).permute(0, 2, 3, 1), -1, 0, 2**62, 2),
        ((2, 7, 9),),
    ),
    "every second row before channels": (
        lambda x: torch.ops.aten.slice.Tensor(F.conv2d(x, WEIGHT).permute(0, 2, 3, 1), 1, 1, 2**62, 2),
        ((2, 7, 9),),
    ),
    "stacked after channels": (
        lambda a, b: torch.stack((a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)), -1),
        ((2, 7, 9), (2, 7, 9)),
    ),
    "spread over channels that come last": (
        lambda a, b: a.expand_as(F.conv2d(b, WEIGHT).permute(0, 2, 3, 1)),
        ((1, 1, 3), (2, 7, 9)),
    ),
    "dropout of volumes": (lambda x: F.dropout3d(F.conv3d(x, VOLUME_WEIGHT), 0.4), ((2, 5, 6, 4),)),
}


@pytest.mark.quick(every=26)
@pytest.mark.parametrize("what", MOVES)
def test_moves_and_drops(what: str) -> None:
    function, shapes = MOVES[what]
    case = Case.of(function, *shapes)

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(case, data)

    run()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("function", [lambda x: F.dropout(x, 0.3), lambda x: F.alpha_dropout(x, 0.3, training=True)])
def test_in_evaluation_nothing_is_dropped(function: Callable[[Tensor], Tensor]) -> None:
    resting = replace(CONTEXT, training=False)

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_local(Case.of(function, (2, 7, 9), context=resting), data, context=resting)

    run()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(6),
    "batch norm without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "batch norm without memory": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "group norm": lambda: nn.GroupNorm(3, 6),
    "group norm of one": lambda: nn.GroupNorm(1, 6, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(6),
    "instance norm with weights": lambda: nn.InstanceNorm2d(6, affine=True),
}
DEEP_NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm3d(4), "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm3d(4, affine=True),
}  # fmt: skip
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "global average": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3)),
    "mean kept": lambda x: x.mean((-1, -2), keepdim=True),
    "sum": lambda x: x.sum((2, 3)),
}


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("what", NORMS)
def test_norms_over_all_tiles(what: str, adjoint: bool) -> None:
    case = Case.of(NORMS[what](), (6, 9, 12))

    @settings(SETTINGS, max_examples=6)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_sums(case, data, adjoint=adjoint)

    run()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("what", DEEP_NORMS)
def test_norms_of_volumes_over_all_tiles(what: str, adjoint: bool) -> None:
    case = Case.of(nn.Sequential(nn.Conv3d(2, 4, 1), DEEP_NORMS[what]()), (2, 5, 6, 4))

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_sums(case, data, adjoint=adjoint)

    run()


POOLED_WHOLE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "volumes": (lambda x: F.adaptive_avg_pool3d(x, 1), (2, 5, 6, 4)),
    "mean of volumes": (lambda x: F.conv3d(x, VOLUME_WEIGHT).mean((2, 3, 4)), (2, 5, 6, 4)),
    "channels last": (lambda x: F.conv2d(x, WEIGHT).permute(0, 2, 3, 1).sum((1, 2), keepdim=True), (2, 7, 9)),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("what", POOLED_WHOLE)
def test_pools_of_volumes_and_of_channels_that_come_last(what: str) -> None:
    function, shape = POOLED_WHOLE[what]
    case = Case.of(function, shape)
    assert case.operator().op.tiling == "pool"

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_sums(case, data, adjoint=True)

    run()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("what", POOLS)
def test_pools_over_all_tiles(what: str) -> None:
    case = Case.of(POOLS[what], (3, 9, 12))
    assert case.operator().op.tile_sums == 3

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        check_sums(case, data, adjoint=True)

    run()


@FEW
@given(data=st.data())
def test_batch_norm_by_running_statistics(data: st.DataObject) -> None:
    resting = replace(CONTEXT, training=False)
    check_local(Case.of(nn.BatchNorm2d(3).eval(), (3, 7, 9)), data)
    case = Case.of(nn.BatchNorm2d(3), (3, 7, 9), context=resting)
    out = Box.of((0, 2), (0, 3), (2, 5), (0, 8))
    with torch.no_grad():
        found = case.operator().forward(ForwardCall([held(next(iter(case.inputs.values())), out, out)], out, resting))
    assert torch.allclose(found, case.made[out.slices()], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_numbers_that_tiles_add_up() -> None:
    def sums(function: Callable[..., Tensor]) -> tuple[str, int, int]:
        op = Case.of(function, (6, 7, 9)).operator().op
        return op.tiling, op.tile_sums, op.statistics

    assert sums(nn.BatchNorm2d(6)) == ("norm", 0, 6)
    assert sums(nn.GroupNorm(3, 6)) == ("norm", 6, 0)
    assert sums(nn.InstanceNorm2d(6)) == ("norm", 12, 0)
    assert sums(POOLS["mean"]) == ("pool", 6, 0)
    assert sums(lambda x: x.new_zeros(x.shape[0], 1, 1, 1)) == ("pool", 0, 0)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("function", [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(3), nn.LeakyReLU(0.1)])
def test_single_precision(function: Callable[..., Tensor]) -> None:
    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        case = Case.of(function, (3, 15, 17), dtype=torch.float32)
        if isinstance(function, nn.BatchNorm2d):
            check_sums(case, data, adjoint=True, tolerance=1e-5)
        else:
            check_local(case, data, tolerance=1e-5)

    run()


def test_squeeze_and_excitation_on_what_all_tiles_have() -> None:
    """Operators on tensors that every tile has whole: also those that cannot be tiled."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            gate = torch.sigmoid(self.second(F.silu(self.first(x))))
            out: Tensor = self.head(gate.flatten(1))
            return out

    module = Gate().double()
    x = torch.randn(3, 4, 1, 1, dtype=torch.float64)
    graph, weights = capture(module, x), Weights.copied(capture(module, x))
    values = {graph.inputs[0].name: x}
    operators = [tile_operator(graph, index, weights, None) for index in range(len(graph.nodes))]
    context = Context()
    wanted = module(x)
    wanted.sum().backward()
    gradients = {graph.outputs[0]: torch.ones_like(wanted)}
    with torch.no_grad():
        for operator in operators:
            given = [BoxTensor(Box.whole(values[r.tensor].shape), values[r.tensor]) for r in operator.op.reads]
            out = Box.whole(operator.output.shape_for(3))
            values[operator.output.name] = operator.forward(ForwardCall(given, out, context))
        assert torch.allclose(values[graph.outputs[0]], wanted, rtol=0, atol=1e-12)
        for operator in reversed(operators):
            gradient = gradients[operator.output.name]
            given = [BoxTensor(Box.whole(values[r.tensor].shape), values[r.tensor]) for r in operator.op.reads]
            out = Box.whole(gradient.shape)
            output = BoxTensor(out, values[operator.output.name])
            operator.weight_gradients(WeightGradientCall(given, gradient, out, context))
            wants = [graph.network.tensors[r.tensor].differentiable for r in operator.op.reads]
            found = operator.input_gradients(InputGradientCall(given, output, gradient, out, wants, context))
            for read, part in zip(operator.op.reads, found):
                if part is not None:
                    gradients[read.tensor] = part.tensor
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        found_gradient = weights.tensors[name].grad
        assert found_gradient is not None
        assert torch.allclose(found_gradient, parameter.grad, rtol=0, atol=1e-12), name


def test_a_mask_of_samples_is_made_from_a_shape() -> None:
    """Stochastic depth: one coin per sample, the same on every tile, whatever the tile holds."""

    def drop(x: Tensor) -> Tensor:
        return x * x.new_empty([x.shape[0], 1, 1, 1]).bernoulli_(0.5).div_(0.5)

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return drop(self.convolution(x))

    graph = capture(Drop(), torch.randn(4, 1, 5, 6))
    names = [node.target for node in graph.nodes]
    shaped, coin = names.index("aten.new_empty.default"), names.index("aten.bernoulli_.float")
    weights, box = Weights.copied(graph), Box.whole((4, 1, 1, 1))
    first, whole = tile_operator(graph, shaped, weights, None), Box.whole((4, 2, 5, 6))
    assert isinstance(first, StatisticsOperator)
    row = first.local_statistics([BoxTensor(whole, torch.zeros(whole.shape))], whole)
    assert row.numel() == 0
    made = first.forward(ForwardCall([], box, CONTEXT, statistics=first.combine([row], [30])))
    assert made.shape == (4, 1, 1, 1)
    tossed = tile_operator(graph, coin, weights, None).forward(ForwardCall([BoxTensor(box, made)], box, CONTEXT))
    assert set(tossed.flatten().tolist()) <= {0.0, 1.0}


ON_CUDA: dict[str, tuple[Callable[[], Callable[..., Tensor]], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 1), groups=2), (4, 11, 13)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), (4, 6, 7)),
    "max pooling": (lambda: nn.MaxPool2d(3, 2, 1), (4, 11, 13)),
    "halving": (lambda: nn.MaxPool2d(2), (4, 11, 13)),
    "average pooling": (lambda: nn.AvgPool2d(3, 2, 1, True, False), (4, 11, 13)),
    "adaptive pooling": (lambda: nn.AdaptiveAvgPool2d((3, 5)), (4, 11, 13)),
    "nearest by a fraction": (lambda: nn.Upsample(scale_factor=1.7), (4, 7, 9)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 7, 9)),
    "bilinear to a size": (lambda: nn.Upsample((15, 11), mode="bilinear"), (4, 7, 9)),
    "leaky relu": (lambda: nn.LeakyReLU(0.1), (4, 7, 9)),
    "slopes": (lambda: nn.PReLU(4), (4, 7, 9)),
    "dropout": (lambda: nn.Dropout(0.3), (4, 7, 9)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (4, 7, 9)),
    "padding": (lambda: nn.ZeroPad2d((1, 2, 0, -1)), (4, 7, 9)),
    **{name: (build, (6, 9, 12)) for name, build in NORMS.items()},
    "mean": (lambda: POOLS["mean"], (6, 9, 12)),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("what", ON_CUDA)
def test_on_cuda(what: str) -> None:
    build, shape = ON_CUDA[what]
    case = Case.of(build(), shape).on("cuda")

    @FEW
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        if case.operator().op.tiling == "local":
            check_local(case, data, tolerance=1e-10)
        else:
            for adjoint in (True, False):
                check_sums(case, data, adjoint=adjoint, tolerance=1e-10)

    run()

"""Kernels: run an operator in a chosen memory format, by oneDNN or PyTorch's native code, on a number of threads.

PyTorch picks a convolution's kernel when it is called: by the format of its tensors and by global flags, which it
reads again in backward. So a choice that sets flags needs a function of its own for both directions:

    channels_last or contiguous, PyTorch's flags    convert the input where needed, then the plain operator
    native, or a number of threads                  the same, with both directions inside `Flags`
    product                                         a convolution of single pixels: in channels_last it is one product
                                                    of matrices, where PyTorch on one thread takes one per sample
    packed                                          at rest: the weight stays as oneDNN lays it out, in place of being
                                                    laid out anew in every call

The flags belong to the process (threads: to the calling thread), so one process runs one piece at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.graph import Graph, Node, Value, Weight, weights_of
from manyhands.graph.weights import Weights, plain

Call = Callable[..., Any]
_aten, _onednn = torch.ops.aten, torch.ops.mkldnn
_MOST_GROUPS = 16
"""More groups than these (a depthwise convolution has one for each channel) are not run one after another."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank
_LINEAR = "aten.linear.default"
_VIEWS = {
    "aten.view.default": _aten.reshape.default,
    "aten._unsafe_view.default": _aten.reshape.default,
    "aten.view_as.default": _aten.reshape_as.default,
}
"""Views of a channels_last tensor may need a copy."""


def takes_format(graph: Graph, node: Node) -> bool:
    """Whether an operator can be told to run in channels_last: a convolution over pictures or volumes."""
    return node.target in ops.CONVOLUTION and _rank(graph, node) in _CHANNELS_LAST


def takes_product(graph: Graph, node: Node) -> bool:
    """Whether an operator is a convolution of single pixels, each of which counts: a product of matrices."""
    if not takes_format(graph, node) or "transpose" in node.target:
        return False
    shape = graph.network.weights[_weight_name(node)].shape
    if math.prod(shape[2:]) > 1:
        return False
    found = _geometry(node, shape)
    return found.groups == 1 and set(found.stride) == {1} and not any(found.padding)


def packable(graph: Graph) -> frozenset[str]:
    """Convolutions whose weights can stay as oneDNN lays them out: over pictures, in float32, a weight for each."""
    if not _can_pack():
        return frozenset()
    uses = Counter(name for node in graph.nodes for name in weights_of(node))

    def may(node: Node) -> bool:
        if not takes_format(graph, node) or _rank(graph, node) != 4 or "transpose" in node.target:
            return False
        spec = graph.network.weights[_weight_name(node)]
        return spec.dtype == "float32" and uses[spec.name] == 1 and not _geometry(node, spec.shape).extra_padding

    return frozenset(node.name for node in graph.nodes if may(node))


@cache
@torch.no_grad()
def _can_pack() -> bool:
    """Whether this build of PyTorch lays out weights by oneDNN and convolves with them; it need not have them all."""
    data, weight, ones = torch.ones(1, 4, 3, 3), torch.ones(4, 2, 2, 2), [1, 1]
    try:
        packed = _onednn._reorder_convolution_weight(weight, [0, 0], ones, ones, 2, [1, 4, 3, 3])
        found = _onednn._convolution_pointwise.default(data, packed, None, [0, 0], ones, ones, 2, "none", [], "")
        return bool((found == 8).all()) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError):
        return False


def takes_flags(graph: Graph, node: Node) -> bool:
    """Whether oneDNN and the number of threads can be chosen for an operator."""
    return (node.target in ops.CONVOLUTION and _rank(graph, node) > 0) or node.target in ops.RECURRENT | {_LINEAR}


def kernel_calls(graph: Graph, choice: Mapping[str, Kernel]) -> dict[str, Call]:
    """Callables for `Piece(graph, weights, kernels=...)`. Operators at PyTorch's default are absent: no wrapper."""
    any_channels_last = any(kernel.channels_last for kernel in choice.values())
    may_be_packed = packable(graph) if any(kernel.packed for kernel in choice.values()) else ()
    calls: dict[str, Call] = {}
    for node in graph.nodes:
        kernel = choice.get(node.name)
        if kernel is None:
            if any_channels_last and node.target in _VIEWS:
                calls[node.name] = _VIEWS[node.target]
            continue
        if node.target in ops.CONVOLUTION and _rank(graph, node):
            if kernel.product and takes_product(graph, node):
                calls[node.name] = product
            elif kernel.packed and node.name in may_be_packed:
                calls[node.name] = Packed(graph, node)
            elif not kernel.is_plain or any_channels_last:
                calls[node.name] = _convolution(graph, node, kernel)
        elif node.target == _LINEAR and not kernel.is_plain:
            calls[node.name] = _linear(kernel)
        elif node.target in ops.RECURRENT and not kernel.is_plain:
            calls[node.name] = _recurrent(node, kernel)
    return calls


@torch.no_grad()
def store_weights(graph: Graph, weights: Weights, choice: Mapping[str, Kernel]) -> None:
    """Keep each convolution's weight in the format its kernel reads, so that no step converts it. Values stay.

    A weight read in both formats, or outside convolutions, is kept contiguous.
    """
    wanted: dict[str, set[bool]] = {}
    for node in graph.nodes:
        kernel = choice.get(node.name, Kernel())
        convolved = node.arguments[1] if takes_format(graph, node) else None
        for argument in node.arguments:
            if isinstance(argument, Weight):
                wanted.setdefault(argument.name, set()).add(argument is convolved and kernel.channels_last)
    for name, formats in wanted.items():
        tensor = weights.tensors.get(name)
        if tensor is not None and tensor.dim() in _CHANNELS_LAST:
            _reformat_leaf(tensor, _format(tensor.dim(), formats == {True}))


def _reformat_leaf(tensor: torch.Tensor, memory_format: torch.memory_format) -> None:
    """The same leaf (an optimiser may hold it) over memory in another order, its gradient likewise."""
    if tensor.is_contiguous(memory_format=memory_format):
        return
    gradient = tensor.grad
    tensor.grad = None
    tensor.data = tensor.data.contiguous(memory_format=memory_format)
    if gradient is not None:
        tensor.grad = gradient.contiguous(memory_format=memory_format)


def _format(rank: int, channels_last: bool) -> torch.memory_format:
    return _CHANNELS_LAST[rank] if channels_last and rank in _CHANNELS_LAST else torch.contiguous_format


def _rank(graph: Graph, node: Node) -> int:
    """The rank of a convolution's input and weight; 0 where they differ, or the weight is computed."""
    data, weight = node.arguments[0], node.arguments[1]
    if not isinstance(data, Value) or not isinstance(weight, Weight):
        return 0
    rank = len(graph.network.weights[weight.name].shape)
    return rank if len(graph.network.tensors[data.name].shape) == rank else 0


class Flags:
    """oneDNN off and the number of threads, as a kernel asks; the process' own again on leaving, however one leaves."""

    __slots__ = ("kernel", "onednn_before", "threads_before")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __enter__(self) -> None:
        # torch.backends.mkldnn.flags would set three other flags too, and warn.
        if not self.kernel.onednn:
            self.onednn_before: bool = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)
        if self.kernel.threads:
            self.threads_before = torch.get_num_threads()
            if self.threads_before != self.kernel.threads:
                torch.set_num_threads(self.kernel.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.kernel.onednn:
            torch._C._set_mkldnn_enabled(self.onednn_before)
        if self.kernel.threads and self.threads_before != self.kernel.threads:
            torch.set_num_threads(self.threads_before)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


# ---- Convolutions


@dataclass(frozen=True)
class _Geometry:
    """The arguments of aten.convolution after input, weight and bias."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    extra_padding: tuple[int, ...] = ()
    """For padding='same' with an uneven sum: zeros to add first, as F.pad takes them."""


class _Reformat(torch.autograd.Function):
    """Another memory format; the gradient comes back in the one the input had."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, wanted: torch.memory_format, before: torch.memory_format) -> torch.Tensor:
        ctx.before = before
        return data.contiguous(memory_format=wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.contiguous(memory_format=ctx.before), None, None


def reformat(data: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """`data` in the asked format; itself where it already is."""
    wanted = _format(data.dim(), channels_last)
    if data.is_contiguous(memory_format=wanted):
        return data
    return cast(torch.Tensor, _apply(_Reformat, data, wanted, _format(data.dim(), not channels_last)))


class _Convolution(torch.autograd.Function):
    """aten.convolution and its backward, both under a kernel's flags."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        geometry: _Geometry,
        kernel: Kernel,
    ) -> torch.Tensor:
        ctx.save_for_backward(data, weight)
        ctx.geometry, ctx.kernel, ctx.bias_shape = geometry, kernel, None if bias is None else list(bias.shape)
        g = geometry
        with Flags(kernel):
            return cast(
                torch.Tensor,
                _aten.convolution.default(
                    data, weight, bias, g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups
                ),
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        data, weight = ctx.saved_tensors
        g, kernel = ctx.geometry, ctx.kernel
        mask = [*ctx.needs_input_grad[:2], ctx.bias_shape is not None and ctx.needs_input_grad[2]]
        gradient = gradient.contiguous(memory_format=_format(gradient.dim(), kernel.channels_last))
        with Flags(kernel):
            found = _aten.convolution_backward.default(
                gradient, data, weight, ctx.bias_shape, g.stride, g.padding, g.dilation, g.transposed,
                g.output_padding, g.groups, mask,
            )  # fmt: skip
        return (*(one if wanted else None for one, wanted in zip(found, mask)), None, None)


def _convolution(graph: Graph, node: Node, kernel: Kernel) -> Call:
    """A convolution that converts its input where needed and runs by a kernel."""
    channels_last = kernel.channels_last and takes_format(graph, node)
    geometry = _geometry(node, graph.network.weights[_weight_name(node)].shape)
    if kernel.is_plain:
        operator = ops.resolve(node.target)
        may_go_by_groups = channels_last and _rank(graph, node) == 4 and goes_by_groups(geometry.groups)
        may_go_by_groups = may_go_by_groups and not geometry.transposed and not geometry.extra_padding

        def formatted(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any) -> Any:
            data, weight = reformat(data, channels_last), reformat(weight, channels_last)
            if may_go_by_groups and not torch.is_grad_enabled():
                g = geometry
                return by_groups(data, weight, bias, g.stride, g.padding, g.dilation, g.groups)
            return operator(data, weight, bias, *rest)

        return formatted

    def flagged(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any) -> Any:
        data = reformat(data, channels_last)
        if geometry.extra_padding:
            data = reformat(torch.constant_pad_nd(data, geometry.extra_padding), channels_last)
        return _apply(_Convolution, data, reformat(weight, channels_last), bias, geometry, kernel)

    return flagged


@cache
def _has_acl() -> bool:
    return bool(torch.backends.mkldnn.is_acl_available())  # type: ignore[no-untyped-call]


def goes_by_groups(groups: int) -> bool:
    """Whether oneDNN is given a convolution at rest group by group: on Arm it computes dense ones by the Arm Compute
    Library, which has none in groups, and its own take up to seven times as long."""
    return 1 < groups <= _MOST_GROUPS and _has_acl()


def by_groups(
    data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """A convolution in groups as that many dense ones in channels_last, one after another."""
    biases = [None] * groups if bias is None else bias.chunk(groups)
    made = [
        torch.conv2d(part.contiguous(memory_format=torch.channels_last), own, one, stride, padding, dilation)
        for part, own, one in zip(data.chunk(groups, 1), weight.chunk(groups), biases, strict=True)
    ]
    return torch.cat(made, 1)


def product(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """A convolution of single pixels: rows of channels times a matrix. The result is a view: do not write over it."""
    rows = reformat(data, True).movedim(1, -1)
    made: torch.Tensor = _aten.linear.default(rows, weight.flatten(1), bias)
    return made.movedim(-1, 1)


class Packed:
    """A convolution whose weight oneDNN lays out once, when it is at rest; until then a plain one in channels_last.

    The layout is the best for one shape of the input. For another oneDNN would change it in every call, which can take
    a hundred times as long as convolving: then the weight is taken as it was.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.weight = _weight_name(node)
        self.geometry = _geometry(node, graph.network.weights[self.weight].shape)
        data = node.arguments[0]
        assert isinstance(data, Value)
        self.source = graph.network.tensors[data.name]
        self.shape: tuple[int, ...] = ()
        """Of the input that the weight is laid out for."""
        g = self.geometry
        self._given = (g.padding, g.stride, g.dilation, g.groups)

    def pack(self, weights: Weights, shape: tuple[int, ...], padding: list[int] | None = None) -> bool:
        """Lay the weight out, for nothing but calls of this convolution; whether it was not so before."""
        before, g = weights.tensors[self.weight], self.geometry
        if before.device.type != "cpu" or (before.is_mkldnn and shape == self.shape):
            return False
        weights.tensors[self.weight] = _onednn._reorder_convolution_weight(
            plain(before).detach(), g.padding if padding is None else padding, g.stride, g.dilation, g.groups,
            list(shape),
        )  # fmt: skip
        self.shape = shape
        return True

    def is_laid_out_for(self, data: torch.Tensor, weight: torch.Tensor) -> bool:
        return weight.is_mkldnn and data.shape == self.shape

    def __call__(
        self, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any,
        padding: list[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self.is_laid_out_for(data, weight):
            return self.convolved(data, weight, bias, padding=padding)
        g = self.geometry
        padding = g.padding if padding is None else padding
        data, weight = reformat(data, True), reformat(plain(weight), True)
        return torch.conv2d(data, weight, bias, g.stride, padding, g.dilation, g.groups)

    def convolved(
        self, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, post: str = "none",
        numbers: Sequence[float] = (), *, padding: list[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """With a weight that is laid out; `post`: the activation of the result, as oneDNN calls it, and its numbers."""
        given = self._given if padding is None else (padding, *self._given[1:])
        if not data.is_contiguous(memory_format=torch.channels_last):
            data = reformat(data, True)
        made: torch.Tensor = _onednn._convolution_pointwise.default(data, weight, bias, *given, post, numbers, "")
        return made

    def added(
        self, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor,
        post: str | None, *, overwrites: bool,
    ) -> torch.Tensor:  # fmt: skip
        """The same and `other`, over that or beside it, and the activation of the sum, if any."""
        if not data.is_contiguous(memory_format=torch.channels_last):
            data = reformat(data, True)
        given: tuple[Any, ...] = (weight, bias, *self._given, "add", 1.0, post, [], "")
        made: torch.Tensor = (
            _onednn._convolution_pointwise_.binary(other, data, *given)
            if overwrites
            else _onednn._convolution_pointwise.binary(data, other, *given)
        )
        return made


def _weight_name(node: Node) -> str:
    weight = node.arguments[1]
    assert isinstance(weight, Weight)
    return weight.name


def _geometry(node: Node, weight_shape: Sequence[int]) -> _Geometry:
    """One form for conv2d, conv2d.padding and conv_transpose2d, whose arguments differ in order and defaults."""
    axes = len(weight_shape) - 2
    given = [*node.arguments, *([None] * 9)]
    stride = _each(given[3], 1, axes)
    if "transpose" in node.target:
        return _Geometry(
            stride=stride, padding=_each(given[4], 0, axes), dilation=_each(given[7], 1, axes), transposed=True,
            output_padding=_each(given[5], 0, axes), groups=given[6] or 1,
        )  # fmt: skip
    dilation, groups = _each(given[5], 1, axes), given[6] or 1
    padding = given[4]
    extra: tuple[int, ...] = ()
    if padding == "valid":
        padding = 0
    elif padding == "same":
        padding, extra = _same_padding(weight_shape[2:], dilation)
    return _Geometry(stride, _each(padding, 0, axes), dilation, False, [0] * axes, groups, extra)


def _each(value: Any, default: int, axes: int) -> list[int]:
    """One number for each axis."""
    if value is None or value in ([], ()):
        return [default] * axes
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * axes if len(values) == 1 else values


def _same_padding(extents: Sequence[int], dilation: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Even parts by the convolution itself; where the sum is odd, one more zero at the far end beforehand."""
    totals = [step * (extent - 1) for extent, step in zip(extents, dilation, strict=True)]
    extra = tuple(number for total in reversed(totals) for number in (0, total % 2))
    return [total // 2 for total in totals], extra if any(extra) else ()


# ---- Linear and recurrent operators


class _Linear(torch.autograd.Function):
    """aten.linear and its backward, both under a kernel's flags."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel
    ) -> torch.Tensor:
        ctx.save_for_backward(data, weight)
        ctx.kernel, ctx.has_bias = kernel, bias is not None
        with Flags(kernel):
            return cast(torch.Tensor, _aten.linear.default(data, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        data, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        with Flags(ctx.kernel):
            of_data = (rows @ weight).view(data.shape) if ctx.needs_input_grad[0] else None
            of_weight = rows.t() @ data.reshape(-1, data.shape[-1]) if ctx.needs_input_grad[1] else None
            of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_data, of_weight, of_bias, None


def _linear(kernel: Kernel) -> Call:
    def call(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return _apply(_Linear, data, weight, bias, kernel)

    return call


def _recurrent(node: Node, kernel: Kernel) -> Call:
    """Forward alone decides: what it records for backward are the native steps or oneDNN's layer."""
    operator = ops.resolve(node.target)

    def call(*arguments: Any) -> Any:
        with Flags(kernel):
            return operator(*arguments)

    return call

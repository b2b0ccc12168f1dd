"""Calls that run a convolution: under a kernel's flags, group by group, or as a product of matrices."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.function import once_differentiable

from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.convolution_geometry import ConvolutionGeometry, convolution_rank, geometry_of, weight_name
from manyhands.graph.kernel_flags import Flags
from manyhands.graph.memory_formats import CHANNELS_LAST, apply_function, memory_format_of, reformat
from manyhands.graph.nodes import Node

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

Call = Callable[..., Any]
_aten = torch.ops.aten
_MOST_GROUPS = 16
"""The most groups that are run one after another; a depthwise convolution has one for each channel."""


def takes_format(graph: Graph, node: Node) -> bool:
    """Return whether an operator can run in channels_last: a convolution over pictures or volumes."""
    return node.target in ops.CONVOLUTION and convolution_rank(graph, node) in CHANNELS_LAST


class _Convolution(torch.autograd.Function):
    """The function aten.convolution and its backward, both under a kernel's flags."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        geometry: ConvolutionGeometry,
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
        gradient = gradient.contiguous(memory_format=memory_format_of(gradient.dim(), kernel.channels_last))
        with Flags(kernel):
            gradients = _aten.convolution_backward.default(
                gradient, data, weight, ctx.bias_shape, g.stride, g.padding, g.dilation, g.transposed,
                g.output_padding, g.groups, mask,
            )  # fmt: skip
        return (*(part if is_needed else None for part, is_needed in zip(gradients, mask)), None, None)


def convolution_call(graph: Graph, node: Node, kernel: Kernel) -> Call:
    """Return a call of a convolution that converts its input where needed and runs by a kernel."""
    channels_last = kernel.channels_last and takes_format(graph, node)
    geometry = geometry_of(node, graph.network.weights[weight_name(node)].shape)
    if kernel.is_plain:
        operator = ops.resolve(node.target)
        may_go_by_groups = channels_last and convolution_rank(graph, node) == 4 and goes_by_groups(geometry.groups)
        may_go_by_groups = may_go_by_groups and not geometry.transposed and not geometry.extra_padding

        def formatted(
            data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *arguments: Any
        ) -> Any:
            data, weight = reformat(data, channels_last), reformat(weight, channels_last)
            if may_go_by_groups and not torch.is_grad_enabled():
                g = geometry
                return by_groups(data, weight, bias, g.stride, g.padding, g.dilation, g.groups)
            return operator(data, weight, bias, *arguments)

        return formatted

    def flagged(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *arguments: Any) -> Any:
        data = reformat(data, channels_last)
        if geometry.extra_padding:
            data = reformat(torch.constant_pad_nd(data, geometry.extra_padding), channels_last)
        return apply_function(_Convolution, data, reformat(weight, channels_last), bias, geometry, kernel)

    return flagged


def has_acl() -> bool:
    """Return whether oneDNN computes by the Arm Compute Library. PyTorch before 2.10 cannot be asked: its builds for
    Linux on 64-bit Arm do."""
    ask = getattr(torch.backends.mkldnn, "is_acl_available", None)
    if ask is None:
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return has_onednn and (platform.system(), platform.machine()) == ("Linux", "aarch64")
    return bool(ask())


_has_acl = cache(has_acl)


def goes_by_groups(groups: int) -> bool:
    """Return whether a convolution at rest is given to oneDNN group by group.

    On Arm oneDNN computes dense convolutions by the Arm Compute Library, which has no grouped ones; oneDNN's own
    kernels for those take up to seven times as long.
    """
    return 1 < groups <= _MOST_GROUPS and _has_acl()


def by_groups(
    data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """Return a convolution in groups, computed as that many dense ones in channels_last, one after another."""
    biases = [None] * groups if bias is None else bias.chunk(groups)
    made = [
        torch.conv2d(
            part.contiguous(memory_format=torch.channels_last), group_weight, group_bias, stride, padding, dilation
        )
        for part, group_weight, group_bias in zip(data.chunk(groups, 1), weight.chunk(groups), biases, strict=True)
    ]
    return torch.cat(made, 1)


def product(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """Return a convolution of single pixels, computed as rows of channels times a matrix. The result is a view: do not
    write over it."""
    rows = reformat(data, True).movedim(1, -1)
    made: torch.Tensor = _aten.linear.default(rows, weight.flatten(1), bias)
    return made.movedim(-1, 1)

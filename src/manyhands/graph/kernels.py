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
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from manyhands.facts.profile import Kernel
from manyhands.graph import ops
from manyhands.graph.convolution_geometry import convolution_rank, geometry_of, weight_name
from manyhands.graph.convolution_kernels import convolution_call, product, takes_format
from manyhands.graph.graph import Graph
from manyhands.graph.kernel_flags import Flags
from manyhands.graph.memory_formats import CHANNELS_LAST, apply_function, memory_format_of, reformat_leaf
from manyhands.graph.nodes import Node, Weight, weights_of
from manyhands.graph.packed_convolution import PackedConvolution, can_pack
from manyhands.graph.weights import Weights

Call = Callable[..., Any]
_aten = torch.ops.aten
_LINEAR = "aten.linear.default"


def takes_product(graph: Graph, node: Node) -> bool:
    """Return whether an operator is a convolution of single pixels, each of which is read: a product of matrices."""
    if not takes_format(graph, node) or "transpose" in node.target:
        return False
    shape = graph.network.weights[weight_name(node)].shape
    if math.prod(shape[2:]) > 1:
        return False
    geometry = geometry_of(node, shape)
    return geometry.groups == 1 and set(geometry.stride) == {1} and not any(geometry.padding)


def packable(graph: Graph) -> frozenset[str]:
    """Return the convolutions whose weights can stay as oneDNN lays them out: over pictures, in float32, one weight
    each."""
    if not can_pack():
        return frozenset()
    uses = Counter(name for node in graph.nodes for name in weights_of(node))

    def may(node: Node) -> bool:
        if not takes_format(graph, node) or convolution_rank(graph, node) != 4 or "transpose" in node.target:
            return False
        spec = graph.network.weights[weight_name(node)]
        return spec.dtype == "float32" and uses[spec.name] == 1 and not geometry_of(node, spec.shape).extra_padding

    return frozenset(node.name for node in graph.nodes if may(node))


def takes_flags(graph: Graph, node: Node) -> bool:
    """Return whether oneDNN and the number of threads can be chosen for an operator."""
    return (node.target in ops.CONVOLUTION and convolution_rank(graph, node) > 0) or node.target in ops.RECURRENT | {
        _LINEAR
    }


def kernel_calls(graph: Graph, choice: Mapping[str, Kernel]) -> dict[str, Call]:
    """Return callables for `Piece(graph, weights, kernels=...)`. Operators at PyTorch's default are absent, and have no
    wrapper."""
    any_channels_last = any(kernel.channels_last for kernel in choice.values())
    may_be_packed = packable(graph) if any(kernel.packed for kernel in choice.values()) else ()
    calls: dict[str, Call] = {}
    for node in graph.nodes:
        kernel = choice.get(node.name)
        if kernel is None:
            continue
        if node.target in ops.CONVOLUTION and convolution_rank(graph, node):
            if kernel.product and takes_product(graph, node):
                calls[node.name] = product
            elif kernel.packed and node.name in may_be_packed:
                calls[node.name] = PackedConvolution(graph, node)
            elif not kernel.is_plain or any_channels_last:
                calls[node.name] = convolution_call(graph, node, kernel)
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
    formats_by_name: dict[str, set[bool]] = {}
    for node in graph.nodes:
        kernel = choice.get(node.name, Kernel())
        convolved = node.arguments[1] if takes_format(graph, node) else None
        for argument in node.arguments:
            if isinstance(argument, Weight):
                formats_by_name.setdefault(argument.name, set()).add(argument is convolved and kernel.channels_last)
    for name, formats in formats_by_name.items():
        tensor = weights.tensors.get(name)
        if tensor is not None and tensor.dim() in CHANNELS_LAST:
            reformat_leaf(tensor, memory_format_of(tensor.dim(), formats == {True}))


class _Linear(torch.autograd.Function):
    """The function aten.linear and its backward, both under a kernel's flags."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel
    ) -> torch.Tensor:
        of_data, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(data if of_weight else None, weight if of_data else None)
        ctx.kernel, ctx.has_bias, ctx.shape = kernel, bias is not None, data.shape
        with Flags(kernel):
            return cast(torch.Tensor, _aten.linear.default(data, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        data, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        with Flags(ctx.kernel):
            of_data = (rows @ weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
            of_weight = rows.t() @ data.reshape(-1, data.shape[-1]) if ctx.needs_input_grad[1] else None
            of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_data, of_weight, of_bias, None


def _linear(kernel: Kernel) -> Call:
    def call(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return apply_function(_Linear, data, weight, bias, kernel)

    return call


def _recurrent(node: Node, kernel: Kernel) -> Call:
    """Return a call of a recurrent operator under a kernel's flags, which matter in forward alone: it records for
    backward either the native steps or oneDNN's layer."""
    operator = ops.resolve(node.target)

    def call(*arguments: Any) -> Any:
        with Flags(kernel):
            return operator(*arguments)

    return call

"""A convolution whose weight stays in the layout that oneDNN gives it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from manyhands.graph.convolution_geometry import geometry_of, weight_name
from manyhands.graph.memory_formats import reformat
from manyhands.graph.nodes import Node, Value
from manyhands.graph.weights import Weights, plain

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

_onednn = torch.ops.mkldnn


@cache
@torch.no_grad()
def can_pack() -> bool:
    """Return whether this build of PyTorch lays out weights by oneDNN and convolves with them; it need not have all of
    these functions."""
    data, weight, ones = torch.ones(1, 4, 3, 3), torch.ones(4, 2, 2, 2), [1, 1]
    try:
        packed = _onednn._reorder_convolution_weight(weight, [0, 0], ones, ones, 2, [1, 4, 3, 3])
        result = _onednn._convolution_pointwise.default(data, packed, None, [0, 0], ones, ones, 2, "none", [], "")
        return bool((result == 8).all()) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError):
        return False


class PackedConvolution:
    """A convolution whose weight oneDNN lays out once, when it is at rest; until then a plain one in channels_last.

    The layout is the best for one shape of the input. For another shape oneDNN would change it in every call, which can
    take a hundred times as long as convolving: then the original weight is used.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.weight = weight_name(node)
        self.geometry = geometry_of(node, graph.network.weights[self.weight].shape)
        data = node.arguments[0]
        assert isinstance(data, Value)
        self.source = graph.network.tensors[data.name]
        self.shape: tuple[int, ...] = ()
        """The shape of the input that the weight is laid out for."""
        g = self.geometry
        self._given = (g.padding, g.stride, g.dilation, g.groups)

    def pack(self, weights: Weights, shape: tuple[int, ...], padding: list[int] | None = None) -> bool:
        """Lay the weight out for calls of this convolution only; return whether it was laid out otherwise before."""
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
        """Convolve with a weight that is laid out; `post` is the activation, as oneDNN names it, and `numbers` are its
        parameters."""
        settings = self._given if padding is None else (padding, *self._given[1:])
        if not data.is_contiguous(memory_format=torch.channels_last):
            data = reformat(data, True)
        made: torch.Tensor = _onednn._convolution_pointwise.default(data, weight, bias, *settings, post, numbers, "")
        return made

    def added(
        self, data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor,
        post: str | None, *, overwrites: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Convolve, add `other` (over it or beside it), and apply the activation of the sum, if any."""
        if not data.is_contiguous(memory_format=torch.channels_last):
            data = reformat(data, True)
        arguments: tuple[Any, ...] = (weight, bias, *self._given, "add", 1.0, post, [], "")
        made: torch.Tensor = (
            _onednn._convolution_pointwise_.binary(other, data, *arguments)
            if overwrites
            else _onednn._convolution_pointwise.binary(data, other, *arguments)
        )
        return made

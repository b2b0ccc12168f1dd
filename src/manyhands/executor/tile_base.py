"""An operator of a tiled stage: forward on boxes and backward on boxes, with nothing recorded in between.

    inputs over their demand ──forward──▶ a box of the output
    gradient over a box of the output ──input_gradients──▶ gradients over the demand of that box
                                      ──weight_gradients─▶ added to the weights' own

The boxes come from outside: an operator knows nothing of tiles, groups or messages. Callers have switched
autograd off (an executor does so for a whole round); what an operator knows no formula for it runs again on the crops,
recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, WeightGradientCall
from manyhands.facts.boxes import Box
from manyhands.facts.network import TensorSpec
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.kernels import kernel_calls
from manyhands.graph.memory_formats import CHANNELS_LAST
from manyhands.graph.piece import Context, Piece
from manyhands.graph.weights import Weights


class TileOperator:
    """One operator of a graph, on boxes. This class runs any operator again to obtain its gradients."""

    def __init__(self, graph: Graph, index: int, weights: Weights, kernel: Kernel | None = None) -> None:
        self.graph, self.index, self.weights, self.kernel = graph, index, weights, kernel
        self.node, self.op = graph.nodes[index], graph.network.ops[index]
        self.output = self.node.outputs[0]
        self.sources: list[TensorSpec] = [graph.network.tensors[read.tensor] for read in self.op.reads]
        self.dtype: torch.dtype = getattr(torch, self.output.dtype)
        self._demands: dict[tuple[int, Box], Box] = {}
        """Boxes of inputs that were requested: the same in every step."""

    def rest(self) -> None:
        """Prepare for weights that will not change any more, and for passes that all compute the same box."""

    def samples(self, out: Box) -> int:
        """Return the number of samples that a box of the output holds."""
        axis = self.output.batch_axis
        return 1 if axis is None else out.shape[axis] // self.output.rows_per_sample

    def extents(self, number: int, out: Box) -> tuple[int, ...]:
        """Return the whole shape of an input, for as many samples as `out` has."""
        return self.sources[number].shape_for(self.samples(out))

    def demand(self, number: int, out: Box) -> Box:
        """Return the box of an input that is needed to make `out`."""
        box = self._demands.get((number, out))
        if box is None:
            box = self.op.reads[number].demand(out, self.extents(number, out))
            self._demands[number, out] = box
        return box

    def raw_demand(self, number: int, out: Box) -> Box:
        """Return the demand, with the zeros beyond the border that the operator would like to find in place."""
        return self.demand(number, out)

    def forward(self, call: ForwardCall) -> Tensor:
        """Return `out` of the output, from inputs that hold at least its demand; written to `into` where that is
        given."""
        out = call.out
        return placed(self._again(self._crops(call.inputs, out), out, call.context), call.into)

    def input_gradients(self, call: InputGradientCall) -> list[BoxTensor | None]:
        """Return gradients of the wanted inputs, over boxes that contain their demand; None where that is empty.

        `inputs` and `output` hold what `op.derives_from` names, over the demand of `out` and over `out`. The result may
        be (or be a part of) `gradient` itself: a caller must own it before adding to it.
        """
        out, wanted = call.out, call.wanted
        if not any(wanted):
            return [None for _ in wanted]
        crops = self._crops(call.inputs, out)
        leaves = [crop.detach().requires_grad_() if want else crop for crop, want in zip(crops, wanted, strict=True)]
        with torch.enable_grad():
            made = self._again(leaves, out, call.context)
        wanted_leaves = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        derivatives = iter(
            torch.autograd.grad(made, wanted_leaves, call.gradient, allow_unused=True) if made.requires_grad else ()
        )
        gradients = [next(derivatives, None) if want else None for want in wanted]
        return [
            None if part is None or part.numel() == 0 else BoxTensor(self.demand(number, out), part)
            for number, part in enumerate(gradients)
        ]

    def weight_gradients(self, call: WeightGradientCall) -> None:
        """Add to the gradients of the trainable weights what the gradient over `out` gives."""
        out = call.out
        if not self.trainable:
            return
        with torch.enable_grad():
            made = self._again(self._crops(call.inputs, out), out, call.context)
        parts = torch.autograd.grad(made, self.trainable, call.gradient, allow_unused=True)
        for parameter, part in zip(self.trainable, parts, strict=True):
            if part is not None:
                add_gradient(parameter, part)

    @cached_property
    def trainable(self) -> list[Tensor]:
        """The operator's weights that collect gradients."""
        return [self.weights.tensors[name] for name in self.op.weights if self.weights.tensors[name].requires_grad]

    @cached_property
    def _piece(self) -> Piece:
        calls = {} if self.kernel is None else kernel_calls(self.graph, {self.node.name: self.kernel})
        return Piece(self.graph, self.weights, self.index, self.index + 1, kernels=calls)

    def _crops(self, inputs: Sequence[BoxTensor | None], out: Box) -> list[Tensor]:
        """Return each input over its demand; where only its shape matters, a placeholder of that shape."""
        crops = []
        for number, source in enumerate(inputs):
            box = self.demand(number, out)
            if source is not None:
                crops.append(source.view(box))
            else:
                crops.append(blank(box, getattr(torch, self.sources[number].dtype), self.weights.device))
        return crops

    def _again(self, crops: Sequence[Tensor], out: Box, context: Context) -> Tensor:
        values = {read.tensor: crop for read, crop in zip(self.op.reads, crops, strict=True)}
        made = self._piece(values, replace(context, samples=self.samples(out)))
        return made[self.output.name]


def placed(made: Tensor, into: Tensor | None) -> Tensor:
    """Return what was made, in `into` where that is given."""
    return made if into is None else into.copy_(made)


def blank(box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of the shape of a box, without its memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(box.shape)


def add_gradient(parameter: Tensor, part: Tensor) -> None:
    """Add to a weight's gradient; the first part, which must be the caller's to give, becomes it."""
    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a map's memory has no gaps, in one of the two formats."""
    return tensor.is_contiguous() or _is_channels_last(tensor)


def _is_channels_last(tensor: Tensor) -> bool:
    layout = CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


def are_alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two maps on the CPU lie in memory alike, without gaps: for calls that write to a given place
    without a look at its format."""
    if not first.is_cpu or not second.is_cpu:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    return _is_channels_last(first) and _is_channels_last(second)


def format_of(tensor: Tensor) -> torch.memory_format | None:
    """Return the format in which a map's memory lies, also of a part of one; None where both formats are the same."""
    rank = tensor.dim()
    if rank not in CHANNELS_LAST or tensor.shape[1] == 1 or prod(tensor.shape[2:]) == 1:
        return None
    return CHANNELS_LAST[rank] if tensor.stride(1) == 1 else torch.contiguous_format


def formatted_like(gradient: Tensor, others: Sequence[BoxTensor | None]) -> Tensor:
    """Return a gradient in the memory format of what it is read beside: operators on maps in two formats take many
    times as long. Kernels of neighbours may differ in it."""
    for other in others:
        is_beside = other is not None and other.tensor.dim() == gradient.dim()
        layout = format_of(other.tensor) if other is not None and is_beside else None
        if layout is not None:
            return gradient if format_of(gradient) in (None, layout) else gradient.contiguous(memory_format=layout)
    return gradient


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def widened(tensor: Tensor, box: Box, wide: Box, value: float = 0.0) -> Tensor:
    """Return a tensor of `box` as one of `wide`, which need not contain it: cut, and filled up with `value`."""
    if box == wide:
        return tensor
    amounts: list[int] = []
    for (low, high), (first, last) in zip(reversed(box.intervals), reversed(wide.intervals)):
        amounts += [low - first, last - high]
    if all(amount <= 0 for amount in amounts):
        return BoxTensor(box, tensor).view(wide)
    if box.intersect(wide).is_empty:
        return tensor.new_full(wide.shape, value)
    return torch.constant_pad_nd(tensor, amounts, value)

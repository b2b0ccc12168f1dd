"""The calls that a tiled stage makes of its operators, each one record: what to compute, over which boxes, from what.

    ForwardCall            inputs over their demand                     -> a box of the output
    InputGradientCall      the output's gradient over a box             -> gradients of the inputs over their demand
    WeightGradientCall     the same gradient and the inputs             -> added to the weights' gradients

An operator knows nothing of tiles, groups or messages: a record says all that it needs beside its own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from manyhands.executor.boxes import narrowed, steps_to
from manyhands.executor.statistics import Moments
from manyhands.facts.boxes import Box
from manyhands.graph.piece import Context


class BoxTensor(msgspec.Struct, eq=False, gc=False):
    """A tensor that holds `box` of a whole one. Where the box reaches over the true border the tensor holds zeros."""

    box: Box
    tensor: Tensor

    def view(self, box: Box) -> Tensor:
        """Return the part of it that `box` names, in place."""
        if box == self.box:
            return self.tensor
        return narrowed(self.tensor, steps_to(box, self.box))


Notes = dict[str, BoxTensor]
"""The tensors that one operator keeps of one micro-batch from its forward pass for its backward, each with the box it
is over."""


@dataclass(slots=True)
class GatheredStatistics:
    """The combined statistics of all tiles at one operator, for one micro-batch."""

    result: Tensor | None = None
    """The output of a pool."""
    moments: Moments | None = None
    """The moments of a normalization: for each feature, over all tiles."""
    local_sums: tuple[Box, Tensor, Tensor] | None = None
    """The box that this tile's backward statistics are over, and for each feature Σ dy·x̂ and Σ dy: the weights'
    gradients too."""


class ForwardCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Compute `out` of the output from inputs that hold at least its demand."""

    inputs: Sequence[BoxTensor]
    out: Box
    context: Context
    into: Tensor | None = None
    """The memory to write the result to; None: memory of its own."""
    notes: Notes | None = None
    """Filled for the backward pass; None: there will be none."""
    may_overwrite: bool = False
    """Whether nothing reads the first input after this call, so that its memory may become the result's."""
    statistics: GatheredStatistics | None = None
    """The combined statistics of all tiles, where the operator gathers them."""


class InputGradientCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Compute the gradients of the wanted inputs from the output's gradient over `out`.

    `inputs` and `output` hold what `op.derives_from` names, over the demand of `out` and over `out`.
    """

    inputs: Sequence[BoxTensor | None]
    output: BoxTensor | None
    gradient: Tensor
    out: Box
    wanted: Sequence[bool]
    context: Context
    notes: Notes | None = None
    """The notes of the forward pass; without them, or over another box, they are computed again."""
    may_overwrite: bool = False
    """Whether nothing reads the gradient after this call, so that its memory may become the result's."""
    statistics: GatheredStatistics | None = None
    total: Tensor | None = None
    """All tiles' backward statistics, added up."""
    corrected: Box | None = None
    """The box in which a normalization adds its correction; for a pool, the box of its input whose gradient is
    computed."""


class WeightGradientCall(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Add to the gradients of the trainable weights what the output's gradient over `out` gives."""

    inputs: Sequence[BoxTensor]
    gradient: Tensor
    out: Box
    context: Context
    statistics: GatheredStatistics | None = None

"""The runner of one stage on one device: what the executor asks of it, whichever way the stage is shared.

SegmentRunner (here)          whole samples: segments of the captured graph, recorded by autograd
TileRunner (tiles.py)         tiles of the image: operator by operator, over boxes
ChannelRunner (channels.py)   some channels, in inference: the graph rewritten for this device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import torch

from manyhands.executor.boxes import cut_out, dtype_of, place_of
from manyhands.executor.segment_micro_batch import SegmentMicroBatch
from manyhands.executor.segments import Segments, bounds_of
from manyhands.executor.statistics import merged, own_moments
from manyhands.facts.boxes import Box
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Call, Context
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Forward, Reduce
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.recomputation import recomputed_spans


class Runner(Protocol):
    """Computes a stage's actions and keeps the tensors of each in-flight micro-batch."""

    @property
    def geometry(self) -> StageGeometry: ...

    @property
    def elements(self) -> int:
        """Elements of maps that were computed as tiles."""

    def rest(self, samples: int) -> None:
        """Prepare for weights that are all here and will not change any more, and for passes of so many samples."""

    def drop(self, micro_batch: int) -> None:
        """Forget a micro-batch."""

    def settle(self, micro_batch: int) -> None:
        """Note that a forward pass has ended, and that everything but its own backward pass has read what it made."""

    def features(self) -> list[torch.Tensor]:
        """Return the values that are held now."""

    def feature_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of values that are held now."""

    def forward(self, action: Forward, context: Context) -> None: ...

    def backward(self, action: Backward, context: Context) -> None: ...

    def local_statistics(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """Return this device's row for an all-gather of statistics."""

    def take_gathered(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        """Take all devices' rows, in the order of the devices."""

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, on the CPU, to be sent."""

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None: ...

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor: ...

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None: ...

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return what the network returns, for the loss."""

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        """Take a part of the network's outputs from another device of this stage."""

    def take_gradients(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of the outputs from the loss."""

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """Return a part of the outputs' gradients, for another device of this stage."""

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """Return this device's part of the outputs, for the process that started a stream."""

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        """Return the tensor where numbers stopped being finite, as far as this device can tell."""


class ForwardOnly:
    """The base of a runner without a backward pass: it refuses what belongs to one."""

    def settle(self, micro_batch: int) -> None:
        """Do nothing: nothing is kept for a backward pass."""

    def feature_gradients(self) -> list[torch.Tensor]:
        return []

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(f"{type(self).__name__} is for inference")

    backward = local_statistics = take_gathered = gradient = add_gradient = outputs = put_output = _refuse
    take_gradients = output_gradient = _refuse


class SegmentRunner:
    """The runner of a stage whose devices compute whole samples."""

    elements = 0

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        geometry: StageGeometry,
        device: str,
        actions: Sequence[Action],
        kernels: Mapping[str, Call],
    ) -> None:
        self.graph, self.geometry, self.device = graph, geometry, device
        stage_actions = [a for a in actions if isinstance(a, (Forward, Backward, Reduce)) and a.stage == geometry.index]
        norms = {a.first for a in stage_actions if isinstance(a, Reduce) and a.what == "statistics"}
        self.segments = Segments(
            graph, weights, bounds_of(stage_actions, norms), kernels=kernels, shared_norms=norms,
            recomputed=recomputed_spans(geometry),
        )  # fmt: skip
        self.in_flight: dict[int, SegmentMicroBatch] = {}
        self._boxes: dict[str, Box] = {}

    def rest(self, samples: int) -> None:
        for piece in self.segments.pieces.values():
            piece.rest(samples)

    def micro_batch(self, micro_batch: int) -> SegmentMicroBatch:
        batch = self.in_flight.get(micro_batch)
        if batch is None:
            batch = self.in_flight[micro_batch] = SegmentMicroBatch()
        return batch

    def drop(self, micro_batch: int) -> None:
        self.in_flight.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        self.segments.settle(self.micro_batch(micro_batch))

    def features(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.values.values()]

    def feature_gradients(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.gradients.values()]

    def forward(self, action: Forward, context: Context) -> None:
        batch = self.micro_batch(action.micro_batch)
        self.segments.forward(batch, action.first, action.last, context)
        if action.part == "again":
            self.segments.forget_again(batch, action.first, action.last)

    def backward(self, action: Backward, context: Context) -> None:
        self.segments.backward(self.micro_batch(action.micro_batch), action.first, action.last)

    def local_statistics(self, reduce: Reduce, context: Context) -> torch.Tensor:
        batch, norm = self.micro_batch(reduce.micro_batch), self.segments.norms[reduce.first]
        if not reduce.backward:
            return own_moments(batch.values[norm.input])
        data = batch.tapes[reduce.first].data
        assert data is not None
        gradient = batch.gradients.get(norm.output)
        if gradient is None:
            gradient = torch.zeros_like(data)
        scaled, sums = norm.own_sums(data, gradient, batch.moments[reduce.first])
        batch.scaled[reduce.first] = (scaled, sums, [])
        return sums

    def take_gathered(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        batch = self.micro_batch(reduce.micro_batch)
        if not reduce.backward:
            batch.moments[reduce.first] = merged(rows)
            return
        scaled, sums, _ = batch.scaled[reduce.first]
        batch.scaled[reduce.first] = (scaled, sums, rows)

    def _hull(self, tensor: str) -> Box:
        """Return the box of a tensor that this device holds."""
        hull = self._boxes.get(tensor)
        if hull is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            hull = self._boxes[tensor] = layout.hull(self.device)
        return hull

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self.micro_batch(micro_batch).values[tensor], self._hull(tensor), box)

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        values, hull = self.micro_batch(micro_batch).values, self._hull(tensor)
        if box == hull:
            values[tensor] = data
            return
        if tensor not in values:
            values[tensor] = data.new_empty(hull.shape)
        values[tensor][place_of(box, hull)] = data

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        collected = self.micro_batch(micro_batch).gradients.get(tensor)
        if collected is None:
            return torch.zeros(box.shape, dtype=dtype_of(self.graph.network.tensors[tensor].dtype))
        return cut_out(collected, self._hull(tensor), box)

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        gradients, hull = self.micro_batch(micro_batch).gradients, self._hull(tensor)
        collected = gradients.get(tensor)
        if collected is None and box == hull:
            gradients[tensor] = data
            return
        if collected is None:
            collected = gradients[tensor] = data.new_zeros(hull.shape)
        collected[place_of(box, hull)] += data

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        values = self.micro_batch(micro_batch).values
        return {name: values[name] for name in self.graph.outputs}

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        raise AssertionError("outputs are gathered in tiled stages only")

    def take_gradients(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        self.micro_batch(micro_batch).add_gradients(gradients)

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        raise AssertionError("outputs are gathered in tiled stages only")

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        values = self.micro_batch(micro_batch).values
        return [values[name].detach().contiguous().cpu() for name in self.graph.outputs]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        return self.segments.first_not_finite(self.micro_batch(micro_batch), context)

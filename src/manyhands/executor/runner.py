"""One stage on one device: what the executor asks of it, whichever way the stage is shared.

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


class Runner(Protocol):
    """Computes a stage's actions and keeps the tensors of each in-flight micro-batch."""

    @property
    def geometry(self) -> StageGeometry: ...

    @property
    def elements(self) -> int:
        """Elements of maps that were computed as tiles."""

    def rest(self, samples: int) -> None:
        """The weights are all here and will not change any more; passes are of so many samples."""

    def drop(self, micro_batch: int) -> None:
        """Forget a micro-batch."""

    def settle(self, micro_batch: int) -> None:
        """A forward pass has ended, and what it made has been read by everybody but its own backward pass."""

    def features(self) -> list[torch.Tensor]:
        """The values that are held now."""

    def feature_gradients(self) -> list[torch.Tensor]:
        """Their gradients."""

    def forward(self, action: Forward, context: Context) -> None: ...

    def backward(self, action: Backward, context: Context) -> None: ...

    def local_statistics(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """Return this device's row for an all-gather of statistics."""

    def take_gathered(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        """Take all devices' rows, in the order of the devices."""

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU, to be sent."""

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None: ...

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor: ...

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None: ...

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """What the network returns, for the loss."""

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        """A part of that, from another device of this stage."""

    def take_gradients(self, micro_batch: int, found: Mapping[str, torch.Tensor]) -> None:
        """What the loss gave back."""

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """A part of that, for another device of this stage."""

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """This device's part of the outputs, for whoever started a stream."""

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        """Where numbers stopped being numbers, as far as this device can tell."""


class ForwardOnly:
    """What a runner that has no way back answers to what is asked on one."""

    def settle(self, micro_batch: int) -> None:
        """Nothing is kept for a way back."""

    def feature_gradients(self) -> list[torch.Tensor]:
        return []

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(f"{type(self).__name__} is for inference")

    backward = local_statistics = take_gathered = gradient = add_gradient = outputs = put_output = _refuse
    take_gradients = output_gradient = _refuse


class SegmentRunner:
    """A stage whose devices compute whole samples."""

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
        own = [a for a in actions if isinstance(a, (Forward, Backward, Reduce)) and a.stage == geometry.index]
        norms = {a.first for a in own if isinstance(a, Reduce) and a.what == "statistics"}
        self.segments = Segments(graph, weights, bounds_of(own, norms), kernels=kernels, shared_norms=norms)
        self.in_flight: dict[int, SegmentMicroBatch] = {}
        self._boxes: dict[str, Box] = {}

    def rest(self, samples: int) -> None:
        for piece in self.segments.pieces.values():
            piece.rest(samples)

    def micro_batch(self, micro_batch: int) -> SegmentMicroBatch:
        found = self.in_flight.get(micro_batch)
        if found is None:
            found = self.in_flight[micro_batch] = SegmentMicroBatch()
        return found

    def drop(self, micro_batch: int) -> None:
        self.in_flight.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        self.segments.settle(self.micro_batch(micro_batch))

    def features(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.values.values()]

    def feature_gradients(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.gradients.values()]

    def forward(self, action: Forward, context: Context) -> None:
        self.segments.forward(self.micro_batch(action.micro_batch), action.first, action.last, context)

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
        scaled, own = norm.own_sums(data, gradient, batch.moments[reduce.first])
        batch.scaled[reduce.first] = (scaled, own, [])
        return own

    def take_gathered(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        batch = self.micro_batch(reduce.micro_batch)
        if not reduce.backward:
            batch.moments[reduce.first] = merged(rows)
            return
        scaled, own, _ = batch.scaled[reduce.first]
        batch.scaled[reduce.first] = (scaled, own, rows)

    def _hull(self, tensor: str) -> Box:
        """The box of a tensor that this device holds."""
        found = self._boxes.get(tensor)
        if found is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            found = self._boxes[tensor] = layout.hull(self.device)
        return found

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
        found = self.micro_batch(micro_batch).gradients.get(tensor)
        if found is None:
            return torch.zeros(box.shape, dtype=dtype_of(self.graph.network.tensors[tensor].dtype))
        return cut_out(found, self._hull(tensor), box)

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        gradients, hull = self.micro_batch(micro_batch).gradients, self._hull(tensor)
        known = gradients.get(tensor)
        if known is None and box == hull:
            gradients[tensor] = data
            return
        if known is None:
            known = gradients[tensor] = data.new_zeros(hull.shape)
        known[place_of(box, hull)] += data

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        values = self.micro_batch(micro_batch).values
        return {name: values[name] for name in self.graph.outputs}

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        raise AssertionError("outputs are gathered in tiled stages only")

    def take_gradients(self, micro_batch: int, found: Mapping[str, torch.Tensor]) -> None:
        self.micro_batch(micro_batch).add_gradients(found)

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        raise AssertionError("outputs are gathered in tiled stages only")

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        values = self.micro_batch(micro_batch).values
        return [values[name].detach().contiguous().cpu() for name in self.graph.outputs]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        return self.segments.first_not_finite(self.micro_batch(micro_batch), context)

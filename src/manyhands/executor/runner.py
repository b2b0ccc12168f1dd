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
from manyhands.executor.flight import Flight
from manyhands.executor.segments import Segments, bounds_of
from manyhands.executor.statistics import merged, own_moments
from manyhands.facts.boxes import Box
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Call, Context
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Action, Backward, Forward, Reduce
from manyhands.schedule.geometry import StageGeometry


class Runner(Protocol):
    """Computes a stage's actions and keeps its tensors, one flight for each micro-batch under way."""

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

    def deltas(self) -> list[torch.Tensor]:
        """Their gradients."""

    def forward(self, action: Forward, context: Context) -> None: ...

    def backward(self, action: Backward, context: Context) -> None: ...

    def own_row(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """This device's part of sums that are about to be exchanged."""

    def take_rows(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        """Everybody's, in the order of the devices."""

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

    def deltas(self) -> list[torch.Tensor]:
        return []

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError(f"{type(self).__name__} is for inference")

    backward = own_row = take_rows = gradient = add_gradient = outputs = put_output = _refuse
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
        self.flights: dict[int, Flight] = {}
        self._boxes: dict[str, Box] = {}

    def rest(self, samples: int) -> None:
        for piece in self.segments.pieces.values():
            piece.rest(samples)

    def flight(self, micro_batch: int) -> Flight:
        found = self.flights.get(micro_batch)
        if found is None:
            found = self.flights[micro_batch] = Flight()
        return found

    def drop(self, micro_batch: int) -> None:
        self.flights.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        self.segments.settle(self.flight(micro_batch))

    def features(self) -> list[torch.Tensor]:
        return [tensor for flight in self.flights.values() for tensor in flight.values.values()]

    def deltas(self) -> list[torch.Tensor]:
        return [tensor for flight in self.flights.values() for tensor in flight.gradients.values()]

    def forward(self, action: Forward, context: Context) -> None:
        self.segments.forward(self.flight(action.micro_batch), action.first, action.last, context)

    def backward(self, action: Backward, context: Context) -> None:
        self.segments.backward(self.flight(action.micro_batch), action.first, action.last)

    def own_row(self, reduce: Reduce, context: Context) -> torch.Tensor:
        flight, norm = self.flight(reduce.micro_batch), self.segments.norms[reduce.first]
        if not reduce.backward:
            return own_moments(flight.values[norm.input])
        data = flight.records[reduce.first].data
        assert data is not None
        gradient = flight.gradients.get(norm.output)
        if gradient is None:
            gradient = torch.zeros_like(data)
        scaled, own = norm.own_sums(data, gradient, flight.moments[reduce.first])
        flight.scaled[reduce.first] = (scaled, own, [])
        return own

    def take_rows(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        flight = self.flight(reduce.micro_batch)
        if not reduce.backward:
            flight.moments[reduce.first] = merged(rows)
            return
        scaled, own, _ = flight.scaled[reduce.first]
        flight.scaled[reduce.first] = (scaled, own, rows)

    def _hull(self, tensor: str) -> Box:
        """The box of a tensor that this device holds."""
        found = self._boxes.get(tensor)
        if found is None:
            made_here = self.geometry.is_made_here(tensor)
            layout = self.geometry.owned(tensor) if made_here else self.geometry.entering(tensor)
            found = self._boxes[tensor] = layout.hull(self.device)
        return found

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self.flight(micro_batch).values[tensor], self._hull(tensor), box)

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        values, hull = self.flight(micro_batch).values, self._hull(tensor)
        if box == hull:
            values[tensor] = data
            return
        if tensor not in values:
            values[tensor] = data.new_empty(hull.shape)
        values[tensor][place_of(box, hull)] = data

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        found = self.flight(micro_batch).gradients.get(tensor)
        if found is None:
            return torch.zeros(box.shape, dtype=dtype_of(self.graph.network.tensors[tensor].dtype))
        return cut_out(found, self._hull(tensor), box)

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        gradients, hull = self.flight(micro_batch).gradients, self._hull(tensor)
        known = gradients.get(tensor)
        if known is None and box == hull:
            gradients[tensor] = data
            return
        if known is None:
            known = gradients[tensor] = data.new_zeros(hull.shape)
        known[place_of(box, hull)] += data

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        values = self.flight(micro_batch).values
        return {name: values[name] for name in self.graph.outputs}

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        raise AssertionError("outputs are gathered in tiled stages only")

    def take_gradients(self, micro_batch: int, found: Mapping[str, torch.Tensor]) -> None:
        self.flight(micro_batch).add_gradients(found)

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        raise AssertionError("outputs are gathered in tiled stages only")

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        values = self.flight(micro_batch).values
        return [values[name].detach().contiguous().cpu() for name in self.graph.outputs]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        return self.segments.first_not_finite(self.flight(micro_batch), context)

"""A tiled stage on one device: every operator forward and backward over boxes, by the stage's geometry (TILE §4).

Nothing here is recorded by autograd: each operator says what its derivative reads (`Op.derives_from`), so a value is
kept for exactly as long as something will read it, and weight gradients are computed when nothing waits for them.

    TiledStage (tile_stage.py)            operators, boxes and memory of the stage on this device
    TileForward, TileBackward             run its actions
    TileMicroBatch (tile_micro_batch.py)  what is kept of one in-flight micro-batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from manyhands.executor.boxes import cut_out, holds
from manyhands.executor.tile_backward import TileBackward
from manyhands.executor.tile_call import BoxTensor
from manyhands.executor.tile_forward import TileForward
from manyhands.executor.tile_micro_batch import TileMicroBatch
from manyhands.executor.tile_stage import TiledStage
from manyhands.executor.tile_statistics import StatisticsOperator
from manyhands.facts.boxes import Box
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Backward, Forward, Reduce
from manyhands.schedule.tiles import TileGeometry


class TileRunner:
    """Runs the actions of one device in a tiled stage, in rounds that autograd does not record."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        geometry: TileGeometry,
        device: str,
        kernels: Mapping[str, Kernel],
        torch_device: torch.device,
    ) -> None:
        self.graph, self.network, self.geometry, self.device = graph, graph.network, geometry, device
        self.stage = TiledStage(graph, weights, geometry, device, kernels, torch_device)
        self.ways, self.memory = self.stage.ways, self.stage.memory
        self.in_flight: defaultdict[int, TileMicroBatch] = defaultdict(TileMicroBatch)
        self._forward, self._backward = TileForward(self.stage), TileBackward(self.stage)

    @property
    def elements(self) -> int:
        """Elements of maps computed forward so far."""
        return self._forward.elements

    def rest(self, samples: int) -> None:
        self.stage.rest()

    def drop(self, micro_batch: int) -> None:
        self.in_flight.pop(micro_batch, None)

    def settle(self, micro_batch: int) -> None:
        """Do nothing: boxes are released one by one, as operators are passed."""

    def features(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.features()]

    def feature_gradients(self) -> list[torch.Tensor]:
        return [tensor for batch in self.in_flight.values() for tensor in batch.feature_gradients()]

    def forward(self, action: Forward, context: Context) -> None:
        self._forward.run(self.in_flight[action.micro_batch], action, context)

    def backward(self, action: Backward, context: Context) -> None:
        self._backward.run(self.in_flight[action.micro_batch], action, context)

    # Statistics of the whole map

    def local_statistics(self, reduce: Reduce, context: Context) -> torch.Tensor:
        """Return this tile's row of the statistics at an operator."""
        batch, index = self.in_flight[reduce.micro_batch], reduce.first
        operator = self.stage.operators[index]
        assert isinstance(operator, StatisticsOperator)
        if not reduce.backward:
            names = self.ways.forward(index).inputs
            return operator.local_statistics(self.memory.inputs(batch, names), self.ways.owned(names[0]))
        way = self.ways.backward(index)
        gradient = batch.gradients.get(way.name) or self.memory.zeros(way.name)
        inputs, beyond = self.memory.inputs(batch, way.inputs), batch.beyond.get(way.inputs[0], ())
        pieces = [(piece, self._backward.rim(batch, way.name, piece.box)) for piece in beyond]
        return operator.local_backward_statistics(inputs, gradient, way.over, batch.statistics[index], pieces)

    def take_gathered(self, reduce: Reduce, rows: list[torch.Tensor]) -> None:
        batch, index = self.in_flight[reduce.micro_batch], reduce.first
        operator = self.stage.operators[index]
        assert isinstance(operator, StatisticsOperator)
        if reduce.backward:
            batch.totals[index] = rows[0] + rows[1] if len(rows) == 2 else torch.stack(rows).sum(0)
            return
        batch.statistics[index] = operator.combine(rows, self.ways.shares(index))

    # What crosses to other devices and other stages

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, to be sent."""
        value = self.in_flight[micro_batch].values[tensor]
        return cut_out(value.tensor, value.box, box)

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        batch = self.in_flight[micro_batch]
        if tensor in self.ways.fetched_in_pieces:
            batch.beyond.setdefault(tensor, []).append(BoxTensor(box, data))
            return
        if tensor not in batch.values:
            if box == self.memory.buffer(tensor):
                batch.values[tensor] = BoxTensor(box, data)
                return
            batch.values[tensor] = self.memory.room(tensor, box)
        batch.values[tensor].view(box).copy_(data)

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor's gradient, to be sent; zeros where none flowed back."""
        batch = self.in_flight[micro_batch]
        for rim in batch.rims.get(tensor, ()):
            if holds(rim.box, box):
                return cut_out(rim.tensor, rim.box, box)
        gradient = batch.gradients.get(tensor)
        if gradient is None:
            return torch.zeros(box.shape, dtype=self.memory.dtype(tensor))
        return cut_out(gradient.tensor, gradient.box, box)

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        self._backward.add(self.in_flight[micro_batch], tensor, BoxTensor(box, data), box, fresh=True)

    # The network's outputs

    def outputs(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return what the network returns, whole: on the device that has gathered it."""
        batch = self.in_flight[micro_batch]
        outputs = {}
        for name in self.graph.outputs:
            if name not in self.geometry.maps:
                outputs[name] = batch.values[name].tensor
                continue
            whole = self._gathered(batch, name)
            tile = self.geometry.own(self.device, name)
            if not tile.is_empty:
                whole[tile.slices()] = batch.values[name].view(tile)
            outputs[name] = whole
        return outputs

    def _gathered(self, batch: TileMicroBatch, name: str) -> torch.Tensor:
        if name not in batch.gathered:
            shape, dtype = self.geometry.shape(name), self.memory.dtype(name)
            batch.gathered[name] = torch.empty(shape, dtype=dtype, device=self.memory.torch_device)
        return batch.gathered[name]

    def put_output(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        self._gathered(self.in_flight[micro_batch], tensor)[box.slices()] = data

    def take_gradients(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the loss' gradients of what the network returned."""
        batch = self.in_flight[micro_batch]
        for name, tensor in gradients.items():
            if name in self.network.inputs or not self.network.tensors[name].differentiable:
                continue
            if name not in self.geometry.maps:
                whole = Box.whole(tensor.shape)
                self._backward.add(batch, name, BoxTensor(whole, tensor), whole, fresh=True)
                continue
            batch.returned[name] = tensor
            tile = self.geometry.own(self.device, name)
            if not tile.is_empty:
                self._backward.add(batch, name, BoxTensor(tile, tensor[tile.slices()]), tile, fresh=False)
        batch.gathered.clear()

    def output_gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        returned = self.in_flight[micro_batch].returned.get(tensor)
        if returned is None:
            return torch.zeros(box.shape, dtype=self.memory.dtype(tensor))
        return cut_out(returned, Box.whole(returned.shape), box)

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        """Return this device's part of what the network returns, for the process that started a stream."""
        values = self.in_flight[micro_batch].values
        return [
            cut_out(values[name].tensor, values[name].box, box).cpu()
            for name in self.graph.outputs
            for box in self.geometry.returning(name).boxes(self.device)
            if not box.is_empty
        ]

    def first_not_finite(self, micro_batch: int, context: Context) -> str | None:
        """Return the first tensor at hand with a number that is not finite."""
        values = self.in_flight[micro_batch].values
        for name in (*self.network.inputs, *self.network.producer):
            value = values.get(name)
            if value is not None and value.tensor.is_floating_point() and not bool(torch.isfinite(value.tensor).all()):
                return name
        return None

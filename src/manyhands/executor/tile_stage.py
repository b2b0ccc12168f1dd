"""A tiled stage as one device runs it: its operators, which boxes they are over, and the memory of its maps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.executor.tile_base import TileOperator
from manyhands.executor.tile_memory import TileMemory
from manyhands.executor.tile_operators import tile_operator
from manyhands.executor.tile_ways import TileWays
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Piece
from manyhands.graph.weights import Weights
from manyhands.schedule.tiles import TileGeometry


class TiledStage:
    """The common part of forward and backward in a tiled stage; nothing here belongs to a micro-batch."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        geometry: TileGeometry,
        device: str,
        kernels: Mapping[str, Kernel],
        torch_device: torch.device,
    ) -> None:
        self.graph, self.network, self.weights = graph, graph.network, weights
        self.geometry, self.device = geometry, device
        self.operators: dict[int, TileOperator] = {}
        self.pieces: dict[int, Piece] = {}
        """Operators on tensors that every tile has whole, and updates of buffers."""
        for index in range(geometry.first, geometry.last):
            op = self.network.ops[index]
            if op.outputs and any(name in geometry.maps for name in op.inputs):
                self.operators[index] = tile_operator(graph, index, weights, kernels.get(op.name))
            else:
                self.pieces[index] = Piece(graph, weights, index, index + 1)
        self.ways = TileWays(geometry, device, frozenset(self.operators))
        self.memory = TileMemory(self.ways, self.operators, kernels, torch_device)

    def rest(self) -> None:
        """Tell the operators that the weights will not change any more."""
        for index, operator in self.operators.items():
            if index not in self.geometry.interior_first:  # else it computes several boxes
                operator.rest()

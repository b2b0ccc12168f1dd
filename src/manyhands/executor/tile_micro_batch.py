"""The tensors that one device keeps of one in-flight micro-batch in a tiled stage: boxes of values and gradients, by
tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from manyhands.executor.boxes import holds
from manyhands.executor.tile_call import BoxTensor, GatheredStatistics, Notes
from manyhands.facts.boxes import Box


@dataclass
class TileMicroBatch:
    """The tensors of one in-flight micro-batch on one tile, and what its backward pass needs."""

    values: dict[str, BoxTensor] = field(default_factory=dict)
    gradients: dict[str, BoxTensor] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """Gradients whose memory nothing else uses: they may be added to in place."""
    statistics: dict[int, GatheredStatistics] = field(default_factory=dict)
    """Operator that gathers statistics -> those of all tiles, forward."""
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    """The same operator -> all tiles' backward statistics, added up."""
    notes: dict[int, Notes] = field(default_factory=dict)
    """Operator -> what its forward pass noted for its backward pass."""
    waiting: dict[int, list[BoxTensor]] = field(default_factory=dict)
    """Operator whose weights' gradients are computed later -> what it reads: others may be done with it by then."""
    beyond: dict[str, list[BoxTensor]] = field(default_factory=dict)
    """Map that is held in pieces -> those pieces that other tiles own."""
    rims: dict[str, list[BoxTensor]] = field(default_factory=dict)
    """Their gradients, which are computed before those of this tile."""
    rooms: dict[str, BoxTensor] = field(default_factory=dict)
    """Memory of results to come, where what they are made of lies already."""
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)
    """Outputs of the network, whole, on the device that computes the loss."""
    returned: dict[str, torch.Tensor] = field(default_factory=dict)
    """Their gradients."""

    def features(self) -> list[torch.Tensor]:
        """Return every tensor of values that is kept now."""
        parts = [*self.values.values(), *self.rooms.values()]
        for group in (*self.beyond.values(), *self.waiting.values()):
            parts += group
        for note in self.notes.values():
            parts += note.values()
        return [part.tensor for part in parts]

    def feature_gradients(self) -> list[torch.Tensor]:
        """Return every tensor of gradients that is kept now."""
        parts = [*self.gradients.values()]
        for rims in self.rims.values():
            parts += rims
        return [part.tensor for part in parts]

    def piece_of(self, tensor: str, box: Box) -> BoxTensor:
        """Return the tensor that holds a piece of a map."""
        parts: list[BoxTensor] = [*self.beyond.get(tensor, ()), self.values[tensor]]
        return next(part for part in parts if holds(part.box, box))

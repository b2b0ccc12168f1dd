"""The memory of a tiled stage on one device: the size of the box that is kept of each map, and its format.

It is the same in every step, so it is computed once, and a step looks it up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from manyhands.executor.boxes import dtype_of, place_of
from manyhands.executor.tile_base import TileOperator
from manyhands.executor.tile_call import BoxTensor
from manyhands.executor.tile_micro_batch import TileMicroBatch
from manyhands.executor.tile_ways import TileWays
from manyhands.facts.boxes import Box, without
from manyhands.facts.profile import Kernel
from manyhands.graph.memory_formats import CHANNELS_LAST, memory_format_of


class _Room(NamedTuple):
    """Memory for all that is ever here of a tensor."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    rests: list[tuple[slice, ...]]
    """Places beside what is about to be written."""


class TileMemory:
    """Makes the tensors that hold boxes of a stage's maps."""

    def __init__(
        self,
        ways: TileWays,
        operators: Mapping[int, TileOperator],
        kernels: Mapping[str, Kernel],
        torch_device: torch.device,
    ) -> None:
        self.ways, self.geometry, self.network = ways, ways.geometry, ways.network
        self.torch_device = torch_device
        self._operators = operators
        self._rooms: dict[tuple[str, Box], _Room] = {}
        self._channels_last = self._read_channels_last(kernels)
        self.buffers = dict(self._buffer_boxes())
        """Map -> the box around all that is ever here of it."""

    def _read_channels_last(self, kernels: Mapping[str, Kernel]) -> set[str]:
        """Return the maps that a convolution reads in channels_last, or makes so, and what is made of them without
        one."""
        names: set[str] = set()
        for index in self._operators:
            op = self.network.ops[index]
            kernel = kernels.get(op.name)
            if op.macs and kernel is not None and kernel.channels_last:
                names.update(name for name in (*op.inputs, *op.outputs) if name in self.geometry.maps)
            elif not op.macs and any(name in names for name in op.inputs):
                names.update(name for name in op.outputs if name in self.geometry.maps)
        return {name for name in names if self._has_channels_second(name)}

    def _has_channels_second(self, tensor: str) -> bool:
        rank = len(self.network.tensors[tensor].shape)
        return rank in CHANNELS_LAST and sorted(self.network.spatial[tensor]) == [*range(2, rank)]

    def _buffer_boxes(self) -> Iterator[tuple[str, Box]]:
        """Yield for every map the box around all that is ever here, with room for the zeros that convolutions pad with;
        for a map in pieces what is owned, as the other pieces have memory of their own."""
        for name in self.geometry.maps:
            if name in self.ways.in_pieces:
                yield name, self.ways.owned(name)
                continue
            box = self.geometry.buffer(self.ways.device, name)
            for index in self.network.readers.get(name, ()):
                out = self.ways.out_box(index) if index in self._operators else None
                if out is not None:
                    for number, read in enumerate(self._operators[index].op.reads):
                        if read.tensor == name:
                            box = box.hull(self._operators[index].raw_demand(number, out))
            yield name, box

    def dtype(self, tensor: str) -> torch.dtype:
        return dtype_of(self.network.tensors[tensor].dtype)

    def buffer(self, tensor: str) -> Box:
        """Return the box around all that is ever here of a tensor; of a replicated one, all of it."""
        return self.buffers.get(tensor) or Box.whole(self.geometry.shape(tensor))

    def room(self, tensor: str, inside: Box) -> BoxTensor:
        """Return memory for all that is ever here of a tensor: zeros but for `inside`, which is about to be written."""
        room = self._rooms.get((tensor, inside))
        if room is None:
            room = self._rooms[tensor, inside] = self._room_for(tensor, inside)
        memory = torch.empty(room.shape, dtype=room.dtype, device=self.torch_device, memory_format=room.layout)
        for place in room.rests:
            memory[place] = 0
        return BoxTensor(room.box, memory)

    def _room_for(self, tensor: str, inside: Box) -> _Room:
        box = self.buffer(tensor)
        layout = memory_format_of(box.rank, tensor in self._channels_last)
        rests = [place_of(part, box) for part in without([box], inside)]
        return _Room(box, box.shape, self.dtype(tensor), layout, rests)

    def zeros(self, tensor: str) -> BoxTensor:
        """Return a gradient of nothing, over the box that this device collects."""
        box = self.ways.collected_box(tensor)
        return BoxTensor(box, torch.zeros(box.shape, dtype=self.dtype(tensor), device=self.torch_device))

    def value(self, batch: TileMicroBatch, tensor: str) -> BoxTensor:
        """Return a tensor's value; where nothing needed any of it, any value will do."""
        value = batch.values.get(tensor)
        if value is None:
            nothing = Box(tuple((0, 0) for _ in self.geometry.shape(tensor)))
            value = batch.values[tensor] = self.room(tensor, nothing)
        return value

    def inputs(self, batch: TileMicroBatch, names: tuple[str, ...]) -> list[BoxTensor]:
        """Return the values that an operator reads."""
        try:
            return [*map(batch.values.__getitem__, names)]
        except KeyError:
            return [self.value(batch, name) for name in names]

"""The half of the extension that needs torch: whole samples that do not lie side by side in the micro-batch."""

from __future__ import annotations

import torch
from interleaved import local_box

from manyhands.executor.boxes import dtype_of
from manyhands.executor.runner import SegmentRunner
from manyhands.facts.boxes import Box


class InterleavedRunner(SegmentRunner):
    """A SegmentRunner that knows where a box of the micro-batch lies among the samples of its device."""

    def _room(self, tensor: str, like: torch.Tensor) -> torch.Tensor:
        spec = self.geometry.network.tensors[tensor]
        return like.new_zeros(spec.shape_for(self.geometry.sample_count(self.device)))

    def _slices(self, tensor: str, box: Box) -> tuple[slice, ...]:
        return local_box(self.geometry, self.device, tensor, box).slices()

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return self.micro_batch(micro_batch).values[tensor].detach()[self._slices(tensor, box)].contiguous().cpu()

    def put_value(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        values = self.micro_batch(micro_batch).values
        if tensor not in values:
            values[tensor] = self._room(tensor, data)
        values[tensor][self._slices(tensor, box)] = data

    def gradient(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        gradient = self.micro_batch(micro_batch).gradients.get(tensor)
        if gradient is None:
            return torch.zeros(box.shape, dtype=dtype_of(self.geometry.network.tensors[tensor].dtype))
        return gradient[self._slices(tensor, box)].contiguous().cpu()

    def add_gradient(self, micro_batch: int, tensor: str, box: Box, data: torch.Tensor) -> None:
        gradients = self.micro_batch(micro_batch).gradients
        if tensor not in gradients:
            gradients[tensor] = self._room(tensor, data)
        gradients[tensor][self._slices(tensor, box)] += data

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        boxes = [(name, box) for name in self.graph.outputs for box in self.geometry.returning(name).boxes(self.device)]
        return [self.value(micro_batch, name, box) for name, box in boxes]

"""The runner of a stage that carries buffers from pass to pass: only the rows of a batch that are samples are computed.

A plan's messages have one size, and a batch may have fewer samples than that: while a text is generated, one token
follows another, but the tokens of a prompt come many at a time. Blank rows travel; they are neither computed nor
written into a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.executor.boxes import cut_out
from manyhands.executor.runner import SegmentRunner
from manyhands.facts.boxes import Box
from manyhands.graph.piece import Context
from manyhands.schedule.actions import Forward


class CarryingRunner(SegmentRunner):
    """A runner of whole samples, of which a batch has as many as the coordinator says."""

    def forward(self, action: Forward, context: Context) -> None:
        batch = self.micro_batch(action.micro_batch)
        batch.values = self._first_rows(batch.values, context.samples)
        super().forward(action, context)

    def _first_rows(self, values: Mapping[str, torch.Tensor], samples: int) -> dict[str, torch.Tensor]:
        specs = self.graph.network.tensors
        rows = {name: samples * specs[name].rows_per_sample for name in values}
        return {
            name: tensor if (axis := specs[name].batch_axis) is None else tensor.narrow(axis, 0, rows[name])
            for name, tensor in values.items()
        }

    def value(self, micro_batch: int, tensor: str, box: Box) -> torch.Tensor:
        return cut_out(self._whole(micro_batch, tensor), self._hull(tensor), box)

    def results(self, micro_batch: int) -> list[torch.Tensor]:
        return [self._whole(micro_batch, name).contiguous().cpu() for name in self.graph.outputs]

    def _whole(self, micro_batch: int, name: str) -> torch.Tensor:
        """Return a tensor with blank rows where samples are missing."""
        tensor = self.micro_batch(micro_batch).values[name].detach()
        spec = self.graph.network.tensors[name]
        shape = spec.shape_for(self.geometry.samples)
        if tuple(tensor.shape) == shape:
            return tensor
        whole = tensor.new_zeros(shape)
        assert spec.batch_axis is not None
        whole.narrow(spec.batch_axis, 0, tensor.shape[spec.batch_axis]).copy_(tensor)
        return whole

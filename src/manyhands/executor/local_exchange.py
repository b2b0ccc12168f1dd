"""The exchange between stages on one device, without a message: values forward, their gradients backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.executor.runner import Runner
from manyhands.schedule.policy import Schedule


class LocalExchange:
    """Hands tensors from one stage of a device to another."""

    def __init__(
        self, schedule: Schedule, device: str, runners: Mapping[int, Runner], torch_device: torch.device
    ) -> None:
        self.runners, self.torch_device = runners, torch_device
        self._values = schedule.lowering.handed_over(device)
        self._gradients = schedule.lowering.handed_back(device) if schedule.plan.is_training else []

    def pass_values(self, stage: int, micro_batch: int) -> None:
        """Give later stages what a stage has made for them."""
        for producer, consumer, tensor, box in self._values:
            if producer == stage:
                data = self.runners[stage].value(micro_batch, tensor, box).to(self.torch_device)
                self.runners[consumer].put_value(micro_batch, tensor, box, data)

    def pass_gradients(self, stage: int, micro_batch: int) -> None:
        """Give earlier stages the gradients of what they made for a stage.

        They are copies: further gradients of a tensor are added in place, and one gradient may belong to two tensors
        (the terms of a sum).
        """
        for producer, consumer, tensor, box in self._gradients:
            if consumer == stage:
                data = self.runners[stage].gradient(micro_batch, tensor, box).to(self.torch_device, copy=True)
                self.runners[producer].add_gradient(micro_batch, tensor, box, data)

"""The feed of one device: what the coordinator sends it for every micro-batch, as inputs of its stages, inputs for
others, and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from manyhands.executor.gpu_staging import GpuStaging, can_stage
from manyhands.executor.in_flight_micro_batch import InFlightMicroBatch
from manyhands.executor.messages import COORDINATOR, ROWS, FeedPart
from manyhands.executor.options import ExecutorOptions
from manyhands.executor.runner import Runner
from manyhands.facts.errors import BadData
from manyhands.facts.plan import Plan
from manyhands.schedule.feeding import AT_HOME, feed_topic
from manyhands.schedule.lowering import entering_input
from manyhands.transport.endpoint import Endpoint


class DeviceFeed:
    """Receives a device's part of each micro-batch and puts it where it is read."""

    def __init__(
        self,
        endpoint: Endpoint,
        parts: Sequence[FeedPart],
        runners: Mapping[int, Runner],
        options: ExecutorOptions,
        torch_device: torch.device,
        plan: Plan,
    ) -> None:
        self.endpoint, self.parts, self.runners, self.options = endpoint, parts, runners, options
        self.torch_device = torch_device
        self._micro_batches = plan.micro_batches
        self.staging: GpuStaging | None = None
        """The way of batches to a GPU; None: they are copied where they are needed."""
        is_fed_ahead = plan.is_training and plan.steps_per_round == 1 and all(part.name != ROWS for part in parts)
        if torch_device.type == "cuda" and is_fed_ahead and can_stage(parts, plan.micro_batches):
            self.staging = GpuStaging(endpoint.mailbox, parts, torch_device, self._local_rows)

    @property
    def bytes(self) -> int:
        """Bytes that travel for each micro-batch."""
        return sum(part.bytes for part in self.parts)

    def take(self, batch: InFlightMicroBatch, step: int) -> None:
        """Wait for a micro-batch's inputs and targets, and put them where they are read."""
        if not self.parts:
            return
        for part, data in zip(self.parts, self._received(batch.number, step)):
            if part.name == ROWS:
                batch.rows = int(data)
            elif part.is_target:
                batch.targets[part.name] = data
            elif part.stage != AT_HOME:
                self.runners[part.stage].put_value(batch.number, part.name, part.box, data)
            else:
                batch.at_home[part.name] = data
                self._share_among_stages(batch.number, part.name, data)

    def look_ahead(self, step: int) -> None:
        """Prepare for the round that begins at a step, and copy to a GPU what has come for it."""
        if self.staging is not None:
            self.staging.look_ahead(step, self._micro_batches)

    def _received(self, micro_batch: int, step: int) -> list[torch.Tensor]:
        """Return the parts of a micro-batch, on the device that computes."""
        if self.staging is not None:
            return self.staging.take(step, micro_batch)
        tensors = [part.room() for part in self.parts]
        self.endpoint.mailbox.receive(COORDINATOR, step, feed_topic(micro_batch), tensors)
        return [
            (self._local_rows(number, part, sent) if part.is_local else sent).to(self.torch_device)
            for number, (part, sent) in enumerate(zip(self.parts, tensors))
        ]

    def _share_among_stages(self, micro_batch: int, name: str, whole: torch.Tensor) -> None:
        """Give this device's stages their share of an input that it has whole, for others."""
        for runner in self.runners.values():
            layout = entering_input(runner.geometry, name)
            for box in layout.boxes(self.endpoint.name) if layout is not None else ():
                runner.put_value(micro_batch, name, box, whole[box.slices()])

    def _local_rows(self, number: int, part: FeedPart, rows: torch.Tensor) -> torch.Tensor:
        """Return what the device itself has of a part, by the samples' numbers."""
        if self.options.resident is not None:
            return self.options.resident.take(number, rows)
        if self.options.silo is None:
            names = ", ".join(sorted(self.options.local_names))
            raise BadData(f"{self.endpoint.name} was to have {names}; it has no silo.")
        return part.cut_from(self.options.silo.take(part.name, rows))

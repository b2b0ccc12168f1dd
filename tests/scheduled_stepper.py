"""A stepper with the schedules that its optimizer names, as the coordinator and a device together are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manyhands.executor.optimizers import Stepper
from manyhands.executor.rates import RateLayout
from manyhands.executor.schedules import at_start
from manyhands.executor.scheduling import Scheduling
from manyhands.executor.torch_optimizers import stand_ins
from manyhands.facts.optimizer import Optimizer


class ScheduledStepper(Stepper):
    def __init__(self, optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(at_start(optimizer), weights)
        self.scheduling = Scheduling.by_name(optimizer)
        groups = stand_ins(self.optimizer)[1]
        self._unscheduled = RateLayout.of_groups(groups).read(groups)

    def step(self) -> None:
        if self.scheduling is not None:
            self.take(self.scheduling.layout.options(self.scheduling.at(self.steps_done)))
        super().step()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return (self._unscheduled if self.scheduling is None else self.scheduling.at(self.steps_done))[0]

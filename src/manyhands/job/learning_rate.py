"""The learning rates of a run's steps, as a callback is told of them."""

from __future__ import annotations

import torch

from manyhands.executor.optimizers import Stepper, build
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.optimizer import Optimizer


class LearningRates:
    """The rate of each step in turn, by the same optimiser and schedules that the devices run, over a weight of its
    own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._stepper: Stepper | None = None

    def __call__(self, step: int) -> float | None:
        """Return the rate of a step that is done; None where it has none."""
        try:
            if self._stepper is None or self._stepper.steps_done > step:
                self._stepper = build(self._optimizer, {"weight": torch.zeros(2, 2, requires_grad=True)})
            while self._stepper.steps_done < step:
                self._stepper.step()
            return self._stepper.learning_rate
        except (ManyhandsError, KeyError):
            return None

"""Updates of one device's weights: the optimizer's step, once all gradients are added up."""

from __future__ import annotations

from collections.abc import Collection

from manyhands.executor.optimizers import Stepper
from manyhands.executor.projections import SumRecord
from manyhands.executor.rates import ArrivingRates
from manyhands.executor.reductions import Reductions
from manyhands.graph.weights import Weights


class WeightUpdates:
    """Updates the weights of all stages of a device at the first of their steps: all gradients are on their way."""

    def __init__(
        self,
        weights: Weights,
        stepper: Stepper | None,
        reductions: Reductions,
        untrained: Collection[str],
        rates: ArrivingRates | None = None,
    ) -> None:
        self.weights, self.stepper, self.reductions, self._untrained = weights, stepper, reductions, untrained
        self._rates = rates
        """Receives what schedules make of the optimizer's options; None: they stay as they are."""
        self._step = -1
        self.count = 0
        """Updates in this round."""
        self._last: int | None = None
        """The micro-batch of the last update; -1: of the whole round."""

    def begin_round(self, step: int) -> None:
        """Begin a round, of which `step` is the first step."""
        self.count, self._last, self._step = 0, None, step

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of what is received for the updates of a round."""
        return self._rates.expected() if self._rates is not None else {}

    def is_done(self, micro_batch: int) -> bool:
        """Return whether another stage of this device has updated the weights already."""
        return self._last == micro_batch

    def update(self, micro_batch: int) -> list[SumRecord]:
        """Wait for the sums of gradients and step; return the records of the sums."""
        self._last = micro_batch
        self.count += 1
        self.reductions.wait()
        assert self.stepper is not None
        for name in self._untrained:  # a zero that was added up is still no gradient: weight decay would see it
            self.weights.tensors[name].grad = None
        if self._rates is not None:
            self.stepper.take(self._rates.receive(self._step, max(micro_batch, 0)))
        self.stepper.step()
        self.stepper.zero()
        return self.reductions.take_records()

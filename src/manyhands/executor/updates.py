"""Updates of one device's weights: the optimizer's step, once all gradients are added up, unscaled and clipped."""

from __future__ import annotations

from collections.abc import Collection

import torch

from manyhands.executor.averaging import WeightAverage
from manyhands.executor.clipping import GradientTotals, clip, part_of_norm
from manyhands.executor.loss_scale import LossScale
from manyhands.executor.optimizers import Stepper
from manyhands.executor.projections import SumRecord
from manyhands.executor.rates import EACH_UPDATES, ArrivingRates
from manyhands.executor.reductions import Reductions
from manyhands.executor.slowdown import UNSLOWED, Slowdown
from manyhands.facts.clipping import Clipping
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Reduce

UNCLIPPED = Clipping()


class WeightUpdates:
    """Updates the weights of all stages of a device at the first of their steps: all gradients are on their way."""

    def __init__(
        self,
        weights: Weights,
        stepper: Stepper | None,
        reductions: Reductions,
        untrained: Collection[str],
        clipping: Clipping | None = None,
        norm_part: Collection[str] = (),
        loss_scale: LossScale | None = None,
        rates: ArrivingRates | None = None,
        average: WeightAverage | None = None,
        slowdown: Slowdown = UNSLOWED,
    ) -> None:
        """`norm_part`: the weights whose gradients this device gives to the norm of all. `loss_scale`: what gradients
        are to be divided by. `slowdown`: that of the device, which does not stretch what it waits for."""
        self._slowdown = slowdown
        self.weights, self.stepper, self.reductions, self._untrained = weights, stepper, reductions, untrained
        self.clipping, self._norm_part = clipping or UNCLIPPED, norm_part
        self.loss_scale = loss_scale
        self.is_skipped = False
        """Whether the update under way is skipped: some device's gradients are not finite."""
        self.average = average
        self.totals: GradientTotals | None = None
        """What all gradients of the update under way add up to; None: the plan does not exchange it."""
        self._rates = rates
        """Receives what schedules make of the optimizer's options; None: they stay as they are."""
        self._accumulates = rates is not None and rates.layout.accumulates
        self._accumulation = EACH_UPDATES
        """What becomes of the gradients of the update under way."""
        self._step = -1
        self.count = 0
        """Updates in this round."""
        self._last: int | None = None
        """The micro-batch of the last update; -1: of the whole round."""

    def begin_round(self, step: int) -> None:
        """Begin a round, of which `step` is the first step."""
        self.count, self._last, self._step = 0, None, step
        self.totals, self.is_skipped = None, False

    def expected(self) -> dict[tuple[str, str], int]:
        """Return (source, topic) -> bytes of what is received for the updates of a round."""
        return self._rates.expected() if self._rates is not None else {}

    def is_done(self, micro_batch: int) -> bool:
        """Return whether another stage of this device has updated the weights already."""
        return self._last == micro_batch

    def exchange_norm(self, reduce: Reduce) -> float:
        """Wait for the sums of gradients, give this device's part of their norm, and return the norm of all."""
        self._finish_gradients()
        self._accumulate()
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._gradients())
        tensors = self.weights.tensors
        gradients = [grad for name in self._norm_part if (grad := tensors[name].grad) is not None]
        self.totals = GradientTotals.of_rows(self.reductions.gather(reduce, part_of_norm(gradients)))
        if self.loss_scale is not None:
            self.is_skipped = self.totals.not_finite > 0
            self.loss_scale.update(is_skipped=self.is_skipped)
        return self.totals.norm

    def update(self, micro_batch: int) -> list[SumRecord]:
        """Wait for the sums of gradients, clip them and step; return the records of the sums."""
        self._last = micro_batch
        self.count += 1
        if self.totals is None:
            self._finish_gradients()
            self._accumulate()
        assert self.stepper is not None
        if self._rates is not None and not self._accumulates:
            numbers = self._rates.receive(self._step, max(micro_batch, 0))
            self.stepper.take(self._rates.layout.options(numbers))
        if self.is_skipped:
            self.stepper.skip()
        elif not self._accumulation.updates:
            self.stepper.keep_gradients()
        else:
            if self.clipping.is_on and (gradients := self._gradients()):
                clip(gradients, self.clipping, self.totals)
            self.stepper.step()
        self.totals, self.is_skipped = None, False
        self.stepper.zero()
        if self.average is not None:
            self.average.update()
        return self.reductions.take_records()

    def _finish_gradients(self) -> None:
        with self._slowdown.waiting():
            self.reductions.wait()
        for name in self._untrained:  # a zero that was added up is still no gradient: weight decay would see it
            self.weights.tensors[name].grad = None

    def _accumulate(self) -> None:
        """Add to the gradients what the steps before have kept of theirs, where several steps make one update: what is
        clipped is the sum. Such a round is one step."""
        if not self._accumulates:
            return
        assert self._rates is not None
        assert self.stepper is not None
        numbers, layout = self._rates.receive(self._step, 0), self._rates.layout
        self.stepper.take(layout.options(numbers))
        self._accumulation = layout.accumulation(numbers)
        self.stepper.add_kept(self._accumulation.share)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the weights that this device steps, each once."""
        if self.stepper is None:
            return []
        return [weight.grad for weight in self.stepper.weights.values() if weight.grad is not None]

"""The micro-batches in flight on one device, and when their memory is released.

What a stage keeps of a micro-batch (values, gradients) is released when the next pass begins after the one that ended,
not at once: what the pass made may yet have to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.executor.device_feed import DeviceFeed
from manyhands.executor.in_flight_micro_batch import InFlightMicroBatch, Phase
from manyhands.executor.runner import Runner
from manyhands.facts.plan import Plan
from manyhands.graph.piece import Context


class InFlightMicroBatches:
    """The micro-batches of the round under way on one device."""

    def __init__(
        self,
        plan: Plan,
        runners: Mapping[int, Runner],
        samples: Mapping[int, tuple[int, int]],
        feed: DeviceFeed,
        seed: int,
    ) -> None:
        self.plan, self.runners, self.samples, self.feed, self.seed = plan, runners, samples, feed, seed
        self.step = -1
        """The first step of the round."""
        self.answered = 0
        """With order interleave: micro-batches before this one are done with."""
        self._has_steps = plan.steps_per_round > 1
        self._batches: dict[int, InFlightMicroBatch] = {}
        self._ended: list[tuple[int, InFlightMicroBatch]] = []
        """Stages and micro-batches whose last pass has ended, and whose tensors are yet to be released."""
        self._turning: tuple[int, InFlightMicroBatch] | None = None
        """The last forward pass that a backward pass will follow, while what it made is yet to be sent."""

    def begin_round(self, step: int) -> None:
        """Begin a round, and forget what an interrupted one left."""
        self.step, self.answered = step, 0
        self.clear()

    def clear(self) -> None:
        """Release everything."""
        for runner in self.runners.values():
            for number in range(self.plan.micro_batches):
                runner.drop(number)
        self._batches.clear()
        self._ended, self._turning = [], None

    def numbers(self) -> list[int]:
        """Return the numbers of the micro-batches in flight, in order."""
        return sorted(self._batches)

    def fed(self, number: int) -> InFlightMicroBatch:
        """Return a micro-batch; the first call for it receives what the coordinator sent."""
        batch = self._batches.get(number)
        if batch is None:
            batch = self._batches[number] = InFlightMicroBatch(number)
            self.feed.take(batch, self.step)
        return batch

    def __getitem__(self, number: int) -> InFlightMicroBatch:
        return self._batches[number]

    def get(self, number: int) -> InFlightMicroBatch | None:
        """Return a micro-batch in flight; None: it is not, or no longer, in flight."""
        return self._batches.get(number)

    def step_of(self, number: int) -> int:
        """Return the optimizer's step that a micro-batch belongs to."""
        return self.step + number if self._has_steps else self.step

    def context(self, stage: int, number: int) -> Context:
        """Return the context in which the operators of a stage run for a micro-batch."""
        batch = self._batches.get(number)
        context = batch.contexts.get(stage) if batch is not None else None
        if context is None:
            first, last = self.samples[stage]
            place = first if self._has_steps else number * self.plan.micro_batch_size + first
            samples = last - first if batch is None or batch.rows is None else batch.rows
            context = Context(self.plan.is_training, self.seed, self.step_of(number), place, samples)
            if batch is not None:
                batch.contexts[stage] = context
        return context

    def begin_pass(self, stage: int = -1, number: int = -1) -> None:
        """Release what passes that have ended keep: others have what they need of it.

        `stage` and `number` name the pass that begins now, whose own tensors stay.
        """
        if self._ended:
            still_ended = []
            for ended_stage, batch in self._ended:
                is_same = batch.number == number and ended_stage == stage
                if is_same or (self.plan.order == "interleave" and self._is_next(batch.number, number)):
                    still_ended.append((ended_stage, batch))
                else:
                    self.runners[ended_stage].drop(batch.number)
            self._ended = still_ended
        if self._turning is not None:
            turning_stage, batch = self._turning
            self.runners[turning_stage].settle(batch.number)
            self._turning = None

    def _is_next(self, ended: int, number: int) -> bool:
        """Return whether a micro-batch that has ended is one of the two under way: its answer is yet to be sent."""
        return ended != number and ended >= self.answered

    def end_forward(self, stage: int, batch: InFlightMicroBatch, *, awaits_gradients: bool) -> None:
        """Note that all operators of a stage have run forward."""
        if awaits_gradients:
            batch.enter(stage, Phase.AWAITING_GRADIENTS)
            self._turning = (stage, batch)
        else:
            batch.enter(stage, Phase.DONE)
            self._ended.append((stage, batch))

    def end_backward(self, stage: int, batch: InFlightMicroBatch) -> None:
        """Note that the gradients of all that a stage has read exist."""
        batch.enter(stage, Phase.DONE)
        self._ended.append((stage, batch))

    def discard(self, stage: int, number: int) -> None:
        """Give up a micro-batch in a stage: its gradients came too late, or none come."""
        batch = self._batches.pop(number, None) or InFlightMicroBatch(number)
        batch.enter(stage, Phase.DISCARDED)
        self._ended.append((stage, batch))

    def finish(self, number: int) -> None:
        """Forget what a micro-batch was fed: all stages of this device are done with it."""
        self._batches.pop(number, None)

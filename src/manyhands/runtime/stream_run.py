"""One generation of a stream: batches in as they come, answers out in order, for as long as there are requests.

The number of batches is not known, and none may come for hours: while nothing is under way no timeout runs. Workers
wait as long as the coordinator is there; the coordinator watches that what is under way makes progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Protocol

import torch

from manyhands.facts.plan import Plan
from manyhands.runtime.control_messages import Progress
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import IDLE_SECONDS, Order
from manyhands.runtime.outcome import Outcome, RunHooks
from manyhands.runtime.reports import Reports
from manyhands.runtime.run import STEPS_FED_AHEAD, Run

MOST_FED_AHEAD = 6
"""Most batches fed ahead: fewer than the rounds by which a message may come early (mailbox.STEPS_AHEAD)."""


class Flow(Protocol):
    """A stream's source of batches and target of answers. Called from the coordinator's loop: never waits."""

    @property
    def is_over(self) -> bool:
        """Whether no batch will come any more."""

    def ready_in(self, size: int) -> float:
        """Return the seconds until a batch of `size` samples is to be taken, as far as is known; inf: none waits."""

    def take(self, step: int, size: int) -> Mapping[str, torch.Tensor] | None:
        """Return the batch of a step, by the names of the network's inputs; None: there is none after all."""

    def answered(self, step: int, outputs: dict[str, torch.Tensor]) -> None:
        """Take the network's outputs for a step's batch. Steps come in order."""

    def check(self) -> None:
        """Raise where the answers are no longer wanted."""


class _StreamReports(Reports):
    """The reports of a stream, which has no losses: a round counts for the device that has ended it."""

    def progressed(self, name: str, message: Progress) -> None:
        self.ended_round(name, message)


class StreamRun(Run):
    """A run that feeds what comes until the flow is over or it is to pause; then everything fed has been answered."""

    reports_class = _StreamReports

    def __init__(
        self, coordinator: Coordinator, order: Order, flow: Flow, hooks: RunHooks | None = None, *,
        since: int | None = None,
    ) -> None:  # fmt: skip
        """`since`: the generation with which the job began whose state workers hold; None: they need keep none."""
        super().__init__(coordinator, order, hooks, since=since)
        self.flow = flow
        self.answered = self.first
        self.began_at = 0.0
        """When all devices were ready."""
        self.ahead = fed_ahead(order.plan)

    def _aligned(self, order: Order) -> Order:
        return order

    def _check(self) -> None:
        super()._check()
        self.flow.check()

    def expected(self) -> dict[tuple[str, str], int]:
        return self.feed.feeder.expected_results()

    @property
    def worker_wait_seconds(self) -> float:
        return IDLE_SECONDS

    def stream(self, *, with_logs: bool = False) -> Outcome:
        """Stream until the flow is over, or until it is to pause and nothing is under way.

        `with_logs`: every device reports what it did.
        """
        try:
            self._start()
            self.began_at = time.monotonic()
            self._flow()
            if with_logs:
                self._end_round()
        except BaseException as error:
            self._end(error)
        if with_logs:
            self._ask_for_logs()
        self._stop()
        return self.outcome

    def _flow(self) -> None:
        while not self._is_over():
            while self._may_feed():
                self._feed_next()
            limit = math.inf if self.feed.sent == self.answered else self.order.wait_limit_seconds
            self.follow(self._has_news, self.reports.handle, f"to answer batch {self.answered}", limit)
            self._answer()

    def _is_over(self) -> bool:
        self.is_paused = self.is_paused or self.hooks.should_pause()
        return self.feed.sent == self.answered and (self.is_paused or self.flow.is_over)

    def _has_news(self) -> bool:
        return self._answerable() > self.answered or self._is_over() or self._may_feed()

    def _look_seconds(self) -> float:
        usual = super()._look_seconds()
        return min(usual, self.flow.ready_in(self._size)) if self._has_room() else usual

    # Feeding

    @property
    def _size(self) -> int:
        return self.order.plan.step_size

    def _has_room(self) -> bool:
        return not self.is_paused and self.feed.sent < self._taken() + self.ahead

    def _taken(self) -> int:
        """Return the number of batches that no longer count as fed ahead."""
        return self.steps.steps_updated if self.stride == 1 else self._answerable()

    def _may_feed(self) -> bool:
        return self._has_room() and self.flow.ready_in(self._size) <= 0

    def _feed_next(self) -> None:
        batch = self.flow.take(self.feed.sent, self._size)
        if batch is None:
            return
        first = self.steps.round_of(self.feed.sent)
        self.feed.feeder.send_values(first, batch, self.feed.sent - first)
        self.feed.sent += 1

    # Answers

    def _answerable(self) -> int:
        """Return the number of batches for which every device that returns outputs has done so."""
        return min(self.steps.updated[name] for name in self.feed.feeder.returning) + 1

    def _answer(self) -> None:
        for step in range(self.answered, self._answerable()):
            first = self.steps.round_of(step)
            outputs = self.feed.feeder.gather(first, step - first)
            if self.steps.round_of(step + 1) != first:
                self.coordinator.endpoint.mailbox.begin_step(step + 1)
            self.answered = step + 1
            self.flow.answered(step, outputs)

    # The end

    def _end_round(self) -> None:
        """End a round of several batches of which not all came: it is shorter on every device."""
        if self.stride > 1:
            self._end_early(self.feed.sent)
        self.follow(
            lambda: self.steps.steps_done >= self.feed.sent,
            self.reports.handle,
            "to end",
            self.order.wait_limit_seconds,
        )


def fed_ahead(plan: Plan) -> int:
    """Return how many batches keep all devices busy: what is under way when a device is lost is run again."""
    if plan.steps_per_round > 1:
        return STEPS_FED_AHEAD
    return min(max(STEPS_FED_AHEAD, len(plan.stages) + 1), MOST_FED_AHEAD)

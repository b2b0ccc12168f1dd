"""A watch over the progress of one run's devices, which names the one the run should go on without (see `stalls`)."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.runtime import stalls
from manyhands.runtime.stalls import Observed, Verdict

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

PREPARE_SECONDS = 120.0
LEAST_PREPARE_SECONDS = 20.0
_LOOK_SECONDS = 0.2
_ABSENT_SECONDS = 1.0
"""Seconds after which a loop that has not looked around was kept from it: messages that came meanwhile are read before
any device is judged."""
_RECENT_ROUNDS = 20


@dataclass(frozen=True)
class Usual:
    """The usual durations in a job so far; None: nothing is known yet."""

    round_seconds: float | None = None
    prepare_seconds: float | None = None

    @property
    def prepare_limit_seconds(self) -> float:
        """Seconds that getting ready may take: building a part takes about as long as the last time."""
        if self.prepare_seconds is None:
            return PREPARE_SECONDS
        return min(PREPARE_SECONDS, max(LEAST_PREPARE_SECONDS, stalls.ROUNDS * self.prepare_seconds))


class StallWatch:
    """The progress of a run's devices, from their heartbeats and the rounds they have ended."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._timeout_factor = run.coordinator.security.timeout_factor
        self._work = stalls.work_of(run.order.plan, run.order.graph.network)
        self._round_seconds: deque[float] = deque(maxlen=_RECENT_ROUNDS)
        """Times of recent rounds, on each device; a step's time where a round has several."""
        self._ended_at: dict[str, float] = {}
        """When each device ended its last round."""
        self._looked_at = self._back_at = time.monotonic()
        self._steps_fed = run.first
        self._moved, self._moved_at = 0, self._looked_at
        """The last count of what came to the coordinator, and when it last changed."""

    def ended_round(self, name: str, seconds: float, step: int, step_before: int) -> None:
        """Record the time that a device reports for its round, at most the time since its last one. `step`,
        `step_before`: the last steps of this round and of the one before.

        Where a round has several steps, a step's time counts: progress is due that often. Where batches have several
        lengths, it is the time that the longest would have taken.
        """
        now = time.monotonic()
        step_seconds = min(seconds, now - self._ended_at.get(name, 0.0)) / max(1, step - step_before)
        self._round_seconds.append(self._run.order.at_longest(step, step_seconds))
        self._ended_at[name] = now

    @property
    def limit_seconds(self) -> float:
        """Seconds that a device may make no progress before the run goes on without it."""
        recent = statistics.median(self._round_seconds) if self._round_seconds else None
        order = self._run.order
        limit = stalls.limit_seconds(
            recent, self._run.usual.round_seconds, order.predicted_seconds, self._timeout_factor
        )
        return order.wait_limit_seconds if limit is None else min(limit, order.wait_limit_seconds)

    def look(self) -> Verdict | None:
        """Return the device to go on without, if there is one. To be called often; it looks a few times a second."""
        now = time.monotonic()
        away = now - self._looked_at
        if away < _LOOK_SECONDS:
            return None
        run, self._looked_at = self._run, now
        if away > _ABSENT_SECONDS or run.feed.sent != self._steps_fed:  # no device could go on before there was a batch
            self._back_at, self._steps_fed = now, run.feed.sent
        observed, limit = self._observed(now), self.limit_seconds
        verdict = None
        if not run.is_idle:
            verdict = stalls.judge(
                observed, limit, steps_fed=run.feed.sent, stride=run.stride, timeout_factor=self._timeout_factor
            )
        if verdict is not None or not observed:
            return verdict
        moved = run.coordinator.endpoint.mailbox.moved
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        return stalls.judge_copies(
            observed, run.owing(), limit, coordinator_unmoved_seconds=now - max(self._moved_at, self._back_at),
            timeout_factor=self._timeout_factor,
        )  # fmt: skip

    def _observed(self, now: float) -> dict[str, Observed]:
        observed = {}
        for name, member in self._run.members.items():
            standing = member.standing if member.is_at_work else None
            if standing is not None and standing.generation != self._run.generation:
                standing = None
            unmoved_seconds = now - max(member.moved_at, self._back_at)
            silent_seconds = self._run.coordinator.membership.silent_seconds(name)
            observed[name] = Observed(standing, unmoved_seconds, self._work.get(name, 0.0), silent_seconds)
        return observed

    def suspect(self) -> Verdict | None:
        """Return the device that explains why another has failed while it waited, though all are alive."""
        now = time.monotonic()
        observed = {
            name: Observed(member.standing, now - member.moved_at, self._work.get(name, 0.0))
            for name, member in self._run.members.items()
            if member.standing is not None and member.standing.generation == self._run.generation
        }
        return stalls.suspect(observed, self._timeout_factor)

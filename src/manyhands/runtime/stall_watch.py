"""Watches the progress of one run's devices, and says which one the run should go on without (see `stalls`)."""

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
"""A loop that looks around less often was kept from it: what was said meanwhile is read before anybody is judged."""
_RECENT_ROUNDS = 20


@dataclass(frozen=True)
class Usual:
    """How long things have taken in a job so far; None: nothing is known yet."""

    round_seconds: float | None = None
    prepare_seconds: float | None = None

    @property
    def prepare_limit_seconds(self) -> float:
        """How long everybody may take to get ready: building a part takes about as long as the last time."""
        if self.prepare_seconds is None:
            return PREPARE_SECONDS
        return min(PREPARE_SECONDS, max(LEAST_PREPARE_SECONDS, stalls.ROUNDS * self.prepare_seconds))


class StallWatch:
    """The progress of a run's devices, from their heartbeats and the rounds they have ended."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._timeout_factor = run.coordinator.security.patience
        self._work = stalls.work_of(run.order.plan, run.order.graph.network)
        self._round_seconds: deque[float] = deque(maxlen=_RECENT_ROUNDS)
        """Of recent rounds, on each device; a step's where a round has several."""
        self._ended_at: dict[str, float] = {}
        """When each device ended its last round."""
        self._looked_at = self._back_at = time.monotonic()
        self._steps_fed = run.first
        self._moved, self._moved_at = 0, self._looked_at
        """Of what comes to the coordinator."""

    def ended_round(self, name: str, seconds: float, steps: int) -> None:
        """A device says that its round has taken so long: not longer than since the one before. Where a round has
        several steps, a step's time counts: that is how often something is to be done."""
        now = time.monotonic()
        self._round_seconds.append(min(seconds, now - self._ended_at.get(name, 0.0)) / max(1, steps))
        self._ended_at[name] = now

    @property
    def limit_seconds(self) -> float:
        """How long a device may make no progress before the run goes on without it."""
        recent = statistics.median(self._round_seconds) if self._round_seconds else None
        order = self._run.order
        found = stalls.limit_seconds(
            recent, self._run.usual.round_seconds, order.predicted_seconds, self._timeout_factor
        )
        return order.wait_limit_seconds if found is None else min(found, order.wait_limit_seconds)

    def look(self) -> Verdict | None:
        """The device to go on without, if there is one. To be asked often; it looks a few times a second."""
        now = time.monotonic()
        away = now - self._looked_at
        if away < _LOOK_SECONDS:
            return None
        run, self._looked_at = self._run, now
        if away > _ABSENT_SECONDS or run.feed.sent != self._steps_fed:  # nobody could go on before there was a batch
            self._back_at, self._steps_fed = now, run.feed.sent
        observed, limit = self._observed(now), self.limit_seconds
        found = None
        if not run.is_idle:
            found = stalls.judge(
                observed, limit, steps_fed=run.feed.sent, stride=run.stride, timeout_factor=self._timeout_factor
            )
        if found is not None or not observed:
            return found
        moved = run.coordinator.endpoint.mailbox.moved
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        return stalls.judge_copies(
            observed, run.owing(), limit, coordinator_unmoved_seconds=now - max(self._moved_at, self._back_at)
        )

    def _observed(self, now: float) -> dict[str, Observed]:
        found = {}
        for name, member in self._run.members.items():
            standing = member.standing if member.is_at_work else None
            if standing is not None and standing.generation != self._run.generation:
                standing = None
            unmoved_seconds = now - max(member.moved_at, self._back_at)
            found[name] = Observed(standing, unmoved_seconds, self._work.get(name, 0.0))
        return found

    def suspect(self) -> Verdict | None:
        """The device that explains why another has failed while it waited, though everybody is there."""
        now = time.monotonic()
        found = {
            name: Observed(member.standing, now - member.moved_at, self._work.get(name, 0.0))
            for name, member in self._run.members.items()
            if member.standing is not None and member.standing.generation == self._run.generation
        }
        return stalls.suspect(found, self._timeout_factor)

"""A failure detector: which workers are silent, which to probe, which to give up. It has no threads and no clock.

    detector = FailureDetector(limit_seconds=2.0)
    detector.begin("pi-1", now)
    detector.received("pi-1", now)          # it sent something, whatever it was
    detector.due(now)                       # called periodically: which to probe, which to give up

A worker that is silent for half the limit is a suspect and is probed; anything it sends clears it. A worker that is
silent for the whole limit is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.facts.errors import BadValue

HEARTBEAT_TIMEOUT_SECONDS = 2.0
"""A worker that sends nothing for this long, not even when probed, is lost."""
SUSPICION_PART = 1 / 2
"""The part of the limit after which a silent worker is probed. If calls are further apart, the detector has slept."""
ANSWER_PART = 1 / 4
"""The part of the limit that a suspect has at least for its answer, however late it was probed."""


@dataclass(frozen=True)
class Due:
    """The workers that need action now."""

    probe: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass
class _Watched:
    received: float
    probed: float | None = None
    """When it became a suspect."""
    is_pardoned: bool = False


class FailureDetector:
    """The workers that are watched, by name."""

    def __init__(self, limit_seconds: float) -> None:
        if not 0 < limit_seconds < math.inf:
            raise BadValue(f"The heartbeat timeout is {limit_seconds:g} s; it must be > 0 and finite.")
        self.limit_seconds = limit_seconds
        self._watched: dict[str, _Watched] = {}
        self._asked: float | None = None

    def begin(self, name: str, now: float) -> None:
        """Watch a worker from now on; a worker that was lost and is back begins anew."""
        self._watched[name] = _Watched(now)

    def forget(self, name: str) -> None:
        self._watched.pop(name, None)

    def received(self, name: str, now: float) -> None:
        """Note that a worker has sent something. For a worker that is not watched this does nothing."""
        if name in self._watched:
            self._watched[name] = _Watched(now)

    def silent_seconds(self, name: str, now: float) -> float:
        return now - self._watched[name].received if name in self._watched else 0.0

    @property
    def suspects(self) -> tuple[str, ...]:
        return tuple(name for name, watched in self._watched.items() if watched.probed is not None)

    def due(self, now: float) -> Due:
        """Return the workers to probe, each once, and those to give up, which are no longer watched.

        If the call comes much too late, the detector itself has slept (a suspended laptop, a loaded machine), and
        messages sent meanwhile are yet to be read: every worker is pardoned, but none twice in one timeout.
        """
        if self._asked is not None and now - self._asked > self.limit_seconds * SUSPICION_PART:
            self._pardon(now)
        self._asked = now
        probe, lost = [], []
        for name, watched in self._watched.items():
            silent_seconds = now - watched.received
            if watched.probed is None:
                if silent_seconds >= self.limit_seconds * SUSPICION_PART:
                    watched.probed = now
                    probe.append(name)
            elif silent_seconds >= self.limit_seconds and now - watched.probed >= self.limit_seconds * ANSWER_PART:
                lost.append(name)
        for name in lost:
            self.forget(name)
        return Due(tuple(probe), tuple(lost))

    def _pardon(self, now: float) -> None:
        for name, watched in self._watched.items():
            if not watched.is_pardoned:
                self._watched[name] = _Watched(now, is_pardoned=True)

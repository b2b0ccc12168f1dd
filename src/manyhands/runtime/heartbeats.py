"""Heartbeats between a coordinator and its workers: their interval, their timeout, and what follows.

There are two threads: one sends the coordinator's heartbeats, the other has the failure detector name the workers to
probe or to give up.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.facts.errors import BadValue, ManyhandsError
from manyhands.runtime.clock_sync import PROBE_TICKET, ClockSync
from manyhands.runtime.control import encode
from manyhands.runtime.control_messages import Heartbeat
from manyhands.runtime.membership import Membership

HEARTBEAT_SECONDS = 0.5
COORDINATOR_TIMEOUT_SECONDS = 15.0
"""Workers wait longer for the coordinator: it judges which device has failed, and without it nothing goes on."""
_HEARTBEATS_IN_TIMEOUT = 4
_LOOKS_IN_TIMEOUT = 8
_SEND_SECONDS = 2.0


@dataclass(frozen=True)
class HeartbeatTimes:
    """The interval between a worker's heartbeats, and the time without any after which it has failed."""

    interval_seconds: float
    timeout_seconds: float

    def __post_init__(self) -> None:
        interval_seconds, least_seconds = self.interval_seconds, _HEARTBEATS_IN_TIMEOUT * self.interval_seconds
        if not 0 < interval_seconds < math.inf:
            raise BadValue(f"heartbeat_seconds is {interval_seconds:g}; it must be > 0 and finite.")
        if not self.timeout_seconds >= least_seconds:
            raise BadValue(
                f"heartbeat_timeout_seconds is {self.timeout_seconds:g}; it must be at least {least_seconds:g}.",
                hint=f"Workers send a heartbeat every {interval_seconds:g} s.",
            )

    def coordinator_timeout_seconds(self, timeout_factor: float) -> float:
        """Return the seconds without a heartbeat of the coordinator after which a worker gives it up."""
        return max(COORDINATOR_TIMEOUT_SECONDS * timeout_factor, self.timeout_seconds)


class HeartbeatMonitor:
    """Sends heartbeats to all members, and removes those whose heartbeats stopped."""

    def __init__(
        self,
        membership: Membership,
        clock_sync: ClockSync,
        times: HeartbeatTimes,
        closing: threading.Event,
        on_look: Callable[[], None],
    ) -> None:
        """`on_look`: called after each check of the members. Both threads end when `closing` is set."""
        self._membership, self._clock_sync, self._times = membership, clock_sync, times
        self._closing, self._on_look = closing, on_look
        self._threads = (
            threading.Thread(target=self._send_heartbeats, name="coordinator heartbeat", daemon=True),
            threading.Thread(target=self._keep_looking, name="coordinator failure detector", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, limit_seconds: float) -> None:
        """Wait for the threads to end, at most this long for each."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(limit_seconds)

    def look_around(self) -> None:
        """Probe the members that are silent, and remove those that do not answer."""
        suspects, lost = self._membership.due()
        for name in suspects:
            self._clock_sync.ask(name, PROBE_TICKET)
        for member, silent_seconds in lost:
            try:
                self._membership.lose(member, no_heartbeat(silent_seconds))
            finally:
                member.channel.close()

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._times.timeout_seconds / _LOOKS_IN_TIMEOUT):
            with contextlib.suppress(Exception):  # whatever a callback for losses raises, this goes on
                self.look_around()
            with contextlib.suppress(Exception):
                self._on_look()

    def _send_heartbeats(self) -> None:
        """Send heartbeats to all members: a worker ends when its coordinator has sent nothing for long."""
        while not self._closing.wait(self._times.interval_seconds * 2):
            for member in self._membership.alive():
                with contextlib.suppress(ManyhandsError):
                    member.channel.send(encode(Heartbeat()), _SEND_SECONDS)


def heartbeat_interval(timeout_seconds: float) -> float:
    """Return the seconds between a worker's heartbeats, where it has failed after `timeout_seconds` without any."""
    return min(HEARTBEAT_SECONDS, timeout_seconds / _HEARTBEATS_IN_TIMEOUT)


def no_heartbeat(seconds: float) -> str:
    """Return the reason for the loss of a worker without heartbeats."""
    return f"it has sent nothing for {seconds:.1f} s: it hangs, was stopped, or its network is down"

"""The lab supervisor: the process behind a lab.

It forwards frames where the kernel cannot delay them, follows traces, and takes the lab down when the process that owns
it has died.

    python -m manyhands.lab.supervisor LAB

It prints 'ready' once frames are forwarded.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

from manyhands.facts.errors import ManyhandsError
from manyhands.files.traces import read_link_trace
from manyhands.lab import record
from manyhands.lab.follower import TraceFollower
from manyhands.lab.removal import take_down
from manyhands.lab.spaces import Spaces, entered
from manyhands.lab.switch import Switch

READY = "ready"
_LOOK_SECONDS = 0.2
_AGAIN_SECONDS = 1.0


class LabSupervisor:
    """Supervises one lab until SIGTERM or SIGINT."""

    def __init__(self, name: str) -> None:
        self.record = record.load(name)
        self.ended = threading.Event()
        self.spaces = Spaces(name, self.record.played.network, uses_switch=self.record.uses_switch)
        self.followers = [
            TraceFollower(self.spaces, self.record.played, device, read_link_trace(file))
            for device, file in self.record.played.traces
        ]
        self.is_ready = self.orphaned = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ended.set())
        looking = threading.Thread(target=self._look, name="lab supervisor", daemon=True)
        looking.start()
        try:
            if self.record.uses_switch:
                switch = Switch([self.spaces.port(member) for member in self.spaces.members], self._delay)
                with entered(self.spaces.hub):
                    switch.run(self.ended.is_set, self._on_idle)
            else:
                self._say_ready()
                self.ended.wait()
        finally:
            if not self.ended.is_set():
                looking.join()  # the switch has failed; the owner is watched all the same
            looking.join(5)
            if self.orphaned:
                take_down(self.record.name)

    def _on_idle(self, now: float) -> float:
        """Report that the lab is ready; the switch calls this first when it listens on all ports."""
        if not self.is_ready:
            self._say_ready()
        return now + _LOOK_SECONDS

    def _say_ready(self) -> None:
        self.is_ready = True
        print(READY, flush=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # the process that waited for this word must not wait for more output
        os.close(nowhere)

    def _delay(self, sender: int, receiver: int) -> float:
        a, b = self.spaces.members[sender], self.spaces.members[receiver]
        return self.record.played.network.link_between(a, b).delay_seconds if sender and receiver else 0.0

    def _is_registered(self) -> bool:
        try:
            supervisor = record.load(self.record.name).keeper
        except ManyhandsError:
            return False
        return supervisor is None or supervisor.pid == os.getpid()

    def _follow(self, follower: TraceFollower, now: float) -> None:
        """Set the rate of a port; one that cannot be set is tried again later, so that the owner is watched whatever
        happens."""
        try:
            follower.follow(now)
        except (ManyhandsError, OSError, subprocess.SubprocessError, KeyError) as error:
            print(f"The rate of {follower.device} could not be set: {error!r}", file=sys.stderr, flush=True)
            follower.due = now + _AGAIN_SECONDS

    def _look(self) -> None:
        """Watch the owner and follow traces, beside the switch, which has no time to wait for other programs."""
        owner = self.record.owner
        while not self.ended.is_set():
            if owner is not None and not owner.is_alive:
                self.orphaned = True
                self.ended.set()
                return
            if not self._is_registered():  # taken down while it came up, or by hand
                self.ended.set()
                return
            now = time.monotonic()
            for follower in self.followers:
                self._follow(follower, now)
            due = min((follower.due for follower in self.followers), default=math.inf)
            self.ended.wait(min(_LOOK_SECONDS, max(0.001, due - time.monotonic())))


if __name__ == "__main__":
    LabSupervisor(sys.argv[1]).run()

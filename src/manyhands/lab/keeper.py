"""The process behind a lab: carries frames where the kernel has no delays, follows traces, and takes the lab down when
whoever brought it up for himself has died.

    python -m manyhands.lab.keeper LAB

It says 'ready' once frames are carried.
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
from manyhands.facts.lab import SLOWEST_BYTES_PER_SECOND, Played
from manyhands.facts.trace import LinkTrace
from manyhands.files.traces import read_link_trace
from manyhands.lab import record
from manyhands.lab.spaces import Spaces, entered
from manyhands.lab.switch import Switch

READY = "ready"
_LOOK_SECONDS = 0.2
_AGAIN_SECONDS = 1.0


class Follower:
    """A device's port along a trace, whose time goes as slowly as everything in the lab."""

    def __init__(self, spaces: Spaces, played: Played, device: str, trace: LinkTrace) -> None:
        self.spaces, self.scale, self.device, self.trace = spaces, played.scale, device, trace
        own = played.network.device(device)
        self.up_part = 1.0
        """Where one recording stands for both directions, up keeps its ratio to down."""
        if math.isfinite(own.up_bytes_per_second) and math.isfinite(own.down_bytes_per_second):
            self.up_part = own.up_bytes_per_second / own.down_bytes_per_second
        self.began = time.monotonic()
        self.due = self.began

    def follow(self, now: float) -> None:
        """Set what holds now, if it is time."""
        if now < self.due:
            return
        moment = (now - self.began) / self.scale
        rate, lasts = self.trace.down.at(moment)
        down = max(rate, SLOWEST_BYTES_PER_SECOND) / self.scale
        up = down * self.up_part
        if not self.trace.is_one_way:
            rate, up_lasts = self.trace.up.at(moment)
            up, lasts = max(rate, SLOWEST_BYTES_PER_SECOND) / self.scale, min(lasts, up_lasts)
        self.spaces.set_rates(self.device, up, down)
        self.due = now + lasts * self.scale


class Keeper:
    """Of one lab, until it is told to end."""

    def __init__(self, name: str) -> None:
        self.known = record.load(name)
        self.ended = threading.Event()
        self.spaces = Spaces(name, self.known.played.network, uses_switch=self.known.uses_switch)
        self.followers = [
            Follower(self.spaces, self.known.played, device, read_link_trace(file))
            for device, file in self.known.played.traces
        ]
        self.is_ready = self.orphaned = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.ended.set())
        looking = threading.Thread(target=self._look, name="keeper", daemon=True)
        looking.start()
        try:
            if self.known.uses_switch:
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
                from manyhands.lab.lab import take_down

                take_down(self.known.name)

    def _on_idle(self, now: float) -> float:
        """The switch calls this first when it listens on all ports."""
        if not self.is_ready:
            self._say_ready()
        return now + _LOOK_SECONDS

    def _say_ready(self) -> None:
        self.is_ready = True
        print(READY, flush=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # whoever waited for the word is not kept waiting for more
        os.close(nowhere)

    def _delay(self, sender: int, receiver: int) -> float:
        a, b = self.spaces.members[sender], self.spaces.members[receiver]
        return self.known.played.network.link_between(a, b).delay_seconds if sender and receiver else 0.0

    def _is_known(self) -> bool:
        try:
            keeper = record.load(self.known.name).keeper
        except ManyhandsError:
            return False
        return keeper is None or keeper.pid == os.getpid()

    def _follow(self, follower: Follower, now: float) -> None:
        """A rate that cannot be set is tried again: the owner is watched whatever becomes of it."""
        try:
            follower.follow(now)
        except (ManyhandsError, OSError, subprocess.SubprocessError, KeyError) as error:
            print(f"The rate of {follower.device} could not be set: {error!r}", file=sys.stderr, flush=True)
            follower.due = now + _AGAIN_SECONDS

    def _look(self) -> None:
        """Beside the switch, which has no time to wait for other programs."""
        owner = self.known.owner
        while not self.ended.is_set():
            if owner is not None and not owner.is_alive:
                self.orphaned = True
                self.ended.set()
                return
            if not self._is_known():  # taken down while it came up, or by hand
                self.ended.set()
                return
            now = time.monotonic()
            for follower in self.followers:
                self._follow(follower, now)
            due = min((follower.due for follower in self.followers), default=math.inf)
            self.ended.wait(min(_LOOK_SECONDS, max(0.001, due - time.monotonic())))


if __name__ == "__main__":
    Keeper(sys.argv[1]).run()

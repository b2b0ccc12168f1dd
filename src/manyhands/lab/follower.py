"""Makes the rate of a device's port follow a recorded trace."""

from __future__ import annotations

import math
import time

from manyhands.facts.lab import SLOWEST_BYTES_PER_SECOND, Played
from manyhands.facts.trace import LinkTrace
from manyhands.lab.spaces import Spaces


class TraceFollower:
    """A device's port along a trace, whose time is slowed down like everything in the lab."""

    def __init__(self, spaces: Spaces, played: Played, device: str, trace: LinkTrace) -> None:
        self.spaces, self.scale, self.device, self.trace = spaces, played.scale, device, trace
        port = played.network.device(device)
        self.up_part = 1.0
        """The ratio of up to down, which is kept where one recording stands for both directions."""
        if math.isfinite(port.up_bytes_per_second) and math.isfinite(port.down_bytes_per_second):
            self.up_part = port.up_bytes_per_second / port.down_bytes_per_second
        self.began = time.monotonic()
        self.due = self.began

    def follow(self, now: float) -> None:
        """Set the rates that hold at `now`, if it is time."""
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

"""Chooses the faster of two ways to form the sums of one group of devices, by the time that each takes in training.

    rounds of a generation    0      1 2 3     4       5 6 7     8, 9, ...
                              first  built-in  first   torch     the faster
                              of it            of it

The best of three rounds counts: others share the machines. All devices of the group must choose alike, so each reports
its times to all others, and the way whose slowest device is faster is taken. The module uses no clock and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TRIED_ROUNDS = 4
"""Rounds of each way, of which the first is not counted."""


class MeasuredChoice:
    """The choice of one group, seen from one device. Rounds are counted from the first of the generation."""

    def __init__(self) -> None:
        self.is_torch: bool | None = None
        """Whether the sums go through the process group; None: it is not decided yet."""
        self._best = [math.inf, math.inf]
        self._round, self._seconds = -1, 0.0

    def is_due(self, number: int) -> bool:
        """Return whether the devices are to exchange their times now, before they form a sum of this round."""
        return self.is_torch is None and number >= 2 * TRIED_ROUNDS

    def uses_torch(self, number: int) -> bool:
        """Return whether a sum of this round goes through the process group."""
        return self.is_torch if self.is_torch is not None else number >= TRIED_ROUNDS

    def took(self, number: int, seconds: float) -> None:
        """Note that a sum of this round has taken so long; a round may have several."""
        if self.is_torch is not None:
            return
        if number != self._round:
            self._end_round()
            self._round, self._seconds = number, 0.0
        self._seconds += seconds

    def times(self) -> tuple[float, float]:
        """Return the seconds of the best rounds here: built-in, torch."""
        self._end_round()
        self._round = -1
        return self._best[0], self._best[1]

    def decide(self, times: Sequence[tuple[float, float]]) -> None:
        """Take the way that is faster by the times of all devices."""
        builtin, torch = (max(each) for each in zip(*times, strict=True))
        self.is_torch = torch < builtin

    def _end_round(self) -> None:
        if self._round < 0 or self._round % TRIED_ROUNDS == 0:
            return
        place = int(self._round >= TRIED_ROUNDS)
        self._best[place] = min(self._best[place], self._seconds)

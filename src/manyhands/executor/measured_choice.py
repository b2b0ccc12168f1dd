"""Chooses the faster of two ways to form the sums of one group of devices, by the time that each takes in training.

    trial, both ways in turn                     then the faster one           and again
    round 0        1      2        3     ... 11  12 ... 43    44 ... 75   ...
          built-in torch  built-in torch ...     a window     a window    ...
          (the first pair is not counted)

Others share the machines, so no single time decides: the ways take turns, and the median of the pairs' ratios counts,
since what disturbs one round of a pair mostly disturbs the other, too. Where it is not clear which way is the faster
(`CLEAR`), the trial goes on for as many rounds again, at most `MOST_TURNS` times in all. At each window's end the
devices compare it with the one after the trial: where sums have become slower or faster, there is another trial; there
is one anyway after 1, 2, 4, ... windows, as the first may have been disturbed from its beginning to its end.

All devices of the group must choose alike, so they exchange their times before they decide. Of a round the least time
counts: that of the device that came last and waited for nobody. The module uses no clock and no tensors.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

TRIED_PAIRS = 6
"""Rounds of each way in a turn of a trial, of which the first is not counted."""
TRIAL_ROUNDS = 2 * TRIED_PAIRS
MOST_TURNS = 3
"""Turns of a trial, at most."""
CLEAR = 1.5
"""One turn is enough where one way takes so many times as long as the other: times of single rounds vary by a quarter
on busy machines, and ratios of five pairs by an eighth."""
WINDOW_ROUNDS = 32
"""Rounds between two looks at the way that was taken."""
MOST_WINDOWS = 32
"""Windows between two trials, at most."""
MARGIN = 0.05
"""The part of the built-in way's time that torch must save to be taken."""
SHIFT = 1.5
"""Times differ where a window's is so many times another's."""


class MeasuredChoice:
    """The choice of one group, seen from one device. Rounds are counted from the first of the generation."""

    def __init__(self) -> None:
        self.is_torch = False
        """Whether the sums go through the process group, where no trial is under way."""
        self.is_trial = True
        self._first = 0
        """The first round of the trial's turn, or of the window."""
        self._turns, self._ratios = 0, list[float]()
        """Turns of the trial under way, and what torch takes over what the built-in way takes in each counted pair."""
        self._windows_left, self._distance = 0, 1
        self._usual_seconds: float | None = None
        """A round's seconds in the window after the trial."""
        self._seconds: defaultdict[int, float] = defaultdict(float)
        """Round of this trial or window -> what its sums have taken here."""

    def is_due(self, number: int) -> bool:
        """Return whether the devices are to exchange their times now, before they form a sum of this round."""
        return number - self._first >= (TRIAL_ROUNDS if self.is_trial else WINDOW_ROUNDS)

    def uses_torch(self, number: int) -> bool:
        """Return whether a sum of this round goes through the process group."""
        return (number - self._first) % 2 == 1 if self.is_trial else self.is_torch

    def took(self, number: int, seconds: float) -> None:
        """Note that a sum of this round has taken so long; a round may have several."""
        self._seconds[number] += seconds

    def times(self) -> list[float]:
        """Return the seconds of the turn's counted rounds, or the median of the window's; infinite where there were no
        sums. All devices of the group return as many."""
        if self.is_trial:
            return [self._seconds.get(self._first + place, math.inf) for place in range(2, TRIAL_ROUNDS)]
        return [statistics.median(self._seconds.values()) if self._seconds else math.inf]

    def decide(self, number: int, times: Sequence[Sequence[float]]) -> None:
        """Go on by the times of all devices, from this round on."""
        seconds = [min(of_round) for of_round in zip(*times, strict=True)]
        if self.is_trial:
            self._choose(seconds)
        else:
            self._look(seconds[0])
        self._first = number
        self._seconds.clear()

    def _choose(self, seconds: Sequence[float]) -> None:
        """End the trial, unless nothing is clear yet: take the faster way. One that a second trial confirms is tried
        again after twice as long."""
        pairs = [pair for pair in zip(seconds[::2], seconds[1::2]) if all(map(math.isfinite, pair)) and pair[0] > 0]
        self._ratios += [of_torch / builtin for builtin, of_torch in pairs]
        self._turns += 1
        ratio = statistics.median(self._ratios) if self._ratios else math.inf
        if 1 / CLEAR < ratio < CLEAR and self._turns < MOST_TURNS:
            return
        was_torch, self.is_torch = self.is_torch, ratio < 1 - MARGIN
        self._turns, self._ratios = 0, []
        self._distance = min(2 * self._distance, MOST_WINDOWS) if self.is_torch == was_torch else 1
        self._windows_left, self._usual_seconds, self.is_trial = self._distance, None, False

    def _look(self, seconds: float) -> None:
        """End a window: begin a trial where it is time for one, or where rounds take longer or less than they did."""
        usual = self._usual_seconds = seconds if self._usual_seconds is None else self._usual_seconds
        self._windows_left -= 1
        has_shifted = max(seconds, usual) > SHIFT * min(seconds, usual)
        if has_shifted:
            self._distance = 1
        self.is_trial = has_shifted or self._windows_left <= 0

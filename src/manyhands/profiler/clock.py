"""Timing on a machine that is never quite idle: warm up, take turns, report medians.

round 1   A B C      each round begins with another, so that neither a slow drift nor a neighbour favours any trial
round 2   B C A
round 3   A B        C was pruned
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class TimedTrial:
    """Something to time, by name. `prepare` runs before it and is not timed."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


Timer = Callable[[TimedTrial], float]
"""Runs a trial once and returns the seconds it took. Tests pass a fake one."""


def stopwatch(trial: TimedTrial) -> float:
    """Return the seconds that pass while a trial runs: the real timer."""
    if trial.prepare is not None:
        trial.prepare()
    start = time.perf_counter()
    trial.run()
    return time.perf_counter() - start


class Computed(float):
    """Seconds for which a thread computed, with the seconds that passed meanwhile, which are charged to a time
    budget."""

    passed_seconds: float

    @classmethod
    def of(cls, seconds: float, passed_seconds: float) -> Computed:
        computed = cls(seconds)
        computed.passed_seconds = passed_seconds
        return computed


def computing(trial: TimedTrial) -> float:
    """Return the seconds for which a trial computed: the timer to compare trials by where one thread does all the work.

    On a machine that does other work too, or gives this process a share of a core, a trial takes several times as long
    at one moment as at another; the time that it computes stays the same.
    """
    if trial.prepare is not None:
        trial.prepare()
    start, computed = time.perf_counter(), time.thread_time()
    trial.run()
    return Computed.of(time.thread_time() - computed, time.perf_counter() - start)


def passed(seconds: float) -> float:
    """Return the seconds that a trial took of a time budget, by its timer's result."""
    return seconds.passed_seconds if isinstance(seconds, Computed) else seconds


@dataclass
class Timings:
    """Seconds of each trial, by round, and the time that all of it took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    spent_seconds: float = 0.0

    def median(self, name: str) -> float:
        """Return the median of a trial's seconds; infinite where it was dropped before its first round."""
        return median(self.seconds[name]) if self.seconds[name] else math.inf

    def least(self, name: str) -> float:
        """Return the seconds of the fastest run: interference only ever adds."""
        return min(self.seconds[name], default=math.inf)

    def ratio(self, slow: str, fast: str) -> float:
        """Return how many times `fast` is faster: the median over rounds of the two trials' ratio in that round."""
        pairs = list(zip(self.seconds[slow], self.seconds[fast]))
        return median(a / b for a, b in pairs) if pairs else 0.0

    def rounds(self) -> int:
        return max(map(len, self.seconds.values()), default=0)


def interleave(
    trials: Sequence[TimedTrial],
    *,
    repeats: int = 5,
    least_repeats: int = 1,
    seconds: float = math.inf,
    warm_ups: int = 1,
    pruned_ratio: float = math.inf,
    timer: Timer = stopwatch,
) -> Timings:
    """Time the trials in turns, for `repeats` rounds or until the next would exceed `seconds`, but at least
    `least_repeats`.

    A trial `pruned_ratio` times slower than the best is dropped early. The first trial is the reference and stays.
    """
    timings = Timings({trial.name: [] for trial in trials})
    alive = list(trials)
    for _ in range(warm_ups):
        first = {trial.name: timer(trial) for trial in alive}
        timings.spent_seconds += sum(map(passed, first.values()))
        # A first run also builds what later ones reuse, so it may be twice as slow.
        alive = _promising(alive, first, 2 * pruned_ratio)
    for number in range(repeats):
        begin = number % len(alive)
        round_seconds = {trial.name: timer(trial) for trial in alive[begin:] + alive[:begin]}
        for name, trial_seconds in round_seconds.items():
            timings.seconds[name].append(float(trial_seconds))
        timings.spent_seconds += sum(map(passed, round_seconds.values()))
        alive = _promising(alive, round_seconds, pruned_ratio)
        next_seconds = sum(passed(round_seconds[trial.name]) for trial in alive)
        if number + 1 >= least_repeats and timings.spent_seconds + next_seconds > seconds:
            break
    return timings


def _promising(alive: list[TimedTrial], seconds: dict[str, float], pruned_ratio: float) -> list[TimedTrial]:
    limit = pruned_ratio * min(seconds.values())
    return [trial for index, trial in enumerate(alive) if index == 0 or seconds[trial.name] <= limit]

"""Taking turns, leaving early, keeping to a budget; with a rigged timer, and once with the real one."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.profiler.clock import TimedTrial, computing, interleave, passed, stopwatch


class Rigged:
    """Says what it is told, and keeps a list of who was asked."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.asked: list[str] = []

    def __call__(self, trial: TimedTrial) -> float:
        self.asked.append(trial.name)
        return self.seconds[trial.name]


def _trials(names: str) -> list[TimedTrial]:
    return [TimedTrial(name, lambda: None) for name in names]


def test_each_round_begins_with_another() -> None:
    timer = Rigged({"A": 1.0, "B": 2.0, "C": 3.0})
    interleave(_trials("ABC"), repeats=4, warm_ups=0, timer=timer)
    assert "".join(timer.asked) == "ABC" + "BCA" + "CAB" + "ABC"


def test_trials_take_turns() -> None:
    timer = Rigged({"A": 1.0, "B": 2.0})
    found = interleave(_trials("AB"), repeats=3, timer=timer)
    assert "".join(timer.asked) == "AB" + "AB" + "BA" + "AB"
    assert found.seconds == {"A": [1.0] * 3, "B": [2.0] * 3}
    assert found.spent_seconds == 12.0
    assert (found.median("B"), found.least("A"), found.rounds()) == (2.0, 1.0, 3)


def test_the_hopeless_leave_and_the_reference_stays() -> None:
    timer = Rigged({"A": 9.0, "B": 1.0, "C": 1.8, "D": 5.0})
    found = interleave(_trials("ABCD"), repeats=3, pruned_ratio=1.5, timer=timer)
    assert {name: len(times) for name, times in found.seconds.items()} == {"A": 3, "B": 3, "C": 1, "D": 0}
    assert found.median("D") == math.inf
    assert found.ratio("A", "D") == 0.0


@pytest.mark.parametrize(("seconds", "least", "rounds"), [(0.0, 1, 1), (0.0, 3, 3), (9.0, 1, 2), (1000.0, 1, 50)])
def test_the_budget_holds(seconds: float, least: int, rounds: int) -> None:
    timer = Rigged({"A": 1.0, "B": 2.0})
    found = interleave(_trials("AB"), repeats=50, least_repeats=least, seconds=seconds, timer=timer)
    assert found.rounds() == rounds
    assert found.spent_seconds <= seconds or rounds == least


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(1.1, 3)), min_size=1, max_size=9))
def test_a_drift_that_both_sides_share_cancels(rounds: list[tuple[float, float]]) -> None:
    found = interleave(_trials("AB"), repeats=0, timer=Rigged({"A": 1, "B": 1}))
    found.seconds = {"A": [2 * drift for drift, _ in rounds], "B": [drift for drift, _ in rounds]}
    assert found.ratio("A", "B") == pytest.approx(2.0)


def test_the_stopwatch_does_not_time_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passing(seconds: float) -> None:
        now[0] += seconds

    assert stopwatch(TimedTrial("short", lambda: passing(0.25), prepare=lambda: passing(50))) == 0.25
    monkeypatch.undo()
    assert stopwatch(TimedTrial("short", lambda: time.sleep(0.001), prepare=lambda: time.sleep(0.001))) >= 0.001


def test_what_a_thread_computes_does_not_count_what_it_waits_for() -> None:
    """But a time budget is spent by waiting too."""
    waited = computing(TimedTrial("waits", lambda: time.sleep(0.05), prepare=lambda: time.sleep(0.2)))
    assert waited < 0.02
    assert passed(waited) >= 0.05
    assert passed(0.25) == 0.25
    found = interleave([TimedTrial("waits", lambda: time.sleep(0.05))], repeats=9, seconds=0.12, timer=computing)
    assert found.rounds() <= 2
    assert found.spent_seconds >= 0.1


def test_other_work_on_the_machine_decides_nothing() -> None:
    """One trial computes half of what the other does and is stopped for long, as by other processes."""

    def compute(times: int) -> None:
        sum(range(200_000 * times))

    def stopped() -> None:
        compute(1)
        time.sleep(0.05)

    trials = [TimedTrial("slow", lambda: compute(3)), TimedTrial("fast", stopped)]
    assert interleave(trials, repeats=3, timer=computing).ratio("slow", "fast") > 1.5
    assert interleave(trials, repeats=3, timer=stopwatch).ratio("slow", "fast") < 1

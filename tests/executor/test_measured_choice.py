"""The choice between two ways to form sums, by their times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from manyhands.executor.measured_choice import (
    MARGIN,
    MOST_TURNS,
    MOST_WINDOWS,
    TRIAL_ROUNDS,
    TRIED_PAIRS,
    WINDOW_ROUNDS,
    MeasuredChoice,
)

LONGEST_TRIAL = MOST_TURNS * TRIAL_ROUNDS
Times = Callable[[int, bool], list[float]]
"""Round, and whether torch forms its sums -> what each device measures."""


def train(rounds: int, times: Times, devices: int = 2) -> list[bool]:
    """Whether each round went through torch; the devices never differ, and a round's time is given in two sums."""
    choices, ways = [MeasuredChoice() for _ in range(devices)], []
    for number in range(rounds):
        due = {choice.is_due(number) for choice in choices}
        assert len(due) == 1
        if due.pop():
            rows = [choice.times() for choice in choices]
            for choice in choices:
                choice.decide(number, rows)
        (is_torch,) = {choice.uses_torch(number) for choice in choices}
        ways.append(is_torch)
        for choice, seconds in zip(choices, times(number, is_torch), strict=True):
            choice.took(number, seconds / 4)
            choice.took(number, 3 * seconds / 4)
    return ways


def steady(builtin: float, torch: float) -> Times:
    return lambda number, is_torch: [torch if is_torch else builtin] * 2


def test_the_ways_take_turns_before_one_is_taken() -> None:
    for times, is_torch in ((steady(3.1, 2.0), True), (steady(2.0, 3.1), False)):
        ways = train(TRIAL_ROUNDS + 5, times)
        assert ways == [False, True] * TRIED_PAIRS + [is_torch] * 5


def test_a_trial_goes_on_while_it_is_not_clear_which_way_is_faster() -> None:
    for times, is_torch in ((steady(2.5, 2.0), True), (steady(2.0, 2.5), False), (steady(2.0, 2.0), False)):
        ways = train(LONGEST_TRIAL + 5, times)
        assert ways == [False, True] * TRIED_PAIRS * MOST_TURNS + [is_torch] * 5


def test_torch_must_be_faster_by_a_margin() -> None:
    for part, is_torch in ((1 - 0.9 * MARGIN, False), (1 - 1.1 * MARGIN, True)):
        assert train(LONGEST_TRIAL + 1, steady(1.0, part))[-1] == is_torch


def test_the_slower_way_is_rarely_taken() -> None:
    """Rounds vary by a fifth, and there are spells in which all take twice as long."""
    for torch in (0.8, 1.15, 1.25):
        wrong = 0
        for seed in range(200):
            chance = random.Random(seed)
            begun = [chance.randrange(LONGEST_TRIAL) for _ in range(3)]

            def times(
                number: int, is_torch: bool, chance: random.Random = chance, begun: list[int] = begun,
                torch: float = torch,
            ) -> list[float]:  # fmt: skip
                spell = 2.0 if any(first <= number < first + 6 for first in begun) else 1.0
                return [spell * (torch if is_torch else 1.0) * math.exp(chance.gauss(0, 0.2))] * 2

            wrong += train(LONGEST_TRIAL + 1, times)[-1] != (torch < 1)
        assert wrong <= 16, f"of 200, torch at {torch}"


def test_the_first_of_each_and_single_rounds_that_were_disturbed_do_not_count() -> None:
    def times(number: int, is_torch: bool) -> list[float]:
        disturbed = number in (1, 3, 7)  # of torch, which is the faster
        return [50.0 if disturbed else 1.0 if is_torch else 2.0] * 2

    assert train(TRIAL_ROUNDS + 1, times)[-1]


def test_who_waits_for_a_slower_device_says_nothing_of_the_sums() -> None:
    """One device comes late, now more and now less; the late one's times are the sums'."""
    chance = random.Random(3)

    def times(number: int, is_torch: bool) -> list[float]:
        seconds = 0.004 if is_torch else 0.008
        return [seconds + chance.uniform(0.1, 0.5), seconds]

    assert train(TRIAL_ROUNDS + 1, times)[-1]


@pytest.mark.parametrize("torch", [0.5, 2.0], ids=["torch is faster", "torch is slower"])
def test_noisy_times(torch: float) -> None:
    """Two ways that differ by half, on machines where a third of all rounds takes up to six times as long: nearly all
    trials end right, and those that do not are made good."""
    is_wrong, later = 0, 0
    for seed in range(200):
        chance = random.Random(seed)

        def times(number: int, is_torch: bool, chance: random.Random = chance) -> list[float]:
            base = (torch if is_torch else 1.0) * chance.uniform(0.9, 1.1)
            return [base * (chance.uniform(1, 6) if chance.random() < 1 / 3 else 1.0)] * 2

        ways = train(8 * WINDOW_ROUNDS, times)
        is_wrong += ways[TRIAL_ROUNDS] != (torch < 1)
        later += sum(way != (torch < 1) for way in ways[4 * WINDOW_ROUNDS :])
    assert is_wrong <= 40, "of 200"
    assert later <= 0.15 * 200 * 4 * WINDOW_ROUNDS


def test_it_looks_again_when_times_have_shifted() -> None:
    """Torch becomes slow, as where another job has come; then it is the faster again."""
    begun, ended = 10 * WINDOW_ROUNDS, 30 * WINDOW_ROUNDS

    def times(number: int, is_torch: bool) -> list[float]:
        return [(9.0 if begun <= number < ended else 1.0) if is_torch else 2.0] * 2

    ways = train(31 * WINDOW_ROUNDS + 2 * MOST_WINDOWS * WINDOW_ROUNDS, times)
    assert all(ways[TRIAL_ROUNDS : TRIAL_ROUNDS + WINDOW_ROUNDS])
    assert ways[begun - 1]
    soon = begun + 2 * WINDOW_ROUNDS + TRIAL_ROUNDS
    assert not any(ways[soon : soon + WINDOW_ROUNDS // 2])
    assert ways[-1]


def test_a_trial_that_was_disturbed_as_a_whole_is_made_good() -> None:
    """Something else runs through the whole of the first trial, and hits one way only."""
    ways = train(
        4 * WINDOW_ROUNDS, lambda number, is_torch: [5.0 if not is_torch and number < TRIAL_ROUNDS else 1.0] * 2
    )
    assert ways[TRIAL_ROUNDS]
    second = TRIAL_ROUNDS + WINDOW_ROUNDS + LONGEST_TRIAL
    assert not any(ways[second : second + WINDOW_ROUNDS])


def test_trials_become_rare_where_nothing_changes() -> None:
    rounds = 4 * MOST_WINDOWS * WINDOW_ROUNDS
    slower = sum(train(rounds, steady(1.0, 2.0)))
    assert TRIED_PAIRS < slower < rounds / 50


def test_rounds_without_sums_decide_nothing() -> None:
    choice = MeasuredChoice()
    assert choice.times() == [math.inf] * (TRIAL_ROUNDS - 2)
    choice.decide(TRIAL_ROUNDS, [choice.times()])
    assert not choice.uses_torch(TRIAL_ROUNDS)
    choice.decide(TRIAL_ROUNDS + WINDOW_ROUNDS, [choice.times()])
    assert not choice.is_trial

"""The choice between two ways to form sums, by their times."""

from __future__ import annotations

import math

import pytest

from manyhands.executor.measured_choice import TRIED_ROUNDS, MeasuredChoice


def tried(builtin: list[float], torch: list[float]) -> MeasuredChoice:
    """A device's choice after the rounds that are tried; a round's time is given in two sums."""
    choice = MeasuredChoice()
    for number, seconds in enumerate([*builtin, *torch]):
        assert not choice.is_due(number)
        assert choice.uses_torch(number) == (number >= TRIED_ROUNDS)
        choice.took(number, seconds / 4)
        choice.took(number, 3 * seconds / 4)
    assert choice.is_due(2 * TRIED_ROUNDS)
    return choice


def test_the_best_round_of_each_way_counts_and_its_first_does_not() -> None:
    choice = tried([0.1, 4.0, 3.0, 5.0], [0.1, 7.0, 9.0, 2.0])
    assert choice.times() == pytest.approx((3.0, 2.0))


def test_all_devices_choose_the_way_whose_slowest_is_faster() -> None:
    times = [(3.0, 2.0), (1.0, 2.5)]
    choices = [tried([9.0, a, a, a], [9.0, b, b, b]) for a, b in times]
    for choice in choices:
        choice.decide([each.times() for each in choices])
        assert choice.is_torch
        assert choice.uses_torch(100)
        assert not choice.is_due(100)
    slower = tried([9.0, 1.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0])
    slower.decide([(1.0, 1.0), (1.0, 1.0)])
    assert slower.is_torch is False
    assert not slower.uses_torch(100)


def test_rounds_without_sums_decide_nothing() -> None:
    choice = MeasuredChoice()
    assert choice.times() == (math.inf, math.inf)
    choice.decide([choice.times()])
    assert choice.is_torch is False

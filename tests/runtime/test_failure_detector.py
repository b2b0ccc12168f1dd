"""Silence, suspicion and loss, as a pure state machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.runtime.failure_detector import Due, FailureDetector

LIMIT_SECONDS = 2.0
GRAIN_SECONDS = 1 / 64
"""Times are whole multiples of it, so that sums are exact."""
grains = st.integers
PERIOD_GRAINS = int(LIMIT_SECONDS / 4 / GRAIN_SECONDS)
LIMIT_GRAINS = int(LIMIT_SECONDS / GRAIN_SECONDS)


def detecting(*names: str) -> FailureDetector:
    detector = FailureDetector(LIMIT_SECONDS)
    for name in names:
        detector.begin(name, 0.0)
    detector.due(0.0)
    return detector


@pytest.mark.slow
@given(
    st.lists(st.tuples(grains(1, PERIOD_GRAINS), st.lists(st.sampled_from("abc"), max_size=2)), max_size=80), grains()
)
def test_nobody_who_is_heard_often_enough_is_given_up(turns: list[tuple[int, list[str]]], start: int) -> None:
    """However little: whoever is given up has been silent for the limit, was probed before and did not answer."""
    detector = FailureDetector(LIMIT_SECONDS)
    now = (start % 10**6) * GRAIN_SECONDS
    heard = dict.fromkeys("abc", now)
    probed: dict[str, float] = {}
    for name in heard:
        detector.begin(name, now)
    detector.due(now)
    for step, names in turns:
        now += step * GRAIN_SECONDS
        for name in names:
            detector.received(name, now)
            if name in heard:
                heard[name] = now
                probed.pop(name, None)
        due = detector.due(now)
        for name in due.probe:
            assert now - heard[name] >= LIMIT_SECONDS / 2
            assert name not in probed, "one probe is enough"
            probed[name] = now
        for name in due.lost:
            assert now - heard.pop(name) >= LIMIT_SECONDS
            assert now - probed[name] >= LIMIT_SECONDS / 4
        assert set(detector.suspects) == {name for name in probed if name in heard}


@pytest.mark.slow
@given(st.lists(grains(1, PERIOD_GRAINS), min_size=LIMIT_GRAINS * 2), grains(0, LIMIT_GRAINS))
def test_a_silent_one_is_given_up_within_the_limit_and_one_period(steps: list[int], last: int) -> None:
    """Looked after at least every quarter of the limit, and heard for the last time at any moment."""
    detector = detecting("a", "b")
    now, heard, lost_at = 0.0, 0.0, math.inf
    for step in steps:
        now += step * GRAIN_SECONDS
        detector.received("b", now)
        if now <= last * GRAIN_SECONDS:
            detector.received("a", now)
            heard = now
        due = detector.due(now)
        assert "b" not in (*due.lost, *due.probe)
        if due.lost:
            lost_at = now
            break
    assert LIMIT_SECONDS <= lost_at - heard <= LIMIT_SECONDS + PERIOD_GRAINS * GRAIN_SECONDS


@given(st.lists(grains(1, LIMIT_GRAINS // 2 - 1), min_size=1, max_size=200))
def test_a_suspect_that_answers_is_never_given_up(delays: list[int]) -> None:
    """It never speaks but when it is asked, and takes up to a half of the limit for it."""
    detector = detecting("a")
    time, answer_at, probes = 0, math.inf, 0
    remaining = iter(delays)
    while True:
        time += 8
        if time >= answer_at:
            detector.received("a", answer_at * GRAIN_SECONDS)
            answer_at = math.inf
        due = detector.due(time * GRAIN_SECONDS)
        assert not due.lost
        if due.probe:
            probes += 1
            delay = next(remaining, None)
            if delay is None:
                break
            answer_at = time + min(delay, LIMIT_GRAINS // 2 - 16)
    assert probes == len(delays) + 1


def test_asked_too_late_everybody_is_pardoned() -> None:
    """What they said meanwhile is still to be read: a suspended laptop."""
    detector = detecting("a", "b")
    assert detector.due(3600.0) == Due()
    detector.received("a", 3600.1)
    lost: dict[str, float] = {}
    for turn in range(1, 20):
        now = 3600.0 + turn / 4
        detector.received("a", now)
        for name in detector.due(now).lost:
            lost[name] = now
    assert lost == {"b": 3600.0 + LIMIT_SECONDS}


@given(st.lists(grains(LIMIT_GRAINS // 2 + 1, 10 * LIMIT_GRAINS), min_size=8, max_size=8))
def test_a_watch_that_is_always_late_still_finds_out(steps: list[int]) -> None:
    """Nobody is pardoned twice in one silence; and nobody is given up who was not probed."""
    detector = detecting("a", "b")
    now, probed, lost = 0.0, False, False
    for step in steps:
        now += step * GRAIN_SECONDS
        detector.received("b", now - GRAIN_SECONDS)
        due = detector.due(now)
        assert "b" not in due.lost
        if "a" in due.lost:
            assert probed
            lost = True
        probed = probed or "a" in due.probe
    assert lost


def test_one_that_is_lost_is_no_longer_watched_until_it_is_back() -> None:
    detector = detecting("a")
    turns = [detector.due(turn / 4) for turn in range(1, 9)]
    assert [due for due in turns if due != Due()] == [Due(probe=("a",)), Due(lost=("a",))]
    detector.received("a", 2.1)
    assert detector.silent_seconds("a", 5.0) == 0
    assert detector.due(2.25) == detector.due(2.5) == Due()
    detector.begin("a", 2.5)
    assert detector.silent_seconds("a", 3.0) == 0.5
    turns = [detector.due(2.5 + turn / 4) for turn in range(1, 9)]
    assert [due for due in turns if due != Due()] == [Due(probe=("a",)), Due(lost=("a",))]


def test_one_that_left_is_not_missed() -> None:
    detector = detecting("a")
    detector.forget("a")
    detector.forget("a")
    assert not any(detector.due(turn / 4) != Due() for turn in range(1, 20))


@pytest.mark.parametrize("limit_seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_none(limit_seconds: float) -> None:
    with pytest.raises(BadValue, match="must be > 0 and finite"):
        FailureDetector(limit_seconds)

"""Silence, suspicion and loss, as a pure state machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.runtime.watch import Due, Watch

LIMIT_SECONDS = 2.0
GRAIN_SECONDS = 1 / 64
"""Times are whole multiples of it, so that sums are exact."""
grains = st.integers
PERIOD_GRAINS = int(LIMIT_SECONDS / 4 / GRAIN_SECONDS)
LIMIT_GRAINS = int(LIMIT_SECONDS / GRAIN_SECONDS)


def watching(*names: str) -> Watch:
    watch = Watch(LIMIT_SECONDS)
    for name in names:
        watch.begin(name, 0.0)
    watch.due(0.0)
    return watch


@given(
    st.lists(st.tuples(grains(1, PERIOD_GRAINS), st.lists(st.sampled_from("abc"), max_size=2)), max_size=80), grains()
)
def test_nobody_who_is_heard_often_enough_is_given_up(turns: list[tuple[int, list[str]]], start: int) -> None:
    """However little: whoever is given up has been silent for the limit, was probed before and did not answer."""
    watch = Watch(LIMIT_SECONDS)
    now = (start % 10**6) * GRAIN_SECONDS
    heard = dict.fromkeys("abc", now)
    probed: dict[str, float] = {}
    for name in heard:
        watch.begin(name, now)
    watch.due(now)
    for step, names in turns:
        now += step * GRAIN_SECONDS
        for name in names:
            watch.heard(name, now)
            if name in heard:
                heard[name] = now
                probed.pop(name, None)
        due = watch.due(now)
        for name in due.probe:
            assert now - heard[name] >= LIMIT_SECONDS / 2
            assert name not in probed, "one probe is enough"
            probed[name] = now
        for name in due.lost:
            assert now - heard.pop(name) >= LIMIT_SECONDS
            assert now - probed[name] >= LIMIT_SECONDS / 4
        assert set(watch.suspects) == {name for name in probed if name in heard}


@given(st.lists(grains(1, PERIOD_GRAINS), min_size=LIMIT_GRAINS * 2), grains(0, LIMIT_GRAINS))
def test_a_silent_one_is_given_up_within_the_limit_and_one_period(steps: list[int], last: int) -> None:
    """Looked after at least every quarter of the limit, and heard for the last time at any moment."""
    watch = watching("a", "b")
    now, heard, lost_at = 0.0, 0.0, math.inf
    for step in steps:
        now += step * GRAIN_SECONDS
        watch.heard("b", now)
        if now <= last * GRAIN_SECONDS:
            watch.heard("a", now)
            heard = now
        due = watch.due(now)
        assert "b" not in (*due.lost, *due.probe)
        if due.lost:
            lost_at = now
            break
    assert LIMIT_SECONDS <= lost_at - heard <= LIMIT_SECONDS + PERIOD_GRAINS * GRAIN_SECONDS


@given(st.lists(grains(1, LIMIT_GRAINS // 2 - 1), min_size=1, max_size=200))
def test_a_suspect_that_answers_is_never_given_up(delays: list[int]) -> None:
    """It never speaks but when it is asked, and takes up to a half of the limit for it."""
    watch = watching("a")
    time, answer_at, probes = 0, math.inf, 0
    remaining = iter(delays)
    while True:
        time += 8
        if time >= answer_at:
            watch.heard("a", answer_at * GRAIN_SECONDS)
            answer_at = math.inf
        due = watch.due(time * GRAIN_SECONDS)
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
    watch = watching("a", "b")
    assert watch.due(3600.0) == Due()
    watch.heard("a", 3600.1)
    lost: dict[str, float] = {}
    for turn in range(1, 20):
        now = 3600.0 + turn / 4
        watch.heard("a", now)
        for name in watch.due(now).lost:
            lost[name] = now
    assert lost == {"b": 3600.0 + LIMIT_SECONDS}


@given(st.lists(grains(LIMIT_GRAINS // 2 + 1, 10 * LIMIT_GRAINS), min_size=8, max_size=8))
def test_a_watch_that_is_always_late_still_finds_out(steps: list[int]) -> None:
    """Nobody is pardoned twice in one silence; and nobody is given up who was not probed."""
    watch = watching("a", "b")
    now, probed, lost = 0.0, False, False
    for step in steps:
        now += step * GRAIN_SECONDS
        watch.heard("b", now - GRAIN_SECONDS)
        due = watch.due(now)
        assert "b" not in due.lost
        if "a" in due.lost:
            assert probed
            lost = True
        probed = probed or "a" in due.probe
    assert lost


def test_one_that_is_lost_is_no_longer_watched_until_it_is_back() -> None:
    watch = watching("a")
    turns = [watch.due(turn / 4) for turn in range(1, 9)]
    assert [due for due in turns if due != Due()] == [Due(probe=("a",)), Due(lost=("a",))]
    watch.heard("a", 2.1)
    assert watch.silent_seconds("a", 5.0) == 0
    assert watch.due(2.25) == watch.due(2.5) == Due()
    watch.begin("a", 2.5)
    assert watch.silent_seconds("a", 3.0) == 0.5
    turns = [watch.due(2.5 + turn / 4) for turn in range(1, 9)]
    assert [due for due in turns if due != Due()] == [Due(probe=("a",)), Due(lost=("a",))]


def test_one_that_left_is_not_missed() -> None:
    watch = watching("a")
    watch.forget("a")
    watch.forget("a")
    assert not any(watch.due(turn / 4) != Due() for turn in range(1, 20))


@pytest.mark.parametrize("limit_seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_is_none(limit_seconds: float) -> None:
    with pytest.raises(BadValue, match="must be > 0 and finite"):
        Watch(limit_seconds)

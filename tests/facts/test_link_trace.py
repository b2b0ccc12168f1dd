"""Recorded rates: what holds when, how much passes, what is no trace."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.trace import LinkTrace, Trace, parse_link_trace, parse_trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    gaps = draw(st.lists(st.floats(0.01, 5), min_size=0, max_size=20))
    moments = [draw(st.floats(-100, 100))]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    rates = draw(st.lists(st.floats(0, 1e9), min_size=len(moments), max_size=len(moments)))
    return Trace(tuple(moments), tuple(rates))


def test_a_trace_holds_each_rate_to_the_next_and_begins_again() -> None:
    trace = parse_trace("# recorded\n10 8\n11 16\n\n13 0\n", "x.txt")
    assert trace == Trace((10, 11, 13), (1e6, 2e6, 0))
    assert trace.length_seconds == 4.5
    assert trace.at(0) == (1e6, 1)
    assert trace.at(0.75) == (1e6, 0.25)
    assert trace.at(1) == (2e6, 2)
    assert trace.at(3) == (0, 1.5)
    assert trace.at(4.5) == (1e6, 1)
    assert trace.at(10) == (2e6, 2)
    assert trace.rate(10) == 2e6
    assert trace.mean == 5e6 / 4.5
    assert trace.integral(0.5, 2) == 0.5e6 + 2e6
    assert trace.integral(3.5, 5.5) == 1e6


@given(traces(), st.floats(0, 1e4))
def test_a_trace_has_a_rate_at_every_moment(trace: Trace, moment: float) -> None:
    rate, lasts = trace.at(moment)
    assert rate == trace.rate(moment)
    assert rate in trace.bytes_per_second
    assert 0 < lasts <= trace.length_seconds + 1e-6


@pytest.mark.slow
@given(traces(), st.lists(st.floats(0, 100), min_size=3, max_size=3))
def test_what_passes_adds_up_and_is_what_the_rates_say(trace: Trace, moments: list[float]) -> None:
    a, b, c = sorted(moments)
    slack = 1e-3 + 1e-6 * max(trace.bytes_per_second)  # within a microsecond of a change either rate may be meant
    assert trace.integral(a, c) == pytest.approx(trace.integral(a, b) + trace.integral(b, c), rel=1e-6, abs=slack)
    assert trace.integral(a, a + trace.length_seconds) == pytest.approx(
        trace.mean * trace.length_seconds, rel=1e-6, abs=slack
    )
    assert trace.integral(a, b) <= max(trace.bytes_per_second) * (b - a) + slack
    rate, lasts = trace.at(a)
    assert trace.integral(a, a + lasts / 2) == pytest.approx(rate * lasts / 2, rel=1e-6, abs=slack)


@given(traces(), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 50))
def test_scaling(trace: Trace, rates: float, times: float, moment: float) -> None:
    scaled = trace.scaled(rates=rates, times=times)
    if len(trace.seconds) > 1:
        assert scaled.length_seconds == pytest.approx(trace.length_seconds * times)
    assert scaled.mean == pytest.approx(trace.mean * rates, rel=1e-6)
    assert scaled.integral(0, moment * times) == pytest.approx(
        trace.integral(0, moment) * rates * times, rel=1e-6, abs=1.0 + 1e-6 * rates * max(trace.bytes_per_second)
    )
    with pytest.raises(BadValue, match="must be > 0"):
        trace.scaled(rates=0)
    with pytest.raises(BadValue, match="must be > 0"):
        trace.scaled(times=math.inf)


HOSTILE = [
    "", "# nothing\n", "1", "1 x", "1 2 3 4", "1 2\n2 3 4", "1 2\n1 3", "2 1\n1 1", "0 -1", "0 nan", "nan 1", "0 inf",
    "inf 1", "-inf 1\n0 1", "0 1_0", "\x00\x01\x02 \x03", "0 0", "0 1 0", "-1e308 1\n1e308 1", "0 1e308",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_trace(text: str) -> None:
    with pytest.raises(BadFile, match=r"x\.txt"):
        parse_link_trace(text, "x.txt")


@given(st.text(max_size=200))
def test_any_text_is_a_trace_or_a_bad_file(text: str) -> None:
    try:
        found = parse_link_trace(text, "x.txt")
    except BadFile:
        return
    assert 0 < found.up.mean < math.inf


def test_two_directions() -> None:
    both = parse_link_trace("0 8 16\n1 24 32\n", "x.txt")
    assert both == LinkTrace(Trace((0, 1), (1e6, 3e6)), Trace((0, 1), (2e6, 4e6)), False, "x.txt")
    one = parse_link_trace("0 8\n", "x.txt")
    assert one.is_one_way
    assert one.up == one.down
    with pytest.raises(BadFile, match="two rates"):
        parse_trace("0 1 2", "x.txt")
    assert both.scaled(rates=2).down.bytes_per_second == (4e6, 8e6)
    assert both.scaled(times=2).up.seconds == (0, 2)
    constant = LinkTrace.constant(1e6, 2e6)
    assert (constant.up.rate(17.3), constant.down.rate(1e5)) == (1e6, 2e6)

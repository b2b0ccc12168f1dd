"""Spans thinned for those who look on: few, in place, with nothing of the time they cover lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.schedule.glimpse import MOST_SPANS, Glimpse, thinned

KINDS = [("compute", "forward", 0), ("compute", "backward", 0), ("compute", "forward", 1), ("send", "send", -1)]


@st.composite
def rounds(draw: st.DrawFn) -> list[Glimpse]:
    """Each track in order and without overlaps, as devices record it."""
    ends = {"compute": 0.0, "send": 0.0}
    spans = []
    for number in range(draw(st.integers(0, 60))):
        track, kind, stage = draw(st.sampled_from(KINDS))
        start = ends[track] + draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.1]))
        ends[track] = start + draw(st.sampled_from([1e-6, 1e-3, 0.2]))
        spans.append(Glimpse(track, kind, start, ends[track], stage, str(number % 4)))
    return spans


@pytest.mark.slow
@given(rounds(), st.integers(1, 40))
def test_few_are_left_and_none_is_made_up(spans: list[Glimpse], most: int) -> None:
    found = thinned(spans, most)
    assert len(found) <= most
    if len(spans) <= most:
        assert sorted(found, key=repr) == sorted(spans, key=repr)
    for one in found:
        inside = [
            span
            for span in spans
            if (span.track, span.kind, span.stage) == (one.track, one.kind, one.stage)
            and one.start <= span.start
            and span.end <= one.end
        ]
        assert min(span.start for span in inside) == one.start
        assert max(span.end for span in inside) == one.end
    for track in ("compute", "send"):  # still one after the other
        own = [one for one in found if one.track == track]
        assert all(first.end <= second.start for first, second in zip(own, own[1:]))


def test_neighbours_become_one_and_lose_a_label_that_differs() -> None:
    spans = [Glimpse("compute", "forward", i * 1e-3, i * 1e-3 + 9.5e-4, 0, str(i % 2)) for i in range(4 * MOST_SPANS)]
    (only,) = thinned(spans)
    assert (only.start, only.end, only.label) == (0.0, spans[-1].end, "")

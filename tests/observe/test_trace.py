"""Traces open in Perfetto: tracks per device, lanes that never overlap, every span there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.observe.timeline import draw_timeline
from manyhands.observe.trace import lanes, short_label, trace_events


@dataclass(frozen=True)
class Spot:
    device: str
    track: str
    start: float
    end: float
    kind: str = "value"
    text: str = "send b m3 value x[0:1] 4B"


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), max_size=30))
def test_lanes_do_not_overlap_and_lose_nothing(given_spans: list[tuple[float, float]]) -> None:
    spans = [Spot("a", "send", start, start + length) for start, length in given_spans]
    rows = lanes(list(spans))
    assert sum(map(len, rows)) == len(spans)
    for row in rows:
        for before, after in zip(row, row[1:]):
            assert before.end <= after.start + 1e-9


def test_events_have_tracks_and_microseconds() -> None:
    spans = [
        Spot("a", "compute", 0.0, 1.0, "forward", "forward s0 m3 0:4"),
        Spot("a", "send", 1.0, 1.5),
        Spot("b", "receive", 1.1, 1.6),
    ]
    document = trace_events(spans, title="t")
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in complete] == ["F3", "value", "value"]
    assert complete[0]["dur"] == 1e6
    assert len({event["pid"] for event in complete}) == 2
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["compute", "send", "receive"]


@pytest.mark.slow
def test_picture_is_drawn(tmp_path: Path) -> None:
    spans = [Spot(f"d{i}", "compute", 0.0, 1.0 + i, "forward", f"forward s0 m{i} 0:4") for i in range(50)]
    path = draw_timeline(spans, [f"d{i}" for i in range(50)], 60.0, tmp_path / "t.png", title="many")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_labels_say_pass_micro_batch_and_part() -> None:
    texts = {
        "F3": ("forward", "forward s0 m3 0:4"),
        "F3 rim": ("forward", "forward s0 m3 4:5 rim"),
        "B12 weights": ("backward", "backward s1 m12 4:5 weights"),
        "L0": ("loss", "loss s1 m0"),
        "halo": ("halo", "to b: s0 m3 halo weights[0:1] 4B"),
    }
    for label, (kind, text) in texts.items():
        assert short_label(Spot("a", "compute", 0.0, 1.0, kind, text)) == label

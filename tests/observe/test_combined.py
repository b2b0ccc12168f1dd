"""Measured spans beside simulated ones: one trace, one picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from manyhands.executor.log import DeviceLog, MeasuredSpan, Recorder
from manyhands.facts.boxes import Box
from manyhands.observe.plots import draw_predicted_beside_measured
from manyhands.observe.timeline import COLOURS
from manyhands.observe.trace import combined_trace, trace_events
from manyhands.schedule.actions import (
    KINDS,
    Action,
    Backward,
    Forward,
    Loss,
    Message,
    Part,
    Receive,
    Reduce,
    Send,
    Step,
)
from manyhands.simulator.result import Span

MESSAGE = Message("value", 0, 1, (Part("x", Box(((0, 1),))),), 4)
ACTIONS: list[Action] = [
    Receive("b", MESSAGE),
    Forward(0, 1, 0, 4),
    Reduce(0, "statistics", 0, 4, ("a", "b"), 4, 1),
    Send("b", MESSAGE),
    Loss(0, 1),
    Backward(0, 1, 0, 4),
    Step(0),
]


def measured(device: str, zero: float = 1e6) -> list[MeasuredSpan]:
    """What a device's own recorder makes of one of each action, on a clock that has run for days."""
    recorder = Recorder(DeviceLog(device), trace_steps=range(1))
    recorder.begin(0)
    for number, action in enumerate(ACTIONS):
        recorder.took(action, zero + number, zero + number + 0.5)
    reduce = Reduce(0, "gradients", 0, 4, ("a", "b"), 4)
    recorder.span(reduce, str(reduce), zero + 4.2, zero + 5.2)
    return recorder.log.spans


def predicted(device: str) -> list[Span]:
    return [
        Span(device, "compute", 0.0, 1.0, "forward", ACTIONS[1]),
        Span(device, "send", 1.0, 2.0, "value", MESSAGE, "b"),
        Span(device, "receive", 1.5, 2.5, "value", MESSAGE, "b"),
    ]


def test_every_kind_has_a_colour() -> None:
    kinds = {span.kind for span in measured("a")}
    assert kinds == {"forward", "loss", "backward", "step", "send", "receive", "reduce"}
    assert kinds | set(KINDS) <= COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_measured_spans_begin_at_zero() -> None:
    document = trace_events(measured("a"), title="t", simulated=False)
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0.0
    assert len(complete) == len(measured("a"))
    assert {event["name"] for event in complete} == {"F1", "L1", "B1", "step", "send", "receive", "reduce"}
    assert document["otherData"] == {"title": "t", "simulated": False, "spans_left_out": 0}


def test_combined_trace_names_both_sides() -> None:
    spans = [*measured("local-1"), *measured("local-2", 1e6 + 3)]
    document = json.loads(json.dumps(combined_trace(predicted("local-1"), spans, title="t"), allow_nan=False))
    events = document["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(names) == ["local-1 (measured)", "local-1 (predicted)", "local-2 (measured)"]
    assert sorted(names.values()) == [1, 2, 3]
    assert document["otherData"]["simulated_processes"] == ["local-1 (predicted)"]
    assert document["otherData"]["measured_processes"] == ["local-1 (measured)", "local-2 (measured)"]
    starts = {
        name: min(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == process)
        for name, process in names.items()
    }
    assert starts == {"local-1 (measured)": 0.0, "local-1 (predicted)": 0.0, "local-2 (measured)": 3e6}
    for event in events:
        if event["ph"] == "X":
            assert all(isinstance(event[field], (int, float)) for field in ("ts", "dur", "pid", "tid"))
            assert event["dur"] >= 0
    order = [event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"]
    assert order == [1, 2, 3]


@pytest.mark.parametrize(("start", "end"), [(math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0), (2.0, 1.0)])
def test_times_that_are_none_are_left_out_and_counted(start: float, end: float) -> None:
    bad = msgspec.structs.replace(measured("a")[0], start=start, end=end)
    for document in (
        combined_trace(predicted("a"), [bad, *measured("a")], title="t"),
        trace_events([bad, *measured("a")], simulated=False),
        trace_events([bad, *measured("a")]),
    ):
        json.dumps(document, allow_nan=False)
        assert document["otherData"]["spans_left_out"] == 1


def test_a_track_nobody_knows_is_kept() -> None:
    odd = msgspec.structs.replace(measured("a")[0], track="disk")
    document = trace_events([odd], simulated=False)
    assert [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"] == ["disk"]


def test_nothing_at_all_is_a_trace_too() -> None:
    assert combined_trace([], [], title="")["traceEvents"] == []


@pytest.mark.slow
def test_picture_of_both(tmp_path: Path) -> None:
    odd = [
        MeasuredSpan("a", "disk", 0.0, 1.0, "forward", ""),
        MeasuredSpan("a", "compute", math.nan, 1.0, "forward", ""),
        MeasuredSpan("a", "compute", 1e6, 1e6 + 1, "dream", "$x_$"),
    ]
    path = draw_predicted_beside_measured(
        predicted("a"), [*measured("a"), *odd[1:]], ["a", "cost $1$"], tmp_path / "both.png",
        title="t", predicted_seconds=2.5, measured_seconds=6.0,
    )  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")
    for seconds in (0.0, math.nan):
        draw_predicted_beside_measured(
            [], odd[:1], ["a"], path, title="t", predicted_seconds=seconds, measured_seconds=seconds
        )

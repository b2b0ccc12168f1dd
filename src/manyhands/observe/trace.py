"""A timeline as trace.json, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

There is one process per device, with one track each for computing, sending and receiving. Overlapping transfers on one
track would be drawn wrongly, so each concurrent transfer gets a lane of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TRACKS = ("compute", "send", "receive")
PARTS = ("interior", "rim", "inputs", "weights")
"""The parts of an operator that are computed first or later, forward and backward."""


class SpanLike(Protocol):
    """A span of a timeline, simulated or measured."""

    @property
    def device(self) -> str: ...
    @property
    def track(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class ShiftedSpan:
    """A span with its times shifted to another clock."""

    device: str
    track: str
    start: float
    end: float
    kind: str
    text: str


def trace_events(spans: Iterable[SpanLike], *, title: str = "", simulated: bool = True) -> dict[str, Any]:
    """Return the trace document. Times become microseconds; measured ones, of any clock, begin at 0."""
    all_spans = list(spans)
    sane_spans = from_zero(all_spans) if not simulated else [span for span in all_spans if sane(span)]
    events: list[dict[str, Any]] = []
    for process, (device, device_spans) in enumerate(_by_device(sane_spans).items(), 1):
        events += _process(process, device, device_spans)
    facts = {"title": title, "simulated": simulated, "spans_left_out": len(all_spans) - len(sane_spans)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def combined_trace(predicted: Sequence[SpanLike], measured: Sequence[SpanLike], *, title: str) -> dict[str, Any]:
    """Return one document of both timelines: each device has a process for the measurement and, below it, one for the
    prediction.

    Both begin at 0. The clocks of the measured devices must have been synchronised before.
    """
    sides = {"measured": _by_device(from_zero(measured)), "predicted": _by_device(from_zero(predicted))}
    events: list[dict[str, Any]] = []
    processes: dict[str, list[str]] = {side: [] for side in sides}
    kept_count = 0
    for device in dict.fromkeys(name for by_device in sides.values() for name in by_device):
        for side, by_device in sides.items():
            if device_spans := by_device.get(device):
                name = f"{device} ({side})"
                processes[side].append(name)
                kept_count += len(device_spans)
                events += _process(sum(map(len, processes.values())), name, device_spans)
    facts = {
        "title": title,
        "simulated_processes": processes["predicted"],
        "measured_processes": processes["measured"],
        "spans_left_out": len(predicted) + len(measured) - kept_count,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def sane(span: SpanLike) -> bool:
    """Return whether the times are numbers in order. A span that crossed the wire may hold any values."""
    return -math.inf < span.start <= span.end < math.inf


def from_zero(spans: Iterable[SpanLike]) -> list[SpanLike]:
    """Return the spans with sane times, shifted together so that the first begins at 0."""
    sane_spans = [span for span in spans if sane(span)]
    zero = min((span.start for span in sane_spans), default=0.0)
    return [ShiftedSpan(s.device, s.track, s.start - zero, s.end - zero, s.kind, s.text) for s in sane_spans]


def lanes(spans: list[SpanLike]) -> list[list[SpanLike]]:
    """Return the spans in as few rows as keep them from overlapping."""
    rows: list[list[SpanLike]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        for number, end in enumerate(ends):
            if end <= span.start + 1e-12:
                rows[number].append(span)
                ends[number] = span.end
                break
        else:
            rows.append([span])
            ends.append(span.end)
    return rows


def short_label(span: SpanLike) -> str:
    """Return 'F3', 'B3' or 'L3' for passes and losses, 'B3 weights' for a part of one, else the kind."""
    if span.kind in ("forward", "backward", "loss"):
        words = span.text.split()
        micro_batch = next((word[1:] for word in words if word.startswith("m") and word[1:].isdigit()), "")
        part = next((f" {word}" for word in words[-1:] if word in PARTS), "")
        return f"{span.kind[0].upper()}{micro_batch}{part}"
    return span.kind


def _by_device(spans: Iterable[SpanLike]) -> dict[str, list[SpanLike]]:
    spans_by_device: dict[str, list[SpanLike]] = defaultdict(list)
    for span in spans:
        spans_by_device[span.device].append(span)
    return spans_by_device


def _process(process: int, name: str, spans: Iterable[SpanLike]) -> list[dict[str, Any]]:
    """Return the events of one device: names, the order of the tracks, and the spans."""
    tracks: dict[str, list[SpanLike]] = {track: [] for track in TRACKS}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    events = [
        _about("process_name", process, 0, name=name),
        _about("process_sort_index", process, 0, sort_index=process),
    ]
    thread = 0
    for track, track_spans in tracks.items():
        for number, lane in enumerate(lanes(track_spans)):
            thread += 1
            events.append(
                _about("thread_name", process, thread, name=track if number == 0 else f"{track} {number + 1}")
            )
            events.append(_about("thread_sort_index", process, thread, sort_index=thread))
            events.extend(_complete(span, process, thread) for span in lane)
    return events


def _about(event: str, process: int, thread: int, **facts: str | int) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": process, "tid": thread, "args": facts}


def _complete(span: SpanLike, process: int, thread: int) -> dict[str, Any]:
    return {
        "name": short_label(span),
        "cat": span.kind,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "pid": process,
        "tid": thread,
        "args": {"action": span.text},
    }

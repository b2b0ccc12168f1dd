"""A timeline as trace.json, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

One process per device, and a track each for computing, sending and receiving. Overlapping transfers on one track would
be drawn wrongly, so each concurrent transfer gets a lane of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

TRACKS = ("compute", "send", "receive")


class SpanLike(Protocol):
    """What a timeline is made of; simulated and measured spans both are."""

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


def trace_events(spans: Iterable[SpanLike], *, title: str = "", simulated: bool = True) -> dict[str, Any]:
    """The trace document. Times become microseconds."""
    by_device: dict[str, dict[str, list[SpanLike]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        by_device[span.device][span.track].append(span)
    events: list[dict[str, Any]] = []
    for process, (device, tracks) in enumerate(by_device.items(), 1):
        events.append(_name("process_name", process, 0, device))
        thread = 0
        for track in TRACKS:
            for number, lane in enumerate(lanes(tracks.get(track, []))):
                thread += 1
                events.append(_name("thread_name", process, thread, track if number == 0 else f"{track} {number + 1}"))
                events.append(
                    {
                        "name": "thread_sort_index",
                        "ph": "M",
                        "pid": process,
                        "tid": thread,
                        "args": {"sort_index": thread},
                    }
                )
                for span in lane:
                    events.append(
                        {
                            "name": short_label(span),
                            "cat": span.kind,
                            "ph": "X",
                            "ts": span.start * 1e6,
                            "dur": (span.end - span.start) * 1e6,
                            "pid": process,
                            "tid": thread,
                            "args": {"action": span.text},
                        }
                    )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, "simulated": simulated}}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def lanes(spans: list[SpanLike]) -> list[list[SpanLike]]:
    """Spans in as few rows as keep them from overlapping."""
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
    """'F3' and 'B3' for passes, else the kind."""
    if span.kind in ("forward", "backward"):
        micro_batch = next((word[1:] for word in span.text.split() if word.startswith("m") and word[1:].isdigit()), "")
        return f"{span.kind[0].upper()}{micro_batch}"
    return span.kind

"""A view of a run as the page gets it: sections that are sent when they change, rows and events as they are added.

    live      state, steps, rates                    round     spans of the last round, measured and predicted
    devices   each with its state and memory         plan      plan.yaml, rewritten at each re-planning
    links     with planned and measured rates        cluster   cluster.yaml
    stages    layers, devices, seconds

A run's folder may hold anything: each section has a size limit, and one that is not JSON is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from manyhands.observe.live import MOST_LINKS, Live, LiveRound, LiveSpan
from manyhands.observe.watching import View

NAMES = ("live", "devices", "links", "stages", "round", "plan", "cluster")
COLUMNS = ("step", "loss", "seconds", "samples_per_second")
MOST_BYTES = 2_000_000
"""The most bytes of one section."""
MOST_SPANS = 4000
"""The most spans of a round, measured and predicted each: the longest are kept."""
MOST_ROWS = 4000
"""The most rows of a first answer: where there are more, the means of several steps are sent."""
MOST_EVENTS = 300
UNTOLD = frozenset({"looked"})
"""Events that are not sent: every few seconds at the link of an edge and a cloud, they would push out those of
interest."""
MOST_EVENT_BYTES = 4000
_NOTHING = b"null"


def sections(view: View) -> dict[str, bytes]:
    """Return each section as JSON."""
    live = msgspec.to_builtins(msgspec.structs.replace(view.live, devices=(), links=(), stages=(), round=None))
    for name in ("devices", "links", "stages", "round", "pid", "dashboard"):
        live.pop(name)  # viewers need not know the process, and know the address
    by_name = {
        "live": {
            **live,
            "is_live": view.is_live,
            "run": view.folder.name,
            "has_busiest_links_only": len(view.live.links) >= MOST_LINKS,
        },
        "devices": view.live.devices,
        "links": view.live.links[:MOST_LINKS],
        "stages": view.live.stages,
        "round": _round(view.live),
        "plan": view.plan,
        "cluster": view.cluster,
    }
    return {name: _encoded(by_name[name], MOST_BYTES) for name in NAMES}


def _encoded(content: Any, most: int) -> bytes:
    try:
        encoded = msgspec.json.encode(content)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return _NOTHING
    return encoded if len(encoded) <= most else _NOTHING


def _round(live: Live) -> Mapping[str, Any] | None:
    """Return spans as short rows: device (its index in `names`), track, start, end, kind, text, stage."""
    live_round: LiveRound | None = live.round
    if live_round is None:
        return None
    names = list(dict.fromkeys(span.device for span in (*live_round.measured, *live_round.predicted)))
    place = {name: index for index, name in enumerate(names)}

    def rows(spans: Iterable[LiveSpan]) -> list[tuple[int, str, float, float, str, str, int]]:
        shown = list(spans)
        if len(shown) > MOST_SPANS:
            shown = sorted(shown, key=lambda span: span.start - span.end)[:MOST_SPANS]
        return [
            (
                place[span.device],
                span.track,
                round(span.start, 7),
                round(span.end, 7),
                span.kind,
                span.text[:80],
                span.stage,
            )
            for span in shown
        ]

    return {
        "step": live_round.step,
        "seconds": live_round.seconds,
        "predicted_seconds": live_round.predicted_seconds,
        "names": names,
        "measured": rows(live_round.measured),
        "predicted": rows(live_round.predicted),
    }


# What grows


def shown_events(events: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the last of the events that are shown, each as JSON."""
    shown = [event for event in events if event["event"] not in UNTOLD]
    return [event_bytes(event) for event in shown[-MOST_EVENTS:]]


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """Return an event as JSON; for one that is too long, only its time and name."""
    encoded = _encoded(event, MOST_EVENT_BYTES)
    if encoded != _NOTHING:
        return encoded
    essentials = {key: str(event.get(key, ""))[:200] for key in ("time", "event")}
    return _encoded(
        {**essentials, "number": event.get("number"), "text": "(too long to be shown here)"}, MOST_EVENT_BYTES
    )


def rows_between(
    metrics: Mapping[str, Sequence[float | None]], first: int, last: int, most: int = MOST_ROWS
) -> dict[str, list[float | None]]:
    """Return columns of the steps [first, last), at most `most` of them: means of several where there are more."""
    columns = {name: list(metrics.get(name, ())[first:last]) for name in COLUMNS}
    count = last - first
    if count <= most:
        return columns
    ends = [count * (place + 1) // most for place in range(most)]
    begins = [0, *ends[:-1]]
    return {
        name: [
            values[end - 1] if name == "step" else _mean(values[begin:end])
            for begin, end in zip(begins, ends, strict=True)
        ]
        for name, values in columns.items()
        if len(values) == count
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None

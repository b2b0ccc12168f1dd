"""A round as an observer sees it: spans on a few tracks, few enough to be sent over a slow link and drawn."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MOST_SPANS = 120
"""The most spans of one device's round: about 5 kB as JSON."""
_TRACKS = ("compute", "send", "receive")
_FIRST_GAP = 1e-4
"""Seconds between two spans of one kind that may be drawn as one, at first."""


class Glimpse(msgspec.Struct, frozen=True, array_like=True):
    """A span of activity; times in seconds of some clock."""

    track: str
    kind: str
    start: float
    end: float
    stage: int = -1
    """The stage; -1: none."""
    label: str = ""
    """"3": micro-batch 3. Empty where several spans became one."""


def thinned(spans: Iterable[Glimpse], most: int = MOST_SPANS) -> tuple[Glimpse, ...]:
    """Return at most so many spans: neighbours of one kind become one, the closest first; then the longest are kept."""
    remaining = sorted(spans, key=lambda span: (span.track, span.start))
    gap = _FIRST_GAP
    length = max((span.end for span in remaining), default=0.0) - min((span.start for span in remaining), default=0.0)
    while len(remaining) > most and gap <= length:
        remaining = _joined(remaining, gap)
        gap *= 4
    if len(remaining) > most:
        remaining = sorted(remaining, key=lambda span: span.start - span.end)[:most]
    return tuple(sorted(remaining, key=lambda span: (_place(span.track), span.start)))


def _place(track: str) -> int:
    return _TRACKS.index(track) if track in _TRACKS else len(_TRACKS)


def _joined(spans: list[Glimpse], gap: float) -> list[Glimpse]:
    """Return the spans, with those of one kind, stage and track that follow each other within the gap as one."""
    joined: list[Glimpse] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.track, last.kind, last.stage) == (span.track, span.kind, span.stage)
            and span.start - last.end <= gap
        ):
            label = last.label if last.label == span.label else ""
            joined[-1] = Glimpse(last.track, last.kind, last.start, max(last.end, span.end), last.stage, label)
        else:
            joined.append(span)
    return joined

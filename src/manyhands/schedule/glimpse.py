"""A round as somebody sees it who looks on: spans on a few tracks, few enough to be sent over a slow link and drawn."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MOST_SPANS = 120
"""Of one device's round: about 5 kB as JSON."""
_TRACKS = ("compute", "send", "receive")
_FIRST_GAP = 1e-4
"""Seconds between two spans of one kind that may be drawn as one, at first."""


class Glimpse(msgspec.Struct, frozen=True, array_like=True):
    """Something that went on; times in seconds of some clock."""

    track: str
    kind: str
    start: float
    end: float
    stage: int = -1
    """-1: of none."""
    label: str = ""
    """'3': micro-batch 3. Empty where several became one."""


def thinned(spans: Iterable[Glimpse], most: int = MOST_SPANS) -> tuple[Glimpse, ...]:
    """At most so many: neighbours of one kind become one, the closest first; of what is left too many, the longest."""
    found = sorted(spans, key=lambda span: (span.track, span.start))
    gap = _FIRST_GAP
    length = max((span.end for span in found), default=0.0) - min((span.start for span in found), default=0.0)
    while len(found) > most and gap <= length:
        found = _joined(found, gap)
        gap *= 4
    if len(found) > most:
        found = sorted(found, key=lambda span: span.start - span.end)[:most]
    return tuple(sorted(found, key=lambda span: (_place(span.track), span.start)))


def _place(track: str) -> int:
    return _TRACKS.index(track) if track in _TRACKS else len(_TRACKS)


def _joined(spans: list[Glimpse], gap: float) -> list[Glimpse]:
    """Those that follow each other within the gap, of one kind, stage and track, as one."""
    found: list[Glimpse] = []
    for span in spans:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.track, last.kind, last.stage) == (span.track, span.kind, span.stage)
            and span.start - last.end <= gap
        ):
            label = last.label if last.label == span.label else ""
            found[-1] = Glimpse(last.track, last.kind, last.start, max(last.end, span.end), last.stage, label)
        else:
            found.append(span)
    return found

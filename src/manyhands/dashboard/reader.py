"""Reads a run's folder while anyone views the page, once for all viewers, and sends each viewer what is new to it."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from manyhands.dashboard.sections import COLUMNS, NAMES, rows_between, sections, shown_events
from manyhands.observe.live import Live
from manyhands.observe.watching import RunWatch, View

LOOK_SECONDS, IDLE_LOOK_SECONDS = 1.0, 3.0
"""Seconds between two looks at a run that goes on, and at one that is over."""
INTEREST_SECONDS = 10.0
"""Nothing is read once no viewer has requested anything for this long."""
FIRST_LOOK_SECONDS = 5.0
_CURSOR = re.compile(r"([0-9a-f]{8})\.(\d{1,15})\.(\d{1,15})\.(\d{1,15})")


@dataclass(frozen=True)
class RunSnapshot:
    """The result of one look. Lists may be longer by now; what they held at the look does not change."""

    story: str
    """Changes where what was sent before is void: another folder, or a file that was begun anew."""
    number: int
    changed: Mapping[str, int] = field(default_factory=dict)
    """Section -> the look at which it last changed."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    rows: int = 0
    events: Sequence[Mapping[str, Any]] = ()
    event_count: int = 0

    @property
    def cursor(self) -> str:
        return f"{self.story}.{self.number}.{self.rows}.{self.event_count}"


class Reader:
    """Follows one folder after another. Any thread may call it."""

    def __init__(self, folder: Path | None) -> None:
        self._changed = threading.Condition()
        self._watch = RunWatch(folder) if folder is not None else None
        self._seen = RunSnapshot(_new_story(), 0)
        self._whole: tuple[RunSnapshot | None, bytes] = (None, b"")
        self._telling = threading.Lock()
        self._looks = 0
        """The number of times the folder was looked at: 0 until the first."""
        self._wanted_until = 0.0
        self._is_closing = False
        self.is_over = False
        """Nothing more will be read."""
        self._thread = threading.Thread(target=self._follow, name="dashboard reader", daemon=True)
        self._thread.start()

    def show(self, folder: Path) -> None:
        """Follow another folder from now on."""
        with self._changed:
            if self._watch is None or self._watch.folder != folder:
                self._watch, self._looks = RunWatch(folder), 0
                self._seen = RunSnapshot(_new_story(), self._seen.number + 1)
                self._changed.notify_all()

    def close(self) -> None:
        """Take one last look, so that viewers learn how the run ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.is_over, FIRST_LOOK_SECONDS)
            self.is_over = True
            self._changed.notify_all()

    # Called by the threads that serve

    def update(self, cursor: str) -> tuple[str, bytes]:
        """Return the cursor after this look, and what is new since `cursor` as JSON."""
        with self._changed:
            self._wanted_until = time.monotonic() + INTEREST_SECONDS
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looks or self._watch is None or self.is_over, FIRST_LOOK_SECONDS)
            snapshot = self._seen
        place = _place(snapshot, cursor)
        return snapshot.cursor, self._all_of(snapshot) if place is None else _answer(snapshot, place)

    def _all_of(self, snapshot: RunSnapshot) -> bytes:
        """Return everything, put together once for all viewers."""
        key, content = self._whole
        if key is not snapshot:
            with self._telling:
                key, content = self._whole
                if key is not snapshot:
                    content = _answer(snapshot, None)
                    self._whole = (snapshot, content)
        return content

    def wait(self, cursor: str, seconds: float) -> bool:
        """Wait until there is something newer than `cursor`; return False if there is not."""
        with self._changed:
            self._wanted_until = time.monotonic() + seconds + INTEREST_SECONDS
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._seen.cursor != cursor or self.is_over, seconds) and (
                self._seen.cursor != cursor
            )

    # The thread that looks

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or (self._watch is not None and self._is_wanted()))
                watch, is_last = self._watch, self._is_closing
                is_wanted = self._is_wanted()
            if watch is not None and is_wanted:
                self._look(watch)
            if is_last:
                with self._changed:
                    self.is_over = True
                    self._changed.notify_all()
                return

    def _is_wanted(self) -> bool:
        return time.monotonic() < self._wanted_until

    def _look(self, watch: RunWatch) -> None:
        try:
            view = watch.look()
            contents = sections(view)
        except Exception as error:  # whatever lies in the folder: viewers see the error, and it is read again
            view = View(watch.folder, Live(state="failed", text=f"The folder cannot be read: {error}"[:300]))
            contents = sections(view)
        with self._changed:
            if self._watch is not watch:
                return
            self._looks += 1
            snapshot = _next(self._seen, view, contents)
            if snapshot is not self._seen:
                self._seen = snapshot
            self._changed.notify_all()
            pause = IDLE_LOOK_SECONDS if view.live.is_over else LOOK_SECONDS
            self._changed.wait_for(lambda: self._is_closing or self._watch is not watch, pause)


def _new_story() -> str:
    return secrets.token_hex(4)


def _next(before: RunSnapshot, view: View, contents: Mapping[str, bytes]) -> RunSnapshot:
    """Return the snapshot after a look; `before` itself where nothing is new."""
    rows = min((len(view.metrics[name]) for name in COLUMNS if name in view.metrics), default=0)
    event_count = len(view.events)
    story = before.story
    if rows < before.rows or event_count < before.event_count:
        story = _new_story()
    changed_names = [name for name in NAMES if before.contents.get(name) != contents[name]]
    if story == before.story and not changed_names and (rows, event_count) == (before.rows, before.event_count):
        return before
    number = before.number + 1
    changed = {**before.changed, **dict.fromkeys(changed_names, number)}
    return RunSnapshot(story, number, changed, contents, dict(view.metrics), rows, view.events, event_count)


def _place(snapshot: RunSnapshot, cursor: str) -> tuple[int, int, int] | None:
    """Return what the holder of this cursor has: up to which look, row and event. None: nothing of this story."""
    match = _CURSOR.fullmatch(cursor)
    if match is None or match.group(1) != snapshot.story:
        return None
    number, rows, events = map(int, match.groups()[1:])
    is_ours = number <= snapshot.number and rows <= snapshot.rows and events <= snapshot.event_count
    return (number, rows, events) if is_ours else None


def _answer(snapshot: RunSnapshot, place: tuple[int, int, int] | None) -> bytes:
    number, rows, events = place or (-1, 0, 0)
    answer: dict[str, Any] = {"cursor": snapshot.cursor, "reset": place is None}
    for name, content in snapshot.contents.items():
        if snapshot.changed[name] > number:
            answer[name] = msgspec.Raw(content)
    answer["metrics"] = rows_between(snapshot.metrics, rows, snapshot.rows)
    answer["events"] = [msgspec.Raw(event) for event in shown_events(snapshot.events[events : snapshot.event_count])]
    return msgspec.json.encode(answer)

"""The live part of the screen while a job runs: a progress bar, and below it a line for each stage or device.

rich draws it anew a few times a second, on a thread of its own; what stands below the bar comes from the run's folder,
which is looked at once a second.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from manyhands.cli.live_rows import (
    busy_of,
    clock,
    data_text,
    layers_text,
    memory_text,
    names_text,
    number,
    percent,
    rate_text,
)
from manyhands.cli.show import plain
from manyhands.observe.watching import RunWatch

if TYPE_CHECKING:
    from manyhands.observe.live import Live

LOOK_SECONDS = 1.0
MOST_LINES = 8
LEAST_WIDTH = 70
"""Narrower windows show less, rather than the same on more lines."""
LAST_STEPS = 20


class Moving:
    """A job's progress, as rich draws it."""

    def __init__(self, activity: str, steps: int, samples: int, *, is_bursty: bool = False) -> None:
        """Set up the progress. `samples` is per step. `is_bursty`: several steps end at once, so that only their mean
        is meaningful."""
        self.what, self.steps, self.samples = activity, max(1, steps), samples
        self.done = 0
        self.loss: float | None = None
        self.is_over = False
        """Whether only the bar remains."""
        self.news: deque[dict[str, Any]] = deque()
        """Events that were written to the folder and are not printed yet."""
        self.live: Live | None = None
        self.ask: Callable[[], Live | None] = lambda: None
        """Returns the present state where there is no folder."""
        self._typical = statistics.fmean if is_bursty else statistics.median
        self._seconds: deque[float] = deque(maxlen=LAST_STEPS * (10 if is_bursty else 1))
        self._watch: RunWatch | None = None
        self._seen_events = -1
        self._looked_at = 0.0

    def follow(self, folder: Path) -> None:
        """Read the run's folder from now on; earlier events are not printed."""
        self._watch = RunWatch(folder, with_metrics=False)
        self._seen_events = len(self._watch.look().events)

    def step(self, seconds: float, loss: float | None = None) -> None:
        self.done += 1
        self.loss = loss
        if seconds > 0:
            self._seconds.append(seconds)

    @property
    def step_seconds(self) -> float | None:
        return self._typical(list(self._seconds)) if self._seconds else None

    @property
    def rate(self) -> str:
        return rate_text(self.samples / self.step_seconds) if self.step_seconds else ""

    @property
    def left(self) -> str:
        return f"{clock(self.step_seconds * (self.steps - self.done))} left" if self.step_seconds else ""

    def look(self) -> None:
        """Read the folder. Whatever is wrong with a file, the job continues."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        with contextlib.suppress(Exception):
            if self._watch is None:
                self.live = self.ask()
                return
            view = self._watch.look()
            self.live = view.live
            self.news.extend(view.events[self._seen_events :])
            self._seen_events = len(view.events)

    # As rich draws it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        self.look()
        width = options.max_width
        yield self._bar(width)
        if not self.is_over and self.live is not None:
            yield from self._lines(self.live, width, max(1, min(MOST_LINES, options.size.height - 4)))

    def _bar(self, width: int) -> Table:
        words = [f"{self.done}/{self.steps}"]
        if self.loss is not None and width >= 40:
            words.append(f"loss {number(self.loss)}")
        if width >= LEAST_WIDTH:
            words.append(self.rate)
        if width >= LEAST_WIDTH and self.live is not None and (waits := data_text(self.live)):
            words.append(waits)
        if width >= 30:
            words.append(self.left)
        bar = Table.grid(padding=(0, 1), expand=True)
        cells: list[RenderableType] = []
        if width >= LEAST_WIDTH:
            bar.add_column(no_wrap=True)
            cells.append(Text(self.what))
        bar.add_column(ratio=1)
        cells.append(ProgressBar(total=self.steps, completed=self.done))
        for word in words:
            bar.add_column(no_wrap=True, justify="right")
            cells.append(Text(word))
        bar.add_row(*cells)
        return bar

    def _lines(self, live: Live, width: int, most: int) -> Iterator[RenderableType]:
        is_wide = width >= LEAST_WIDTH
        by_stage = len(live.stages) > 1 or not live.devices
        rows = _stage_rows(live, is_wide) if by_stage else _device_rows(live, is_wide)
        if not rows:
            return
        grid = Table.grid(padding=(0, 2))
        for _ in rows[0]:
            grid.add_column(no_wrap=True, overflow="ellipsis")
        shown = rows if len(rows) <= most else rows[: most - 1]
        for row in shown:
            grid.add_row(*row)
        yield grid
        if len(rows) > len(shown):
            yield Text(f"  ... and {len(rows) - len(shown)} more: manyhands top", no_wrap=True, overflow="ellipsis")


def _busy(part: float | None, is_wide: bool) -> list[RenderableType]:
    if part is None:
        return ["", ""] if is_wide else [""]
    text = Text(f"{percent(part)} busy")
    return [ProgressBar(total=1.0, completed=min(max(part, 0.0), 1.0), width=10), text] if is_wide else [text]


def _stage_rows(live: Live, is_wide: bool) -> list[list[RenderableType]]:
    """Return a row per stage with its rate: what it could do if it never waited; the others wait for the slowest."""
    rows: list[list[RenderableType]] = []
    for stage in live.stages:
        row: list[RenderableType] = [Text(f"  stage {stage.number}")]
        if is_wide:
            row.append(Text(f"layers {layers_text(stage)}"))
        devices = names_text(tuple(plain(name) for name in stage.devices))
        row += [Text(devices), Text(rate_text(stage.samples_per_second), justify="right")]
        rows.append(row + _busy(busy_of(live, stage), is_wide))
    return rows


def _device_rows(live: Live, is_wide: bool) -> list[list[RenderableType]]:
    rows: list[list[RenderableType]] = []
    for device in live.devices:
        row: list[RenderableType] = [Text(f"  {plain(device.name)}"), *_busy(device.busy, is_wide)]
        is_here = device.state == "here"
        note = f"memory {memory_text(device)}" if is_here and memory_text(device) else "" if is_here else device.state
        rows.append([*row, Text(note)])
    return rows

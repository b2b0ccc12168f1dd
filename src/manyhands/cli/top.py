"""`manyhands top`: a running job, once a second, until q or Ctrl-C; the run is not affected."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from manyhands.cli import live_rows as rows
from manyhands.cli.options import Run
from manyhands.cli.show import plain
from manyhands.cli.status import run_named

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from manyhands.observe.watching import View

LOOK_SECONDS = 1.0
WIDTH_WITHOUT_TERMINAL = 140
LEAST_HEIGHT = 12
MOST_EVENTS = 8
LEFT_OUT = {
    96: ("process", "shared by", "of messages"),
    72: ("out", "in", "layers", "predicted", "planned with", "delay"),
    48: ("memory", "a round computes", "sent"),
}
"""Window width -> columns of tables that narrower windows do not show."""
_KEYS_TO_LEAVE = ("q", "Q", "\x03", "")


def top(run: Run = "") -> None:
    """Show a running job: devices, links, stages, events. q or Ctrl-C leaves; the run is not affected."""
    from rich.console import Console
    from rich.live import Live

    from manyhands.observe.watching import RunWatch

    watch, flows = RunWatch(run_named(run)), rows.Flows()
    if not sys.stdout.isatty():
        view = watch.look()
        flows.look(view.live)
        if view.is_live:  # rates need two looks
            time.sleep(1.5 * LOOK_SECONDS)
            view = watch.look()
            flows.look(view.live)
        Console(width=WIDTH_WITHOUT_TERMINAL).print(Screen(view, flows, is_whole=True))
        return
    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            view = watch.look()
            flows.look(view.live)
            live.update(Screen(view, flows), refresh=True)
            if pressed(LOOK_SECONDS) in _KEYS_TO_LEAVE:
                return


class _Pressed:
    """Waits for a key, or for some seconds."""

    def __call__(self, seconds: float) -> str | None:
        """Return the key; None: none was pressed; empty: standard input is closed."""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return None
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace")


@contextlib.contextmanager
def _keys() -> Iterator[_Pressed | _Asleep]:
    """Yield a reader of single keys, not echoed, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield _Asleep()
        return
    try:
        import termios
        import tty
    except ImportError:  # no such terminals here: Ctrl-C leaves
        yield _Asleep()
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _Pressed()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _Asleep:
    """Waits without reading keys."""

    def __call__(self, seconds: float) -> None:
        time.sleep(seconds)


class Screen:
    """The whole screen, cut to its height: devices first, then stages, events, links."""

    def __init__(self, view: View, flows: rows.Flows, *, is_whole: bool = False) -> None:
        self.view, self.flows, self.is_whole = view, flows, is_whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        view, live = self.view, self.view.live
        width = options.max_width
        lines_left = 10_000 if self.is_whole else max(LEAST_HEIGHT, options.size.height) - 1

        def line(text: str, style: str = "") -> Text:
            nonlocal lines_left
            lines_left -= 1
            return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")

        yield line(f"{live.model} in {view.folder}: {rows.state_text(view)}", "bold")
        yield line(rows.step_text(live))
        if live.steps:
            lines_left -= 1
            bar = Table.grid()
            bar.add_row(ProgressBar(total=live.steps, completed=live.step, width=width))
            yield bar
        if live.dashboard and view.is_live:
            yield line(f"Dashboard: {live.dashboard}")
        events = [event for event in view.events if rows.event_text(event)]
        wanted_below = min(len(events), MOST_EVENTS) + 2
        devices = [rows.device_row(device, self.flows) for device in live.devices]
        stages = [rows.stage_row(stage) for stage in live.stages]
        busiest = sorted(
            live.links, key=lambda link: (-self.flows.between.get((link.source, link.target), 0.0), -link.sent_bytes)
        )
        links = [rows.link_row(link, self.flows) for link in busiest]
        skipped = [heading for least, some in LEFT_OUT.items() if width < least for heading in some]
        for title, headings, content, numbers, below in (
            ("devices", rows.DEVICE_HEADINGS, devices, rows.DEVICE_NUMBERS, wanted_below + min(len(stages), 4) + 2),
            ("stages", rows.STAGE_HEADINGS, stages, rows.STAGE_NUMBERS, wanted_below),
            ("links", rows.LINK_HEADINGS, links, rows.LINK_NUMBERS, wanted_below),
        ):  # fmt: skip
            room = lines_left - 3 - below
            if not content or room < 1:
                continue
            shown = content if len(content) <= room else content[: max(1, room - 1)]
            lines_left -= 3 + len(shown)
            yield Text("")
            yield _table(headings, shown, numbers, skipped)
            if len(shown) < len(content):
                yield line(f"... and {len(content) - len(shown)} more {title}", "dim")
        if events and lines_left > 2:
            yield line("")
            for event in events[-min(MOST_EVENTS, lines_left - 1) :]:
                yield line(f"{rows.event_time(event)}  {rows.event_text(event)}")


def _table(
    headings: Sequence[str], content: Sequence[Sequence[str]], numbers: Sequence[str], skipped: Sequence[str]
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    places = [place for place, heading in enumerate(headings) if heading not in skipped]
    for place in places:
        side = "right" if headings[place] in numbers else "left"
        table.add_column(headings[place], justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in content:
        style = "red" if any(cell.startswith("lost") for cell in row[:2]) else ""
        table.add_row(*(Text(plain(row[place])) for place in places), style=style)
    return table

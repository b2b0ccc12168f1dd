"""Shows a job to the user: a spinner, the plan, a bar, the outcome. Without a terminal, plain lines.

It handles Ctrl-C and SIGTERM while it is shown: see job/stopping.py.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from manyhands.cli.live_rows import event_text, event_time, number, rate_text
from manyhands.cli.show import plain
from manyhands.job.stopping import Stopping, leave_at_once

if TYPE_CHECKING:
    from manyhands.cli.moving import Moving
    from manyhands.explaining.planned_run import PlannedRun
    from manyhands.job.result import TrainResult

PLAIN_LINES = 10
"""Number of progress lines of a job without a terminal."""
CHECKPOINT_SECONDS = 30.0
"""Shortest time between two checkpoints that are reported."""


class Show:
    """Shows the progress of one job. `command`: the command that the user typed."""

    what = "training"
    is_bursty = False

    def __init__(self, command: str, *, quiet: bool) -> None:
        self.command, self.quiet = command, quiet
        self._live: Any = None
        """A spinner until the plan is known, then the bar."""
        self._moving: Moving | None = None
        self._steps = self._done = self._batch = 0
        self._ending = contextlib.ExitStack()
        self.has_terminal = False
        self._told_at = -CHECKPOINT_SECONDS

    def __enter__(self) -> Self:
        self._ending.enter_context(Stopping(leave_at_once))
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True)
            if not console.is_dumb_terminal:
                self.has_terminal = True
                self._live = console.status("getting ready")
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if isinstance(error, KeyboardInterrupt) and str(error):
            self.say(str(error))
        self._ending.close()

    def stop(self) -> None:
        """End the live display."""
        live, self._live = self._live, None
        if self._moving is not None:
            self._moving.is_over = True
        if live is not None:
            live.stop()

    def say(self, text: str) -> None:
        """Print a line on standard error, above the live display."""
        text = plain(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            typer.echo(text, err=True)

    def planned(self, planned: PlannedRun) -> None:
        """Print the plan as a table, then show the bar."""
        self._steps, self._batch = planned.steps, planned.plan.step_size
        if self.quiet:
            return
        from manyhands.cli.tables import print_plan

        self.stop()
        print_plan(planned.plan, planned.network, planned.cluster, planned.prediction)
        if note := self.note(planned):
            typer.echo(note)
        typer.echo(f"Run folder: {planned.folder}")
        sys.stdout.flush()
        self.begin(planned.steps, planned.plan.step_size, planned.folder)

    def note(self, planned: PlannedRun) -> str:
        """Return a note to print after a plan's table; empty: none."""
        return ""

    def begin(self, steps: int, samples: int, folder: Path | None = None) -> None:
        """Start to count steps; on a terminal, show them with a bar."""
        from manyhands.cli.moving import Moving

        self._steps = steps
        self._moving = Moving(self.what, steps, samples, is_bursty=self.is_bursty)
        if not self.has_terminal:
            return
        if folder is not None:
            self._moving.follow(folder)
        from rich.console import Console
        from rich.live import Live

        self._live = Live(self._moving, console=Console(stderr=True), refresh_per_second=4)
        self._live.start()

    def step(self, step: int, loss: float, seconds: float) -> None:
        self.advance(seconds, loss)

    def advance(self, seconds: float, loss: float | None = None) -> None:
        self._done += 1
        if self.quiet or self._moving is None:
            return
        self._moving.step(seconds, loss)
        if self._live is not None:
            self._say_news(self._moving)
        elif self._is_due() and (text := self.line(self._moving, seconds)):
            self.say(text)

    def _is_due(self) -> bool:
        """Return whether it is time to print a plain line."""
        step, steps = self._done, self._steps
        return step == steps or step * PLAIN_LINES // steps > (step - 1) * PLAIN_LINES // steps

    def _say_news(self, moving: Moving) -> None:
        """Report checkpoints, but only now and then: quick runs write one every second."""
        now = time.monotonic()
        while moving.news:
            event = moving.news.popleft()
            if event["event"] == "checkpoint" and event.get("step") and now - self._told_at >= CHECKPOINT_SECONDS:
                self._told_at = now
                self.say(f"{event_time(event)} {event_text(event)}")

    def line(self, moving: Moving, seconds: float) -> str:
        """Return the progress in one line; empty if it is not worth a line."""
        parts = [f"step {self._done} of {self._steps}"]
        if moving.loss is not None:
            parts.append(f"loss {number(moving.loss)}")
        if seconds:
            parts.append(rate_text(self._batch / seconds))
        if moving.left and self._done < self._steps:
            parts.append(moving.left)
        return ", ".join(parts)


def print_outcome(result: TrainResult) -> None:
    """Print the losses, and the accuracy or loss on held-out data."""
    first = len(result.losses) - result.steps
    typer.echo(f"{result.steps} steps, loss {number(result.losses[first])} -> {number(result.losses[-1])}")
    if result.test is not None and result.accuracy is not None:
        typer.echo(f"Accuracy on {result.test.samples} held-out samples: {result.accuracy:.1%}")
    elif result.test is not None and result.test.loss is not None:
        typer.echo(f"Loss on {result.test.samples} held-out samples: {result.test.loss:.4f}")

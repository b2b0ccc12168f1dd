"""What a person sees of a run: a spinner, the plan, a bar, the outcome. Without a terminal, plain lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

if TYPE_CHECKING:
    from manyhands.api.job import Planned, TrainResult

PLAIN_LINES = 10
"""How often progress is said where there is no terminal."""


class Show:
    """Follows one job. `command`: how it is typed, to go on with it."""

    def __init__(self, command: str, *, quiet: bool) -> None:
        self.command, self.quiet = command, quiet
        self._live: Any = None
        """A spinner until the plan is known, then the bar."""
        self._task: Any = None
        self._steps = self._done = self._batch = 0
        self._folder = Path()

    def __enter__(self) -> Self:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console

            self._live = Console(stderr=True).status("getting ready")
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop()
        if kind is KeyboardInterrupt and self._done:
            self.say(f"Go on with: {self.command} --resume {self._folder}")

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def say(self, text: str) -> None:
        """One line on standard error, above whatever moves there."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            typer.echo(text, err=True)

    def planned(self, planned: Planned) -> None:
        """The plan as a table, then the bar."""
        self._folder = planned.folder
        if self.quiet:
            return
        from manyhands.cli.tables import print_plan

        had_terminal = self._live is not None
        self._stop()
        print_plan(planned.plan, planned.network, planned.cluster, planned.prediction)
        if note := self.note(planned):
            typer.echo(note)
        typer.echo(f"Run folder: {planned.folder}")
        sys.stdout.flush()
        self._steps, self._batch = planned.steps, planned.plan.step_size
        if had_terminal:
            self._start_bar()

    def note(self, planned: Planned) -> str:
        """What is to be said of a plan beside its table."""
        return ""

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self._live = Progress(*columns, console=Console(stderr=True))
        self._task = self._live.add_task("training", total=self._steps, loss="-", rate="")
        self._live.start()

    def step(self, step: int, loss: float, seconds: float) -> None:
        self._done += 1
        if self.quiet:
            return
        rate = f"{self._batch / seconds:,.0f} samples/s" if seconds else ""
        if self._live is not None:
            self._live.update(self._task, advance=1, loss=number(loss), rate=rate)
        elif self._done == self._steps or self._done * PLAIN_LINES // self._steps > (
            (self._done - 1) * PLAIN_LINES // self._steps
        ):
            self.say(f"step {self._done} of {self._steps}, loss {number(loss)}, {rate}")


def number(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.3e}"


def print_outcome(result: TrainResult) -> None:
    """Losses, and what held-out data say."""
    first = len(result.losses) - result.steps
    typer.echo(f"{result.steps} steps, loss {number(result.losses[first])} -> {number(result.losses[-1])}")
    if result.test is not None and result.accuracy is not None:
        typer.echo(f"Accuracy on {result.test.samples} held-out samples: {result.accuracy:.1%}")
    elif result.test is not None and result.test.loss is not None:
        typer.echo(f"Loss on {result.test.samples} held-out samples: {result.test.loss:.4f}")

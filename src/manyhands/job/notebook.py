"""Shows a job in a notebook: progress in the cell's output, and a link to the run's page.

Nothing here needs IPython to be installed: in a kernel it is there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manyhands.dashboard.server import Dashboard, near_usual_port
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.summary import as_table
from manyhands.facts.units import format_seconds
from manyhands.job.config_sections import WorkloadConfig

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun

UPDATE_SECONDS = 0.25
"""Seconds between two updates of a cell's output."""
MOST_LINES = 6
_Config = TypeVar("_Config", bound=WorkloadConfig)
_server: Dashboard | None = None
"""The page of this process's newest run: one server for all cells, whose link works after the run, too."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # absent: nobody could show anything
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def shown_in_notebook(config: _Config) -> _Config:
    """Return the configuration of a job that, in a notebook, shows its progress in the cell. What the caller says is to
    be called is called, too; a `say` of the caller's is in place of lines in the cell."""
    if config.is_command or not in_notebook():
        return config
    progress = NotebookProgress()
    return replace(
        config, say=config.say or progress.say, on_opened=config.on_opened or progress.opened,
        on_planned=_both(progress.planned, config.on_planned), on_step=_both(progress.stepped, config.on_step),
    )  # fmt: skip


def _both(first: Callable[..., None], second: Callable[..., Any] | None) -> Callable[..., None]:
    def called(*facts: Any) -> None:
        first(*facts)
        if second is not None:
            second(*facts)

    return called


class NotebookProgress:
    """A table in a cell's output that follows a job."""

    def __init__(self) -> None:
        from IPython.display import display  # in a kernel it is there

        self._facts: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._last_step = 0
        self._url = ""
        self._updated_at = 0.0
        self._seconds: deque[float] = deque(maxlen=20)
        self._handle = display(self, display_id=True)

    def _repr_html_(self) -> str:
        link = f"<a href='{escape(self._url)}' target='_blank'>{escape(self._url)}</a><br>" if self._url else ""
        lines = "<br>".join(escape(line) for line in self._lines)
        return f"{as_table('manyhands', self._facts)}{link}{lines}"

    def __repr__(self) -> str:
        return ", ".join(f"{label} {value}" for label, value in self._facts.items()) or "manyhands"

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._update()

    def opened(self, folder: Path) -> str | None:
        """Show the run's folder and page; return the page's address."""
        global _server
        self._facts["folder"] = str(folder)
        with contextlib.suppress(ManyhandsError):  # the run does not need it
            _server = _server or near_usual_port(folder)
            _server.show(folder)
            self._url = _server.url
        self._update()
        return self._url or None

    def planned(self, planned: PlannedRun) -> None:
        self._last_step = planned.steps
        self._facts["plan"] = planned.summary()["plan"]
        self._facts["predicted"] = f"{format_seconds(planned.step_seconds)} a step"
        self._update()

    def stepped(self, step: int, loss: float, seconds: float) -> None:
        self._seconds.append(seconds)
        usual = sum(self._seconds) / len(self._seconds)
        self._facts["step"] = f"{step + 1:,}" + (f" of {self._last_step:,}" if self._last_step else "")
        self._facts["loss"] = f"{loss:.4g}"
        self._facts["a step takes"] = format_seconds(usual)
        is_last = step + 1 == self._last_step
        if is_last or time.monotonic() - self._updated_at > UPDATE_SECONDS:
            self._update()

    def _update(self) -> None:
        self._updated_at = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

"""What a caller may be told of a job while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun

Say = Callable[[str], None]
"""Is called with every line that a person should read."""
OnStep = Callable[[int, float, float], None]
"""Is called after every step with its number, loss and seconds."""
OnPlanned = Callable[["PlannedRun"], None]
"""Is called with the plan before the first step."""
OnOpened = Callable[[Path], str | None]
"""Is called with the run's folder before anything happens; returns where the run is shown, if it is."""

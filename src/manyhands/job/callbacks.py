"""The callbacks by which a caller follows a job while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun

Say = Callable[[str], None]
"""Called with every line that a person should read."""
OnStep = Callable[[int, float, float], None]
"""Called after every step with its number, loss and seconds."""
OnPlanned = Callable[["PlannedRun"], None]
"""Called with the plan before the first step."""
OnOpened = Callable[[Path], str | None]
"""Called with the run's folder before anything else happens; returns the address that shows the run, if any."""

"""The parts that all pictures share: a figure without pyplot, so that a user's own backend and figures are not
affected."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.extras import is_here, load
from manyhands.files.documents import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DEVICES = 40
NO_PLOTS = "No pictures were drawn: they need matplotlib. Type: pip install 'manyhands[plots]'"
_LONGEST_NAME = 28
_LONGEST_LINE = 105
_DOTS_PER_INCH = 120


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that is drawn by Agg, into memory."""
    need_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def are_plots_here() -> bool:
    """Return whether pictures can be drawn: matplotlib is an extra."""
    return is_here("plots")


def need_plots() -> None:
    """Raise if matplotlib is missing: called before drawing, and before any long computation for a picture."""
    load("matplotlib", "Drawing a picture")


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    write_bytes_atomic(path, buffer.getvalue())
    return path


def wrapped(title: str) -> str:
    """Return a title in lines that fit the figure."""
    return "\n".join(textwrap.fill(line, _LONGEST_LINE) for line in title.splitlines())


def short_name(name: str) -> str:
    """Return a device's name, shortened to leave room for the picture; its ends distinguish devices."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half + 1 :]}"


def first_devices(title: str, devices: int) -> str:
    """Return the title, with the number of devices drawn if that is not all of them."""
    return title + (f" (first {MOST_DEVICES} of {devices} devices)" if devices > MOST_DEVICES else "")

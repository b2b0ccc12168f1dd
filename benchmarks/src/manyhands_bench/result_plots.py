"""Pictures of the results page: papers beside ours, aims and how far they were reached, recorded links, links of
inference."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.observe.figures import new_figure, wrapped, write_figure
from manyhands_bench.axes import finish_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

PAPER_COLOUR = "#999999"
MEASURED_COLOURS = ("#1F5FA8", "#12866B", "#8A4FB0")
SIMULATED_COLOURS = ("#F2A541", "#E0704C", "#C44E6B")
OTHER_COLOURS = (PAPER_COLOUR, "#C9C2B0", "#6E6E6E")
"""The colours of papers' figures and of baselines."""
_ROW_INCHES = 0.42
_LONGEST = 52
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)
LEAST_PART, MOST_PART = 0.1, 10.0
"""The limits within which parts of aims are drawn."""


@dataclass(frozen=True)
class Beside:
    """A paper's figure and ours, machine by machine."""

    text: str
    paper: float
    ours: Mapping[str, float]
    is_simulated: bool


@dataclass(frozen=True)
class AimReached:
    """The part of an aim that was reached on each machine: 1 is the aim, more is better."""

    text: str
    parts: Mapping[str, float]
    is_simulated: bool


@dataclass(frozen=True)
class LinePlot:
    """Values over named places, line by line. A line whose name begins with "ours" is drawn as ours."""

    title: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]
    up: str
    is_simulated: bool = False


def draw_beside(rows: Sequence[Beside], path: Path, title: str) -> Path:
    """Draw a paper's bar and ours beside each other, on a logarithmic scale: it is the ratio that matters."""
    machines = list(dict.fromkeys(name for row in rows for name in row.ours))
    figure = new_figure(10.5, 1.6 + _ROW_INCHES * len(rows) * (1 + 0.5 * len(machines)))
    axes = figure.subplots()
    height = 0.8 / (1 + len(machines))
    for place, row in enumerate(rows):
        _bar(axes, place - 0.4 + height / 2, row.paper, height, PAPER_COLOUR)
        for number, name in enumerate(machines, 1):
            if name in row.ours:
                colours = SIMULATED_COLOURS if row.is_simulated else MEASURED_COLOURS
                colour = colours[(number - 1) % len(colours)]
                _bar(axes, place - 0.4 + height * (number + 0.5), row.ours[name], height, colour)
    axes.axvline(1.0, color="black", linewidth=0.8)
    _scale(axes, max(max(row.paper, *row.ours.values()) for row in rows))
    axes.set_yticks(range(len(rows)), [_lines(row.text) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("times")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.legend(handles=_keys(rows, machines), fontsize=8, loc="lower right")
    return write_figure(figure, path)


def draw_reached(rows: Sequence[AimReached], path: Path, title: str) -> Path:
    """Draw a dot for each machine; the aim is met to the right of the line."""
    machines = list(dict.fromkeys(name for row in rows for name in row.parts))
    figure = new_figure(10.5, 1.6 + 0.26 * len(rows))
    axes = figure.subplots()
    for number, name in enumerate(machines):
        for is_simulated, colours, marker in ((False, MEASURED_COLOURS, "o"), (True, SIMULATED_COLOURS, "D")):
            bars = [
                (row.parts[name], place)
                for place, row in enumerate(rows)
                if row.is_simulated == is_simulated and name in row.parts
            ]
            if bars:
                label = f"{name}, {'simulated' if is_simulated else 'measured'}"
                axes.plot(*zip(*bars), marker, color=colours[number % len(colours)], label=label, markersize=6)
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_xlim(LEAST_PART / 1.2, MOST_PART * 1.2)
    axes.axvspan(LEAST_PART / 1.2, 1.0, color="#C44E6B", alpha=0.07)
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [row.text for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    across = f"part of the aim that was reached, drawn between {LEAST_PART:g} and {MOST_PART:g}; shaded: missed"
    finish_axes(axes, across, "", title)
    axes.legend(fontsize=8, loc="upper left")
    return write_figure(figure, path)


def draw_groups(panels: Sequence[LinePlot], path: Path) -> Path:
    """Draw bars side by side at every place, and the panels below each other."""
    figure = new_figure(max(10.0, 0.9 * max(len(panel.places) for panel in panels) + 2), 0.6 + 3.6 * len(panels))
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels):
        _draw_panel(axes, panel)
    return write_figure(figure, path)


def _draw_panel(axes: Axes, panel: LinePlot) -> None:
    width = 0.8 / len(panel.lines)
    our_colours, others = iter(SIMULATED_COLOURS if panel.is_simulated else MEASURED_COLOURS), iter(OTHER_COLOURS)
    for number, (name, values) in enumerate(panel.lines.items()):
        places = [place - 0.4 + width * (number + 0.5) for place, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        axes.bar(places, heights, width, color=next(our_colours if name.startswith("ours") else others), label=name)
    axes.set_xticks(range(len(panel.places)), [wrapped(place) for place in panel.places], fontsize=8)
    axes.set_ylim(0, 1.22 * max(value for values in panel.lines.values() for value in values if value is not None))
    finish_axes(axes, "", panel.up, panel.title)
    axes.legend(fontsize=8, loc="upper center", ncols=len(panel.lines))


def _bar(axes: Axes, place: float, value: float, height: float, colour: str) -> None:
    axes.barh(place, value - 1, height, left=1.0, color=colour)
    text = f"{value:.3g}"
    axes.annotate(text, (value, place), xytext=(3 if value >= 1 else -3, 0), textcoords="offset points",
                  va="center", ha="left" if value >= 1 else "right", fontsize=7)  # fmt: skip


def _keys(rows: Sequence[Beside], machines: Sequence[str]) -> list[Patch]:
    """Return the legend of the colours that occur."""
    from matplotlib.patches import Patch

    keys = [Patch(color=PAPER_COLOUR, label="the paper's, on its devices")]
    for number, name in enumerate(machines):
        for is_simulated, origin, colours in (
            (False, "measured", MEASURED_COLOURS),
            (True, "simulated", SIMULATED_COLOURS),
        ):
            if any(name in row.ours and row.is_simulated == is_simulated for row in rows):
                keys.append(Patch(color=colours[number % len(colours)], label=f"ours, {origin}, {name}"))
    return keys


def _scale(axes: Axes, most: float) -> None:
    """Set a logarithmic scale with plain numbers at its ticks."""
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= 2 * most]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.12)


def _lines(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LONGEST))

"""Pictures of the results page: papers beside ours, aims and what was got, recorded links, links of inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.observe.figures import finish_axes, new_figure, wrapped, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_COLOUR = "#999999"
MEASURED_COLOURS = ("#1F5FA8", "#12866B", "#8A4FB0")
SIMULATED_COLOURS = ("#F2A541", "#E0704C", "#C44E6B")
_ROW_INCHES = 0.42
_LONGEST = 62


@dataclass(frozen=True)
class Beside:
    """A paper's figure and ours, machine by machine."""

    text: str
    paper: float
    ours: Mapping[str, float]
    is_simulated: bool


@dataclass(frozen=True)
class Reached:
    """How far an aim was reached on each machine: 1 is the aim, more is better."""

    text: str
    parts: Mapping[str, float]
    is_simulated: bool


@dataclass(frozen=True)
class Lines:
    """Values over places that have names, line by line."""

    title: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]
    up: str
    is_log: bool = False


def draw_beside(rows: Sequence[Beside], path: Path, title: str) -> Path:
    """Bars in pairs, on a scale of powers: what matters is the ratio."""
    machines = list(dict.fromkeys(name for row in rows for name in row.ours))
    figure = new_figure(10.5, 1.6 + _ROW_INCHES * len(rows) * (1 + 0.5 * len(machines)))
    axes = figure.subplots()
    height = 0.8 / (1 + len(machines))
    for place, row in enumerate(rows):
        _bar(axes, place - 0.4 + height / 2, row.paper, height, PAPER_COLOUR, "the paper's" if place == 0 else "")
        for number, name in enumerate(machines, 1):
            if name in row.ours:
                colours = SIMULATED_COLOURS if row.is_simulated else MEASURED_COLOURS
                colour = colours[(number - 1) % len(colours)]
                _bar(axes, place - 0.4 + height * (number + 0.5), row.ours[name], height, colour, "")
    _legend_of_machines(axes, machines)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [_short(row.text) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    finish_axes(axes, "times, powers of ten", "", title)
    return write_figure(figure, path)


def draw_reached(rows: Sequence[Reached], path: Path, title: str) -> Path:
    """A dot for each machine; right of the line the aim is met."""
    machines = list(dict.fromkeys(name for row in rows for name in row.parts))
    figure = new_figure(10.5, 1.6 + 0.26 * len(rows))
    axes = figure.subplots()
    for number, name in enumerate(machines):
        for is_simulated, colours, marker in ((False, MEASURED_COLOURS, "o"), (True, SIMULATED_COLOURS, "D")):
            own = [
                (row.parts[name], place)
                for place, row in enumerate(rows)
                if row.is_simulated == is_simulated and name in row.parts
            ]
            if own:
                label = f"{name}, {'simulated' if is_simulated else 'measured'}"
                axes.plot(*zip(*own), marker, color=colours[number % len(colours)], label=label, markersize=6)
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yticks(range(len(rows)), [_short(row.text) for row in rows], fontsize=8)
    axes.invert_yaxis()
    finish_axes(axes, "part of the aim that was reached; right of 1: met", "", title)
    return write_figure(figure, path)


def draw_groups(found: Lines, path: Path) -> Path:
    """Bars side by side at every place."""
    figure = new_figure(max(8.0, 1.1 * len(found.places) + 2), 4.4)
    axes = figure.subplots()
    width = 0.8 / len(found.lines)
    colours = (*MEASURED_COLOURS[:2], *SIMULATED_COLOURS, PAPER_COLOUR)
    for number, (name, values) in enumerate(found.lines.items()):
        places = [place - 0.4 + width * (number + 0.5) for place, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        colour = PAPER_COLOUR if name.startswith("the paper") else colours[number % len(colours)]
        axes.bar(places, heights, width, color=colour, label=name)
    axes.set_xticks(range(len(found.places)), [wrapped(place) for place in found.places], fontsize=8)
    if found.is_log:
        axes.set_yscale("log")
    finish_axes(axes, "", found.up, found.title)
    return write_figure(figure, path)


def _bar(axes: Axes, place: float, value: float, height: float, colour: str, label: str) -> None:
    axes.barh(place, value - 1, height, left=1.0, color=colour, label=label or None)
    text = f"{value:.3g}"
    axes.annotate(text, (value, place), xytext=(3 if value >= 1 else -3, 0), textcoords="offset points",
                  va="center", ha="left" if value >= 1 else "right", fontsize=7)  # fmt: skip


def _legend_of_machines(axes: Axes, machines: Sequence[str]) -> None:
    for number, name in enumerate(machines):
        for what, colours in (("measured", MEASURED_COLOURS), ("simulated", SIMULATED_COLOURS)):
            axes.barh([], [], color=colours[number % len(colours)], label=f"{what}, {name}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1].rstrip() + "…"

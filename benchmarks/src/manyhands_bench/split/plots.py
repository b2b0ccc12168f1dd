"""Pictures of the split paper's studies (SPLIT Fig. 4, 6-8, 16, 18), drawn from numbers of our own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.observe.figures import new_figure, write_figure
from manyhands_bench.axes import finish_axes

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2", "#9D755D", "#72B7B2")
MOST_POINTS = 200
_THINNED_SECONDS = 0.5
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Course:
    """A run over a changing link; all moments are seconds after the link began to change."""

    up: Line
    """(moment, Mbit/s from the edge from then on)."""
    down: Line
    """(moment, Mbit/s to the edge from then on)."""
    cuts: Sequence[tuple[float, int]]
    """(moment, cut): from then on, the layers before the cut were at the edge."""
    speeds: Line
    """(moment, samples per second from then on)."""
    end: float
    layers: int


def _thinned(line: Line) -> Line:
    """Return means over half seconds if the line has more points than a picture can show."""
    if len(line) <= MOST_POINTS:
        return line
    parts: dict[float, list[float]] = {}
    for moment, value in line:
        parts.setdefault(math.floor(moment / _THINNED_SECONDS) * _THINNED_SECONDS, []).append(value)
    return [(moment, statistics.fmean(values)) for moment, values in parts.items()]


def _held(line: Line, end: float) -> tuple[list[float], list[float]]:
    """Return moments and values for drawing in steps: each value holds until the next moment, the last until `end`."""
    return [*(moment for moment, _ in line), end], [*(value for _, value in line), line[-1][1]]


def draw_course(course: Course, path: Path, title: str) -> Path:
    """Draw Fig. 18: the link's rates above the cut of the network, and the speed below."""
    figure = new_figure(9, 6)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1.4))
    cuts = [(moment, float(cut)) for moment, cut in course.cuts]
    lines: list[tuple[dict[str, Line], str]] = [
        ({"up": course.up, "down": course.down}, "Mbit/s"),
        ({"cut": cuts}, "layers at the edge"),
        ({"speed": course.speeds}, "samples/s"),
    ]
    for axes, (curves, up) in zip(panels, lines):
        for place, (name, line) in enumerate(curves.items()):
            moments, values = _held(_thinned(line), course.end)
            axes.step(moments, values, where="post", color=_COLOURS[place], linewidth=1.4, label=name)
        for moment, _ in course.cuts[1:]:
            axes.axvline(moment, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=0)
        finish_axes(axes, "seconds" if axes is panels[-1] else "", up, title if axes is panels[0] else "")
    panels[1].set_ylim(0, course.layers)
    return write_figure(figure, path)


def draw_lines(
    lines: Mapping[str, Line], path: Path, *, across: str, up: str, title: str, is_logarithmic: bool = False
) -> Path:
    """Draw a line for each name; both axes are logarithmic, or neither."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    for place, (name, line) in enumerate(lines.items()):
        axes.plot(*zip(*line), marker="o", markersize=4, color=_COLOURS[place % len(_COLOURS)], label=name)
    if is_logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    finish_axes(axes, across, up, title)
    return write_figure(figure, path)


@dataclass(frozen=True)
class Study:
    """Accuracy against one variable: the names of its values, and for each line the accuracies there."""

    across: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float]]


def draw_studies(studies: Sequence[Study], reference: float, path: Path, title: str) -> Path:
    """Draw Fig. 6-8 beside each other, on one scale, with plain training as a line."""
    figure = new_figure(4.2 * len(studies), 4.2)
    panels = figure.subplots(1, len(studies), sharey=True, squeeze=False)[0]
    for axes, study in zip(panels, studies):
        axes.axhline(reference, color="#888888", linestyle="--", linewidth=1, label="normal")
        for place, (name, values) in enumerate(study.lines.items()):
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(range(len(values)), values, marker="o", markersize=4, color=colour, label=name)
        axes.set_xticks(range(len(study.places)), list(study.places))
        finish_axes(axes, study.across, "accuracy on held-out images" if axes is panels[0] else "", "")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    return write_figure(figure, path)

"""Pictures of the studies of distributed inference (DECNN Fig. 8, 10, 12), drawn from numbers of our own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.observe.figures import new_figure, wrapped, write_figure
from manyhands_bench.axes import finish_axes

_COLOURS = ("#BBBBBB", "#9ECAE9", "#4C78A8", "#FFBF79", "#F58518", "#888888", "#88D27A", "#2E7D32")
_LINE_COLOURS = ("#9ECAE9", "#4C78A8", "#FFBF79", "#F58518", "#88D27A", "#2E7D32")
_WIDTH = 0.84
"""The width of all bars at one place together."""
_NARROWEST = 9.0
"""The least width in inches: room for a title."""


@dataclass(frozen=True)
class Bars:
    """A panel: the names of its places, and for each method the values there."""

    up: str
    places: Sequence[str]
    values: Mapping[str, Sequence[float]]
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The expected values, by method."""
    labels: str = ""
    """The format of a bar's value above it; empty: none is written."""


def draw_bars(panels: Sequence[Bars], methods: Sequence[str], path: Path, title: str) -> Path:
    """Draw panels below each other (Fig. 8 and 12): a bar for each method at each place, always in the same colour."""
    colours = dict(zip(methods, _COLOURS * len(methods)))
    figure = new_figure(max(_NARROWEST, 1.5 * len(panels[0].places) + 2), 3.2 * len(panels) + 0.8)
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels):
        wide = _WIDTH / len(panel.values)
        for number, name in enumerate(name for name in methods if name in panel.values):
            values = panel.values[name]
            middles = [place + (number + 0.5) * wide - _WIDTH / 2 for place in range(len(values))]
            drawn = axes.bar(middles, values, 0.92 * wide, color=colours[name], label=name)
            if panel.labels:
                axes.bar_label(drawn, fmt=panel.labels, fontsize=8)
            if name in panel.marks:
                expected = panel.marks[name]
                axes.hlines(expected, [x - wide / 2 for x in middles], [x + wide / 2 for x in middles], colors="black")
        axes.set_xticks(range(len(panel.places)), list(panel.places), fontsize=8)
        finish_axes(axes, "", panel.up, "")
        axes.legend(fontsize=7, framealpha=0.85, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(wrapped(title), fontsize=10, x=0.01, ha="left", parse_math=False)
    return write_figure(figure, path)


def draw_scaling(speedups: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], path: Path, title: str) -> Path:
    """Draw Fig. 10: network -> method -> (devices, times as fast), and a dotted line for linear scaling."""
    figure = new_figure(max(_NARROWEST, 4.0 * len(speedups)), 4.2)
    panels = figure.subplots(1, len(speedups), sharey=True, squeeze=False)[0]
    for axes, (network, lines) in zip(panels, speedups.items()):
        for colour, (name, line) in zip(_LINE_COLOURS, lines.items()):
            axes.plot(*zip(*line), marker="o", markersize=4, color=colour, label=name)
        counts = sorted({count for line in lines.values() for count, _ in line})
        axes.plot(counts, counts, color="#E45756", linestyle=":", label="linear")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        finish_axes(axes, f"devices, {network}", "times as fast" if axes is panels[0] else "", "")
    figure.suptitle(wrapped(title), fontsize=10, x=0.01, ha="left", parse_math=False)
    return write_figure(figure, path)


def draw_accuracy(
    lines: Mapping[str, Mapping[str, Sequence[float]]], original: Sequence[float], path: Path, title: str
) -> Path:
    """Draw width -> shuffles -> accuracy of each seed: means as lines, seeds as points; the original's mean and
    range."""
    figure = new_figure(_NARROWEST, 5)
    axes = figure.subplots()
    places = list(dict.fromkeys(place for line in lines.values() for place in line))
    axes.axhline(statistics.fmean(original), color="#888888", linestyle="--", linewidth=1.2, label="original")
    axes.axhspan(min(original), max(original), color="#888888", alpha=0.15)
    for number, (name, line) in enumerate(lines.items()):
        colour = ("#4C78A8", "#F58518", "#54A24B", "#B279A2")[number % 4]
        shown = [place for place in places if place in line]
        across = [places.index(place) + 0.04 * (number - len(lines) / 2) for place in shown]
        axes.plot(
            across,
            [statistics.fmean(line[place]) for place in shown],
            marker="o",
            markersize=5,
            color=colour,
            label=name,
        )
        for x, place in zip(across, shown):
            axes.plot([x] * len(line[place]), line[place], ".", color=colour, markersize=4, alpha=0.5)
    axes.set_xticks(range(len(places)), places)
    finish_axes(axes, "shuffles", "accuracy on held-out pictures", title)
    return write_figure(figure, path)

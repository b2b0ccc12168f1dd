"""Pictures of `manyhands bench auto`: the gain of auto in every scenario, and mixed plans as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.observe.figures import new_figure, wrapped, write_figure
from manyhands_bench.axes import finish_axes

_COLOURS = {
    "mixed": "#E45756", "single": "#BBBBBB", "samples": "#4C78A8", "pipeline": "#54A24B", "tiles": "#F58518",
}  # fmt: skip
_OTHER = "#333333"
_WIDTH = 0.8


@dataclass(frozen=True)
class Gain:
    """One scenario: the kind of the best plan, and its speed over the best corner's; None: no corner fits."""

    text: str
    kind: str
    gain: float | None


@dataclass(frozen=True)
class Sides:
    """One trial: the seconds of a step by side, as measured and as predicted."""

    text: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]


def draw_gains(gains: Sequence[Gain], path: Path, title: str) -> Path:
    """Draw a bar for every scenario, the largest gain first, coloured by the kind of the best plan. If no corner fits,
    a bar has no height of its own: it is drawn to the top, hatched."""
    compared = sorted((row for row in gains if row.gain is not None), key=lambda row: -(row.gain or 0))
    alone = [gain for gain in gains if gain.gain is None]
    top = max([1.1, *(1.05 * (row.gain or 1) for row in compared)])
    figure = new_figure(max(9.0, 0.14 * len(gains) + 2), 4.8)
    axes = figure.subplots()
    for kind in dict.fromkeys(row.kind for row in (*alone, *compared)):
        colour = _COLOURS.get(kind, _OTHER)
        places = [place for place, row in enumerate(compared, len(alone)) if row.kind == kind]
        heights = [(compared[place - len(alone)].gain or 1) - 1 for place in places]
        label = f"{kind} ({sum(row.kind == kind for row in gains)})"
        axes.bar(places, heights, _WIDTH, bottom=1.0, color=colour, label=label)
        axes.plot(places, [1.0] * len(places), "|", color=colour, markersize=6)  # a gain of 1 has no bar
        hatched = [place for place, row in enumerate(alone) if row.kind == kind]
        if hatched:
            axes.bar(hatched, top - 1, _WIDTH, bottom=1.0, color="white", edgecolor=colour, hatch="//")
    if alone:
        axes.plot([], [], color=_OTHER, label=f"hatched: no corner fits ({len(alone)})", linestyle="none")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([])
    finish_axes(axes, "scenarios", "times as fast as the best corner", title)
    return write_figure(figure, path)


def draw_sides(sides: Sequence[Sides], path: Path, title: str) -> Path:
    """Draw a panel for every trial: a bar for each side, and a line at its prediction."""
    figure = new_figure(max(9.0, 3.6 * len(sides)), 4.2)
    for axes, panel in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides):
        names = list(panel.measured)
        colours = [_COLOURS.get(name, _OTHER) for name in names]
        drawn = axes.bar(range(len(names)), [panel.measured[name] for name in names], _WIDTH, color=colours)
        axes.bar_label(drawn, fmt="%.3g s", fontsize=8)
        expected = [panel.predicted[name] for name in names]
        left, right = ([place + side * _WIDTH / 2 for place in range(len(names))] for side in (-1, 1))
        axes.hlines(expected, left, right, colors="black", label="predicted")
        axes.set_xticks(range(len(names)), names, fontsize=8)
        finish_axes(axes, "", "seconds of a step", "")
        axes.set_title(wrapped(panel.text.replace(" on ", "\non ")), fontsize=8, loc="left", parse_math=False)
    figure.suptitle(wrapped(title), fontsize=10, x=0.01, ha="left", parse_math=False)
    return write_figure(figure, path)

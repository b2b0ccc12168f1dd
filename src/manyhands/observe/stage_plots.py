"""A picture of a prediction's accuracy: every stage on every device, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from manyhands.facts.units import format_seconds
from manyhands.observe.figures import MOST_DEVICES, first_devices, new_figure, short_name, wrapped, write_figure

_PREDICTED, _MEASURED = "#C9D6E5", "#4C78A8"
_REST = "#E8E8E8"

Bar = tuple[float, float]
"""Seconds of computing, and of the rest of a step."""


def draw_stages(rows: Sequence[tuple[str, Bar, Bar]], path: Path, *, title: str) -> Path:
    """Draw for each name the predicted bar above the measured one: computing, and then the rest of the step, pale."""
    shown = rows[:MOST_DEVICES]
    figure = new_figure(10, 1.6 + 0.5 * max(1, len(shown)))
    axes = figure.subplots()
    longest = max((sum(bar) for _, *bars in shown for bar in bars), default=0.0) or 1.0
    for side, (colour, label) in enumerate(((_PREDICTED, "predicted"), (_MEASURED, "measured"))):
        places = [number + (side - 0.5) * 0.38 for number in range(len(shown))]
        bars = [row[2] if side else row[1] for row in shown]
        axes.barh(places, [bar[0] for bar in bars], 0.35, color=colour, label=f"computing, {label}")
        axes.barh(places, [bar[1] for bar in bars], 0.35, left=[bar[0] for bar in bars], color=_REST,
                  label="waiting, exchanging, updating" if side else None)  # fmt: skip
        for place, bar in zip(places, bars):
            axes.text(
                sum(bar) + 0.008 * longest, place, format_seconds(bar[0]), va="center", fontsize=7, color="#333333"
            )
    axes.set_yticks(range(len(shown)), [short_name(name) for name, *_ in shown], fontsize=8, parse_math=False)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)  # the first on top
    axes.set_xlim(0, 1.1 * longest)  # room for the numbers
    axes.set_xlabel("seconds of a step")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(wrapped(first_devices(title, len(rows))), fontsize=10, loc="left", parse_math=False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return write_figure(figure, path)

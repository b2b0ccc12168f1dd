"""Pictures of a run: the loss, how busy the devices were, the memory they held, and the accuracy of the prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from manyhands.facts.units import format_bytes
from manyhands.observe.figures import (
    MOST_DEVICES,
    first_devices,
    need_plots,
    new_figure,
    short_name,
    wrapped,
    write_figure,
)
from manyhands.observe.timeline import AXIS_LABEL, draw_bands, draw_legend
from manyhands.observe.trace import SpanLike, from_zero

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

MOST_POINTS = 5_000
MOST_MEANS = 1_000
MOST_EPOCH_MARKS = 20
_LARGEST_DRAWN = 1e300  # beyond it the axis' own margins overflow
_MEASURED, _PREDICTED = "#4C78A8", "#C9D6E5"
MEMORY_PARTS = {"features": "#4C78A8", "deltas": "#F58518", "weights": "#A6D854", "buffers": "#B9B9B9"}
_BUDGET = "#C0392B"
_FARTHEST_BUDGET = 3.0
"""A budget that is this many times the highest bar would make the bars too small to see: it is written, not drawn."""


def draw_losses(
    losses: Sequence[float], path: Path, *, title: str, first_step: int = 0, epoch_steps: int | None = None
) -> Path:
    """Draw the loss per step, thin, and its running mean, thick. Values that are not finite are left out, and
    counted."""
    need_plots()
    from matplotlib.ticker import MaxNLocator

    every = np.asarray(losses, dtype=np.float64)
    is_drawn = np.abs(every) < _LARGEST_DRAWN  # false for NaN too
    steps, values = (first_step + np.arange(len(every)))[is_drawn], every[is_drawn]
    figure = new_figure(10, 4.5)
    axes = figure.subplots()
    if len(values):
        marker = "o" if len(values) <= 30 else ""
        axes.plot(*_thinned(steps, values), color="#8FC0E8", linewidth=0.8, marker=marker, markersize=3.5, label="loss")
        window = max(3, len(values) // 20)
        if len(values) >= window:
            places, means = running_mean(values, window)
            axes.plot(steps[places], means, color="#1F4E79", linewidth=2, label=f"mean of {window} steps around")
        axes.legend(loc="upper right", fontsize=8, framealpha=0.85)
    else:
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", va="center", color="#888888")
    last_step = first_step + max(0, len(every) - 1)
    margin = 0.01 * (last_step - first_step) or 0.5
    axes.set_xlim(first_step - margin, last_step + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if epoch_steps is not None and epoch_steps > 0:
        _mark_epochs(axes, first_step, last_step, epoch_steps)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    left_out = len(every) - len(values)
    note = f" ({left_out} of {len(every)} values are not finite and left out)" if left_out else ""
    axes.set_title(wrapped(title + note), fontsize=10, loc="left", parse_math=False)
    return write_figure(figure, path)


def draw_utilisation(
    busy: Mapping[str, float], predicted: Mapping[str, float] | None, path: Path, *, title: str
) -> Path:
    """Draw the part of the time in which each device is busy, 0 to 1, above the predicted one."""
    devices = list(dict.fromkeys([*busy, *(predicted or {})]))
    shown = devices[:MOST_DEVICES]
    figure = new_figure(9, 1.5 + 0.5 * max(1, len(shown)))
    axes = figure.subplots()
    sides = [("measured", busy, _MEASURED)] + ([("predicted", predicted, _PREDICTED)] if predicted is not None else [])
    height = 0.38 if len(sides) == 2 else 0.5
    for number, (side, parts, colour) in enumerate(sides):
        places = [i + (number - (len(sides) - 1) / 2) * height for i in range(len(shown))]
        finite = [(place, parts[d]) for place, d in zip(places, shown) if d in parts and math.isfinite(parts[d])]
        axes.barh([p for p, _ in finite], [min(1.0, max(0.0, part)) for _, part in finite], height * 0.92,
                  color=colour, label=side)  # fmt: skip
        for place, part in finite:
            axes.text(min(1.0, max(0.0, part)) + 0.008, place, f"{part:.0%}", va="center", fontsize=7, color="#333333")
    axes.set_yticks(range(len(shown)), [short_name(device) for device in shown], fontsize=8, parse_math=False)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)  # the first device on top
    axes.set_xlim(0, 1.07)  # room for the numbers
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("part of the time spent computing")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(wrapped(first_devices(title, len(devices))), fontsize=10, loc="left", parse_math=False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return write_figure(figure, path)


def draw_memory(
    parts: Mapping[str, Mapping[str, int]], budgets: Mapping[str, float] | None, path: Path, *, title: str
) -> Path:
    """Draw each device's tensor bytes at their peak, by kind, and its budget where known."""
    devices, limits = list(parts), budgets or {}
    shown = devices[:MOST_DEVICES]
    figure = new_figure(9, 1.5 + 0.45 * max(1, len(shown)))
    axes = figure.subplots()
    kinds = [
        *MEMORY_PARTS,
        *sorted({kind for device_parts in parts.values() for kind in device_parts} - MEMORY_PARTS.keys()),
    ]
    totals = [sum(parts[device].values()) for device in shown]
    ends = [0.0] * len(shown)
    for kind in kinds:
        sizes = [max(0, parts[device].get(kind, 0)) for device in shown]
        if any(sizes) or kind in MEMORY_PARTS:
            axes.barh(range(len(shown)), sizes, 0.62, left=ends, label=kind, color=MEMORY_PARTS.get(kind, "#888888"),
                      edgecolor="white", linewidth=0.4)  # fmt: skip
        ends = [end + size for end, size in zip(ends, sizes)]
    most = max([*totals, 1])
    near = {i: limits[d] for i, d in enumerate(shown) if limits.get(d, math.inf) <= _FARTHEST_BUDGET * most}
    if near:
        axes.vlines(list(near.values()), [i - 0.42 for i in near], [i + 0.42 for i in near], color=_BUDGET,
                    linewidth=1.8, label="budget")  # fmt: skip
    widest = max([most, *near.values()])
    for place, device in enumerate(shown):
        text = format_bytes(totals[place]) + (f" of {format_bytes(limits[device])}" if device in limits else "")
        after = max(totals[place], near.get(place, 0)) + 0.012 * widest
        axes.text(after, place, text, va="center", fontsize=7.5, color="#333333")
    axes.set_yticks(range(len(shown)), [short_name(device) for device in shown], fontsize=8, parse_math=False)
    axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)  # the first device on top
    axes.set_xlim(0, 1.24 * widest)  # room for the numbers
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value) if value else "0")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("tensor bytes alive at once, at their most", fontsize=9)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(wrapped(first_devices(title, len(devices))), fontsize=10, loc="left", parse_math=False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return write_figure(figure, path)


def draw_predicted_beside_measured(
    predicted: Sequence[SpanLike],
    measured: Sequence[SpanLike],
    devices: Sequence[str],
    path: Path,
    *,
    title: str,
    predicted_seconds: float,
    measured_seconds: float,
    notes: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> Path:
    """Draw one step as simulated above the same step as measured, on one time axis, both from 0.

    `notes`: a note on each device, for either side.
    """
    sides = [
        (f"predicted: {predicted_seconds:.4g} s", from_zero(predicted), predicted_seconds, notes[0]),
        (f"measured: {measured_seconds:.4g} s{_difference(predicted_seconds, measured_seconds)}",
         from_zero(measured), measured_seconds, notes[1]),
    ]  # fmt: skip
    ends = [side[2] for side in sides] + [span.end for side in sides for span in side[1]]
    longest = max(end for end in [0.0, *ends] if math.isfinite(end))
    figure = new_figure(12, 2.2 + 2 * 0.55 * min(max(1, len(devices)), MOST_DEVICES))
    panels = figure.subplots(2, 1, sharex=True)
    kinds: set[str] = set()
    for axes, (name, spans, seconds, words) in zip(panels, sides):
        kinds |= draw_bands(axes, spans, devices, longest, notes=words)
        if math.isfinite(seconds):
            axes.axvline(seconds, color="#333333", linewidth=1, linestyle="--")
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set_xlabel(AXIS_LABEL)
    figure.suptitle(wrapped(first_devices(title, len(devices))), fontsize=10, x=0.005, ha="left", parse_math=False)
    draw_legend(figure, kinds)
    return write_figure(figure, path)


def running_mean(values: NDArray[np.float64], window: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return places, and the mean of the `window` values around each (fewer at the ends). A trailing mean would lag
    behind.

    Each mean is summed afresh, so that one huge value affects only its own surroundings.
    """
    places = np.unique(np.linspace(0, len(values) - 1, MOST_MEANS).astype(np.int64))
    around = [values[max(0, place - window // 2) : place + (window + 1) // 2] for place in places]
    return places, np.array([(near / len(near)).sum() for near in around])


def _thinned(steps: NDArray[np.int64], values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the lowest and highest value of each of many buckets: it looks the same, and Agg refuses very long noisy
    lines."""
    if len(values) <= MOST_POINTS:
        return steps, values
    keep: set[int] = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), MOST_POINTS // 2):
        keep |= {int(bucket[values[bucket].argmin()]), int(bucket[values[bucket].argmax()])}
    chosen = np.array(sorted(keep))
    return steps[chosen], values[chosen]


def _mark_epochs(axes: Axes, first_step: int, last_step: int, epoch_steps: int) -> None:
    """Draw a line where an epoch begins, with its number above the axes; where there are very many, only at every n-th
    one."""
    epochs = range(math.ceil(first_step / epoch_steps), last_step // epoch_steps + 1)
    if not epochs:
        return
    every = max(1, math.ceil(len(epochs) / MOST_EPOCH_MARKS))
    marked = [epoch for epoch in epochs if epoch % every == 0] or [epochs[0]]
    places = [epoch * epoch_steps for epoch in marked]
    for place in places:
        axes.axvline(place, color="#888888", linewidth=0.8, linestyle=":")
    top = axes.secondary_xaxis("top")
    top.set_xticks(places, [f"epoch {marked[0]}", *map(str, marked[1:])], fontsize=7, color="#666666")
    top.tick_params(length=2, color="#888888")


def _difference(predicted_seconds: float, measured_seconds: float) -> str:
    if not (predicted_seconds > 0 and math.isfinite(predicted_seconds) and math.isfinite(measured_seconds)):
        return ""
    part = measured_seconds / predicted_seconds - 1
    return f" ({abs(part):.0%} {'longer' if part >= 0 else 'shorter'} than predicted)"

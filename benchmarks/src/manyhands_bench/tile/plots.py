"""Pictures of the tiling paper's studies (TILE chapters 5 and 6), drawn from numbers of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.observe.figures import new_figure, write_figure
from manyhands_bench.axes import finish_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer

_COLOURS = {"1 group": "#E45756", "every layer": "#4C78A8", "optimal": "#54A24B"}
_WAYS = {"tiles": "#54A24B", "data parallel": "#4C78A8", "layer partition": "#F58518"}
_PARTS = {"computing": "#4C78A8", "boundary data": "#F58518", "weights": "#B279A2"}
_BYTES = 4
"""The bytes of an element."""


@dataclass(frozen=True)
class StepSplit:
    """The time of one step by what it was spent on, for a number of devices and of tiles on each."""

    devices: int
    tiles: int
    computing_seconds: float
    boundary_seconds: float
    weights_seconds: float

    @property
    def bare_seconds(self) -> float:
        """Seconds without waiting for the weights' sums."""
        return self.computing_seconds + self.boundary_seconds

    @property
    def seconds(self) -> float:
        return self.bare_seconds + self.weights_seconds


@dataclass(frozen=True)
class ExtremeCosts:
    """The costs of the two extremes over the optimum's in one direction, for each ratio of prices."""

    one_group: Sequence[float]
    every_layer: Sequence[float]
    groups: Sequence[int]
    """The number of groups of the optimum."""


def draw_components(batches: Sequence[int], elements: Mapping[str, Sequence[int]], path: Path) -> Path:
    """Draw Fig. 5.2c: the communication of an interior tile in a step, part by part, by batch size."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    below = [0.0] * len(batches)
    for (name, counts), colour in zip(elements.items(), ("#54A24B", "#F58518", "#B279A2"), strict=True):
        megabytes = [count * _BYTES / 1e6 for count in counts]
        axes.bar(range(len(batches)), megabytes, 0.6, bottom=below, label=name, color=colour)
        below = [low + height for low, height in zip(below, megabytes, strict=True)]
    axes.set_xticks(range(len(batches)), list(map(str, batches)))
    finish_axes(
        axes, "batch size", "MB of one tile in one step", "Fig. 5.2c: communication by part (the paper's model)"
    )
    return write_figure(figure, path)


def draw_cost_ratios(ratios: Sequence[float], costs: Mapping[str, ExtremeCosts], path: Path) -> Path:
    """Draw Fig. 5.2 d and e: the costs of the extremes over the optimum's, by the ratio of the two prices."""
    figure = new_figure(11, 4.5)
    for axes, letter, (way, lines) in zip(figure.subplots(1, len(costs)), "de", costs.items(), strict=True):
        for name, values in (("1 group", lines.one_group), ("every layer", lines.every_layer)):
            axes.plot(ratios, values, marker="o", markersize=3.5, color=_COLOURS[name], label=name)
        axes.axhline(1.0, color=_COLOURS["optimal"], linewidth=2, label="optimal (its groups below)")
        for ratio, count in zip(ratios, lines.groups, strict=True):
            axes.annotate(
                str(count), (ratio, 1.0), xytext=(0, -10), textcoords="offset points", ha="center", fontsize=7
            )
        axes.set_xscale("log")
        title = f"Fig. 5.2{letter}: {way} (the paper's model)"
        finish_axes(axes, "price of a boundary element in multiply-accumulates", "cost over the optimum's", title)
    return write_figure(figure, path)


def draw_speedups(splits: Sequence[StepSplit], path: Path) -> Path:
    """Draw Fig. 6.1: where a step's time goes, and how many times as fast it is as the first split's."""
    figure = new_figure(12, 7)
    above, below = figure.subplots(2, 1, sharex=True)
    places = list(range(len(splits)))
    bottom = [0.0] * len(splits)
    parts = (
        [split.computing_seconds for split in splits],
        [split.boundary_seconds for split in splits],
        [split.weights_seconds for split in splits],
    )
    for (name, colour), seconds in zip(_PARTS.items(), parts, strict=True):
        above.bar(places, seconds, 0.7, bottom=bottom, label=name, color=colour)
        bottom = [low + height for low, height in zip(bottom, seconds, strict=True)]
    first = splits[0]
    below.plot(
        places, [first.seconds / split.seconds for split in splits], marker="o", color="#4C78A8", label="batch 1"
    )
    below.plot(places, [first.bare_seconds / split.bare_seconds for split in splits], marker="o", color="#54A24B",
               label="without weight update")  # fmt: skip
    below.set_xticks(places, [f"{split.devices}x{split.tiles}" for split in splits], rotation=60, fontsize=8)
    finish_axes(above, "", "seconds of a step", "Fig. 6.1: time of split sample (simulated)")
    finish_axes(below, "devices x tiles on each", "speed-up", "")
    return write_figure(figure, path)


def draw_batches(batches: Sequence[int], seconds: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Draw Fig. 6.3: a step's time by batch size and grouping."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    _bars_by_batch(axes, batches, seconds, _COLOURS)
    finish_axes(axes, "batch size", "seconds of a step", "Fig. 6.3: batches and groupings (simulated)")
    return write_figure(figure, path)


def draw_baselines(batches: Sequence[int], seconds: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Draw Fig. 6.6: a step's time by batch size, of tiles and of the other ways; above those, how many times that of
    tiles it is."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for name, bars in _bars_by_batch(axes, batches, seconds, _WAYS).items():
        if name != "tiles":
            texts = [f"{other / tiles:.2f}x" for other, tiles in zip(seconds[name], seconds["tiles"], strict=True)]
            axes.bar_label(bars, texts, padding=2, fontsize=7)
    title = "Fig. 6.6: three ways to share a batch (simulated; above bars: how many times tiles')"
    finish_axes(axes, "batch size", "seconds of a step", title)
    return write_figure(figure, path)


def _bars_by_batch(
    axes: Axes, batches: Sequence[int], seconds: Mapping[str, Sequence[float]], colours: Mapping[str, str]
) -> dict[str, BarContainer]:
    """Draw one bar for each name, beside each other at every batch size, and return them by name."""
    width = 0.8 / len(seconds)
    bars = {}
    for number, (name, heights) in enumerate(seconds.items()):
        places = [place + (number - (len(seconds) - 1) / 2) * width for place in range(len(batches))]
        bars[name] = axes.bar(places, heights, width * 0.92, label=name, color=colours[name])
    axes.set_xticks(range(len(batches)), list(map(str, batches)))
    return bars


def draw_rates(rates: Sequence[float], seconds: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> Path:
    """Draw Fig. 6.4: forward and backward separately, by the links' rate and the grouping."""
    figure = new_figure(11, 4.5)
    for axes, (way, lines) in zip(figure.subplots(1, len(seconds)), seconds.items(), strict=True):
        for name, values in lines.items():
            axes.plot(rates, values, marker="o", markersize=3.5, color=_COLOURS[name], label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(list(rates), [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        finish_axes(axes, "Mbit/s", "seconds", f"Fig. 6.4: {way}, without weights (simulated)")
    return write_figure(figure, path)

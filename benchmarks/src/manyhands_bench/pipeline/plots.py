"""Pictures of the pipeline paper's studies (ASTEROID §5.3-5.6), drawn from numbers of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.observe.figures import new_figure, write_figure
from manyhands_bench.axes import finish_axes

_COLOURS = ("#E45756", "#F58518", "#54A24B", "#4C78A8", "#B279A2", "#9D755D", "#72B7B2")


def draw_bars(
    groups: Sequence[str], values: Mapping[str, Sequence[float]], path: Path, *, up: str, title: str, across: str = ""
) -> Path:
    """Draw bars side by side: for every group one of each name. A value of 0 is drawn as a cross: it cannot run."""
    figure = new_figure(max(7.0, 1.1 * len(groups) * len(values) * 0.6), 4.5)
    axes = figure.subplots()
    width = 0.8 / len(values)
    for number, (name, heights) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, heights, width * 0.92, label=name, color=_COLOURS[number % len(_COLOURS)])
        missing = [place for place, value in zip(places, heights) if not value]
        axes.plot(missing, [0.0] * len(missing), "x", color=_COLOURS[number % len(_COLOURS)], clip_on=False)
    axes.set_xticks(range(len(groups)), list(groups))
    finish_axes(axes, across, up, title)
    return write_figure(figure, path)


def draw_policies(
    names: Sequence[str], memory: Sequence[float], speed: Sequence[float], path: Path, title: str
) -> Path:
    """Draw Fig. 15b, right: peak memory as bars and throughput as a line, by warm-up policy."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    axes.bar(range(len(names)), [peak / 1e6 for peak in memory], 0.55, color="#4C78A8", label="peak memory")
    other = axes.twinx()
    other.plot(range(len(names)), speed, marker="o", color="#F58518", label="throughput")
    other.set_ylim(0, 1.15 * max(speed))
    other.set_ylabel("samples/s")
    other.legend(fontsize=8, loc="lower right")
    axes.set_xticks(range(len(names)), list(names))
    finish_axes(axes, "forward passes of stage p ahead of its backward passes", "MB", title)
    return write_figure(figure, path)


def draw_accuracies(
    accuracies: Sequence[float], seconds: Mapping[str, float], target: float, path: Path, title: str
) -> Path:
    """Draw Fig. 14: accuracy after each epoch over the time that an epoch takes with each way of training."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for number, (name, each) in enumerate(seconds.items()):
        times = [each * epoch for epoch in range(1, len(accuracies) + 1)]
        axes.plot(times, accuracies, marker=".", color=_COLOURS[number % len(_COLOURS)], label=name)
    axes.axhline(target, color="#888888", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    finish_axes(axes, "seconds (simulated)", "accuracy on held-out images (measured)", title)
    return write_figure(figure, path)

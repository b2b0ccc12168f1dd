"""Throughput through a failure (ASTEROID Fig. 17), drawn from the moments at which rounds ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from manyhands.observe.figures import new_figure, write_figure
from manyhands_bench.axes import finish_axes

_COLOURS = {"light": "#4C78A8", "heavy": "#F58518"}


@dataclass(frozen=True)
class Passage:
    """One run through a failure; all moments are seconds after it."""

    name: str
    """The way of re-planning."""
    rounds: tuple[float, ...]
    """The end of each round that had not ended before: rounds that are run again add nothing new."""
    began: float
    """The start of the next round that was completed."""
    samples: int
    """Samples of a round."""


def throughput(passage: Passage) -> tuple[list[float], list[float]]:
    """Return moments, and the samples per second between each and the next: those of a round, counted from the end of
    the previous one.

    From the last end before rounds began again until then it is 0.
    """
    edges, rates = [passage.rounds[0]], []
    for before, after in pairwise(passage.rounds):
        if before < passage.began < after:
            edges.append(passage.began)
            rates.append(0.0)
        rates.append(passage.samples / max(after - edges[-1], 1e-9))
        edges.append(after)
    return edges, rates


def draw_passages(passages: Sequence[Passage], path: Path, title: str) -> Path:
    """Draw runs beside each other, on one scale: samples per second, the failure, and the moment at which rounds began
    again."""
    figure = new_figure(5.5 * len(passages), 4.0)
    panels = figure.subplots(1, len(passages), sharex=True, sharey=True, squeeze=False)[0]
    for axes, passage in zip(panels, passages):
        edges, rates = throughput(passage)
        axes.stairs(rates, edges, color=_COLOURS.get(passage.name, "#54A24B"), linewidth=2, label=passage.name)
        axes.axvline(0.0, color="#E45756", linewidth=1.2, label="killed")
        label = f"begins again, {passage.began:.2f} s later"
        axes.axvline(passage.began, color="#54A24B", linewidth=1.2, linestyle="--", label=label)
        axes.set_ylim(bottom=0)
        finish_axes(axes, "seconds after the kill", "samples/s", title if axes is panels[0] else "")
    return write_figure(figure, path)

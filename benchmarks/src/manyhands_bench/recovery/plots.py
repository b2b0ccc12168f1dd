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
    """How it was re-planned."""
    rounds: tuple[float, ...]
    """When each round ended that had not ended before: rounds that are run again bring nothing new."""
    began: float
    """When the next round began that was completed."""
    samples: int
    """Samples of a round."""


def throughput(passage: Passage) -> tuple[list[float], list[float]]:
    """Moments, and the samples per second between each and the next: a round's, from the end of the one before.

    From the last end before rounds began again until then it is nothing.
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
    """Beside each other, on one scale: samples per second, the failure, and when rounds began again."""
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

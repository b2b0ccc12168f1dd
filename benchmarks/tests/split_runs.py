"""Runs of a split made by hand: shared by the tests of `manyhands bench split`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.facts.trace import LinkTrace
from manyhands.planner.split import Cut, Deployment, SplitProfile
from manyhands.split.job import SplitResult
from manyhands_bench.split.site import Round, TimedSplit

SHARED = Path(__file__).parents[3] / "shared/data"


def profile() -> SplitProfile:
    """One cut that costs 1 s at the edge, 1 MB up, 1 s at the server, 1 MB down; all at the edge: 10 s."""
    cuts = (
        Cut(layer=1, upstream_forward_seconds=0.25, upstream_backward_seconds=0.5, downstream_forward_seconds=0.4,
            downstream_backward_seconds=0.6, feature_bytes=1e6, returned_bytes=1e6, edge_bytes=5.0, history_bytes=1.0,
            least_bits=32),
        Cut(layer=2, upstream_forward_seconds=4, upstream_backward_seconds=6, downstream_forward_seconds=0,
            downstream_backward_seconds=0, edge_bytes=100.0),
    )  # fmt: skip
    return SplitProfile(network="n", fingerprint="f", batch_size=8, cuts=cuts, layer_bytes=(1.0, 1.0))


def timed(rounds: list[Round], mode: str = "window", deployment: Deployment | None = None, **own: Any) -> TimedSplit:
    result = object.__new__(SplitResult)
    result.split, result.deployment = profile(), deployment or Deployment(1, 5, 32)
    result.changes = own.pop("changes", [])
    return TimedSplit(sum(one.steps for one in rounds), rounds, result, mode)


def steady(seconds: float, steps: int, **own: Any) -> TimedSplit:
    return timed([Round(0.0, seconds, 0, steps)], **own)


def link(rate: float = 1e6) -> LinkTrace:
    return LinkTrace.constant(rate, rate)

"""Bytes of a plan, and groupings compared with both extremes."""

from __future__ import annotations

import pytest

from manyhands.session.session import Session
from manyhands_bench.tile.groups import bench_bytes, bench_groups, gains
from manyhands_bench.tile.setup import TiledNetwork, TileVariant

pytestmark = pytest.mark.xdist_group("bench_tile")


def quiet(text: str) -> None:
    """No progress."""


@pytest.mark.slow
def test_bytes_are_the_plans(subject: TiledNetwork, session: Session) -> None:
    figures = bench_bytes(subject, session, [TileVariant((2, 1)), TileVariant((2, 1), beside_sums=True)], quiet)
    assert figures["bytes_match"] == 1
    assert figures["bytes_per_step"] == figures["bytes_per_step_planned"]
    weights = [w for w in subject.graph.network.weights.values() if w.trainable]
    assert figures["bytes_weights"] == 2 * sum(weight.bytes for weight in weights)
    parts = sum(int(figures[f"bytes_{kind}"]) for kind in ("input_output", "boundary", "statistics", "weights"))
    fed = parts - int(figures["bytes_per_step_planned"])
    assert fed >= sum(tensor.numel() * 4 for tensor in (subject.data.inputs, subject.data.targets))


@pytest.mark.slow
def test_groupings_are_compared_with_both_extremes(subject: TiledNetwork, session: Session) -> None:
    figures = bench_groups(subject, session, (2, 1), 1, 1, 1, quiet)
    for link in ("fast", "slow"):
        over_one, over_every = (float(figures[f"grouping_gain_{link}_over_{x}"]) for x in ("one_group", "every_layer"))
        assert min(over_one, over_every) > 0
        assert figures[f"grouping_gain_{link}"] == max(over_one, over_every)
        assert "forward" in str(figures[f"grouping_{link}"])


def test_an_extreme_counts_in_its_faster_way() -> None:
    seconds = {"one group": 4.0, "one group each way": 3.0, "every layer": 2.0, "every layer, deltas": 5.0, "best": 1.0}
    assert gains(seconds, "best") == (3.0, 2.0)

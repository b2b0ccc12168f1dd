"""The studies of TILE chapter 5 on YOLOv2's first 16 layers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from manyhands.facts.network import Network
from manyhands.plans.networks import load_network
from manyhands_bench.tile.tile_costs import communication_components, cost_sweep

RATIOS = (0, 1, 10, 100, 300, 1_000, 3_000, 1e4, 1e5, 1e6, 1e9)


@pytest.fixture(scope="module")
def yolo() -> Network:
    return load_network("yolov2-16", (3, 608, 608))


def test_cost_sweep(yolo: Network) -> None:
    """Fig. 5.2 d and e."""
    rows = cost_sweep(yolo, (3, 3), RATIOS)
    for row in rows:
        assert min(row.forward_one_group, row.forward_every_layer) >= 1
        assert min(row.backward_one_group, row.backward_every_layer) >= 1
        assert row.forward_one_group > row.forward_every_layer  # whatever the ratio
    assert rows[0].forward_every_layer == rows[0].backward_every_layer == 1
    assert rows[0].backward_one_group > rows[0].backward_every_layer
    assert rows[-1].backward_one_group < rows[-1].backward_every_layer
    assert (rows[-1].forward_groups, rows[-1].backward_groups) == (5, 3)
    for before, after in pairwise(rows):  # dearer communication: fewer groups, every layer further from the optimum
        assert before.forward_groups >= after.forward_groups
        assert before.backward_groups >= after.backward_groups
        assert before.forward_every_layer <= after.forward_every_layer
        assert before.backward_every_layer <= after.backward_every_layer
        assert before.backward_one_group >= after.backward_one_group


def test_communication_components(yolo: Network) -> None:
    """Fig. 5.2c: weights lead at one sample, then samples; the boundary stays below the samples."""
    one, eight, many = communication_components(yolo, (3, 3), (1, 8, 128))
    assert one.samples == 3 * 208 * 208 + 2 * 256 * 13 * 13
    assert one.boundary == 85_228 + 59_392
    assert one.boundary_one_group == 189_036 + 69_632
    assert one.boundary_every_layer == 99_404 + 220_544
    assert one.weights == eight.weights == many.weights == 2 * yolo.parameter_count
    assert one.weights > one.samples > one.boundary
    assert many.samples > many.boundary > many.weights
    assert (eight.samples, eight.boundary) == (8 * one.samples, 8 * one.boundary)

"""A network that does not fit is measured on a band of its rows."""

from __future__ import annotations

import pytest
import torch

from manyhands.graph.graph import Graph
from manyhands.plans.networks import capture_model
from manyhands.profiler.bands import band_inputs, fitting_parts, needed_bytes, possible_parts, whole_seconds
from manyhands.profiler.measure import measure_network


@pytest.fixture(scope="module")
def large() -> Graph:
    """Three layers over maps of 128, 64 and 32 rows, the last pooled to 2; two of a classifier."""
    return capture_model("tiny", (1, 128, 128))


@pytest.mark.slow
def test_bands_divide_every_map_and_are_not_too_narrow(large: Graph, tiny: Graph) -> None:
    assert possible_parts(large.network) == (1, 2), "its smallest map has two rows"
    assert possible_parts(tiny.network) == (1,), "16 rows in all"


def test_as_few_bands_as_fit(large: Graph) -> None:
    needed = needed_bytes(large.network, 4)
    assert [fitting_parts(large.network, 4, free) for free in (needed, needed - 1, 1)] == [1, 2, 2]
    assert band_inputs(large, 4, torch.device("cpu"), 2)[large.network.inputs[0]].shape == (4, 1, 64, 128)


def test_only_layers_over_maps_take_as_many_times_as_long(large: Graph) -> None:
    assert whole_seconds(large.network, [1.0, 2.0, 3.0, 4.0, 5.0], 2) == [2.0, 4.0, 6.0, 4.0, 5.0]
    assert whole_seconds(large.network, [1.0, 2.0], 1) == [1.0, 2.0]


@pytest.mark.slow
def test_a_network_too_large_is_measured_all_the_same(large: Graph) -> None:
    said: list[str] = []
    free = needed_bytes(large.network, 4) - 1
    profile = measure_network(
        large, ladder=(4, 8), threads=1, seconds=1.0, repeats=2, free_bytes=free, on_progress=said.append
    )
    profile.check_matches(large.network)
    assert [timing.samples for timing in profile.layers[0].ladder] == [4], "the first rung only"
    assert said[0] == "tiny does not fit here: measuring one of 2 bands of it"
    whole = measure_network(large, ladder=(4,), threads=1, seconds=1.0, repeats=2, kernels={})
    banded, plain = (sum(one.layer_seconds(0, 4)) for one in (profile, whole))
    assert 0.3 < banded / plain < 3.0, "of all rows, not of the band's"
    assert profile.peak_bytes["4"] == pytest.approx(whole.peak_bytes["4"], rel=0.2)

"""Networks of joined layers, and the unequal cluster."""

from __future__ import annotations

import pytest

from manyhands.facts.profile import estimate_cluster
from manyhands.plans.networks import load_network
from manyhands_bench.auto.scale import joined_layers, unequal


def test_a_network_of_joined_layers_is_the_same_network() -> None:
    network = load_network("tiny", None, "operators")
    joined = joined_layers(network, 4)
    assert len(joined.layers) == 4 < len(network.layers)
    assert joined.layers[0].first == 0
    assert joined.layers[-1].last == len(network.ops)
    assert joined.layers[-1].outputs == network.outputs
    for field in ("macs", "parameter_bytes", "saved_bytes"):
        assert sum(getattr(one, field) for one in joined.layers) == sum(getattr(one, field) for one in network.layers)
    cluster = unequal(3)
    times = [estimate_cluster(one, cluster).of("d1").layer_seconds for one in (network, joined)]
    counts = len(network.layers), 4
    whole_step, joined_step = (sum(sum(time(i, 4)) for i in range(n)) for time, n in zip(times, counts))
    assert joined_step == pytest.approx(whole_step)


def test_the_unequal_cluster_is_unequal() -> None:
    cluster = unequal(16)
    assert len({(device.gflops, device.memory_bytes) for device in cluster.devices}) > 12

"""The networks of `manyhands bench infer`, and their profiles."""

from __future__ import annotations

import pytest

from infer_methods import TINY
from manyhands.facts.reads import Dealt
from manyhands.plans.inference import plan_for, sample_seconds
from manyhands_bench.infer.networks import DecnnNetwork, Library, half_graph
from manyhands_bench.infer.simulated import (
    SCALING,
    devices_of,
)


@pytest.mark.slow
def test_a_network_on_a_slower_machine(library: Library) -> None:
    known = library.profiled(TINY, decoupled=False)
    assert known.scaled(3.0).seconds == pytest.approx(3 * known.seconds)
    cluster = devices_of(SCALING)
    profile = known.scaled(3.0).on(cluster)
    single = plan_for(known.network, cluster, profile, strategy="single").plan
    assert sample_seconds(single, known.network, cluster, profile) == pytest.approx(3 * known.seconds)


@pytest.mark.slow
def test_a_bare_half_is_half_of_the_network_and_exchanges_nothing(library: Library) -> None:
    subject = DecnnNetwork("resnet18", 1.5, (3, 64, 64))
    whole, half = library.graph(subject, decoupled=True).network, half_graph(subject).network
    convolutions = [[op.macs for op in network.ops if "conv" in op.target] for network in (whole, half)]
    assert sorted(convolutions[0]) == sorted(2 * macs for macs in convolutions[1])
    assert any(isinstance(rule, Dealt) for op in whole.ops for read in op.reads for rule in read.rules)
    assert not any(isinstance(rule, Dealt) for op in half.ops for read in op.reads for rule in read.rules)

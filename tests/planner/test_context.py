"""What planners stand on: the arrays say what network and profile say, one cut and one layer at a time."""

from __future__ import annotations

import msgspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import chain
from manyhands.facts.cluster import preset
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, LayerTiming, Timing, estimate_cluster
from manyhands.planner.context import Ladders, PlanningContext, carried, orders


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Chains with skips, several outputs, tensors that nobody reads, and some without gradients."""
    layers, each = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    total = layers * each
    skips = {op: draw(st.integers(0, op - 1)) for op in range(1, total) if draw(st.booleans())}
    network = chain(layers, skips=skips, operators_per_layer=each)
    made = [f"t{op}" for op in range(total)]
    tensors = {
        name: msgspec.structs.replace(spec, shape=(1, draw(st.integers(1, 9))), differentiable=draw(st.booleans()))
        for name, spec in network.tensors.items()
    }
    outputs = tuple(draw(st.sets(st.sampled_from(made), max_size=3)))
    return msgspec.structs.replace(network, tensors=tensors, outputs=outputs)


@given(networks())
def test_what_cuts_carry_is_what_the_network_says(network: Network) -> None:
    crossing, returning = carried(network)
    assert (len(crossing), crossing[0], crossing[-1]) == (len(network.layers) + 1, 0, 0)
    for layer in range(1, len(network.layers)):
        tensors = network.cut(layer)
        assert crossing[layer] == sum(one.bytes_per_sample for one in tensors)
        assert returning[layer] == sum(one.bytes_per_sample for one in tensors if one.differentiable)


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_ladders_are_read_as_profiles_are(data: st.DataObject) -> None:
    """But more samples never take less time."""
    most = data.draw(st.integers(1, 20))
    seconds = st.floats(0, 5)
    layers = []
    for number in range(data.draw(st.integers(1, 4))):
        sizes = sorted(data.draw(st.sets(st.sampled_from((1, 2, 3, 8, 16)), min_size=1)))
        ladder = tuple(Timing(size, data.draw(seconds), data.draw(seconds)) for size in sizes)
        layers.append(LayerTiming(f"layer{number}", ladder))
    own = DeviceProfile("chain", "", "x", "blocks", "a", "measured", tuple(layers))
    found = Ladders([own], most)
    for way, table in enumerate((found.forward[0], found.backward[0])):
        for layer in range(len(layers)):
            known = [own.layer_seconds(layer, samples)[way] for samples in range(most + 1)]
            taken = table[:, layer + 1] - table[:, layer]
            assert taken == pytest.approx(numpy.maximum.accumulate(known), rel=1e-9, abs=1e-9)


def test_another_order_is_as_if_begun_with_it() -> None:
    network, machines = chain(5), preset("env-c")
    profile = estimate_cluster(network, machines)
    context = PlanningContext(network, machines, profile, 8)
    for names in orders(machines):
        found, fresh = context.ordered(names), PlanningContext(network, machines, profile, 8, names=names)
        assert (found.names, found.kinds, found.budgets) == (fresh.names, fresh.kinds, fresh.budgets)
        for kind in range(len(fresh.budgets)):
            assert (found.ladders.best(kind, 8) == fresh.ladders.best(kind, 8)).all()
            for way in ("forward", "backward", "total"):
                assert (getattr(found.ladders, way)[kind] == getattr(fresh.ladders, way)[kind]).all()

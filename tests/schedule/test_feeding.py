"""What devices are given of a micro-batch: every sample of every input exactly once for each stage that reads it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain, cluster
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Part
from manyhands.schedule.feeding import AT_HOME, fed_inputs, feed_topic, result_topic, samples_of
from manyhands.schedule.lowering import Lowering

SKIPPING = chain(4, skips={3: 0})


def lowered(network: Network, plan: Plan) -> Lowering:
    return Lowering(resolve(plan, network, cluster(plan.devices)), network)


def two_stages(share: tuple[int, ...] = (3, 1), homes: dict[str, str] | None = None) -> Plan:
    stages = (Stage((0, 2), ("a", "b"), BySamples(share)), Stage((2, 4), ("c",), Single()))
    return Plan("chain", sum(share), stages, homes=homes or {})


@pytest.mark.slow
@settings(max_examples=60)
@given(plans(SKIPPING, kinds=("single", "samples")))
def test_every_sample_is_fed_once_to_each_stage_that_reads_it(plan: Plan) -> None:
    lowering = lowered(SKIPPING, plan)
    fed = fed_inputs(lowering)
    whole = Box.whole(SKIPPING.tensors["x"].shape_for(plan.micro_batch_size))
    home = plan.homes.get("x", EVERYWHERE)
    if home != EVERYWHERE:
        assert fed == {home: ((AT_HOME, Part("x", whole)),)}
        return
    readers = [g for g in lowering.geometries if any("x" in op.inputs for op in SKIPPING.ops[g.first : g.last])]
    assert set(fed) == {device for geometry in readers for device in geometry.devices}
    for geometry in readers:
        assert all(stage == geometry.index for device in geometry.devices for stage, _ in fed[device])
        rows = [part.box.intervals[0] for device in geometry.devices for _, part in fed[device]]
        samples = sorted(sample for first, last in rows for sample in range(first, last))
        assert samples == list(range(plan.micro_batch_size))
        assert all(part.box.intervals[1:] == whole.intervals[1:] for d in geometry.devices for _, part in fed[d])


def test_a_stage_is_fed_its_own_share() -> None:
    fed = fed_inputs(lowered(SKIPPING, two_stages()))
    assert {device: [(stage, part.box.intervals[0]) for stage, part in parts] for device, parts in fed.items()} == {
        "a": [(0, (0, 3))],
        "b": [(0, (3, 4))],
    }


def test_a_home_is_fed_the_whole_and_passes_it_on() -> None:
    lowering = lowered(SKIPPING, two_stages(homes={"x": "b"}))
    fed = fed_inputs(lowering)
    assert list(fed) == ["b"]
    ((stage, part),) = fed["b"]
    assert (stage, part.box.intervals[0]) == (AT_HOME, (0, 4))
    assert [action.message.parts[0].box.intervals[0] for action in lowering.work["b"].before] == [(0, 3)]  # type: ignore[union-attr]


def test_an_input_returned_by_the_network_is_fed_to_the_last_stage_too() -> None:
    made = chain(4)
    network = Network(
        made.name, made.ops, made.layers, made.tensors, made.weights, ("x",), ("t3", "x"), "blocks", "gives-x"
    )
    assert set(fed_inputs(lowered(network, two_stages()))) == {"a", "b", "c"}


@pytest.mark.parametrize(("device", "samples"), [("a", (0, 3)), ("b", (3, 4)), ("c", (0, 4))])
def test_samples_of_a_device(device: str, samples: tuple[int, int]) -> None:
    lowering = lowered(SKIPPING, two_stages())
    (geometry,) = lowering.work[device].geometries
    assert samples_of(geometry, device) == samples


@given(st.integers(0, 99), st.integers(0, 99))
def test_topics_tell_micro_batches_apart(one: int, other: int) -> None:
    assert (feed_topic(one) == feed_topic(other)) == (one == other)
    assert feed_topic(one) != result_topic(other)

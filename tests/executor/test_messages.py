"""What a device will get is known by name and size before anything is sent."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from harness import plan_for, run, schedule_of, shared
from manyhands.executor.messages import COORDINATOR, expected_messages, feed_parts, plan_bytes, runs_here
from manyhands.executor.share_loss import target_names
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import Codec, Plan
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Receive, Reduce
from manyhands.schedule.checker import check, check_matching
from manyhands.schedule.reduction import pair_bytes
from small_networks import batches_of, captured


def drawn_plan(name: str, data: st.DataObject) -> Plan:
    graph = captured(name)
    plan = data.draw(plans(graph.network, kinds=("single", "samples")))
    stages = tuple(msgspec.structs.replace(stage, codec=Codec()) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["small", "skips", "pair", "words"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_expected_bytes_are_the_schedules(name: str, data: st.DataObject) -> None:
    """Messages as the checker counts what is sent, and each reduction once."""
    graph = captured(name)
    schedule = schedule_of(graph, drawn_plan(name, data))
    expected = Counter(check(schedule).bytes_between)
    reductions = {a.key: a for own in schedule.actions.values() for a in own if isinstance(a, Reduce)}
    for reduce in reductions.values():
        expected.update(pair_bytes(reduce, graph.network))
    found = plan_bytes(schedule.actions, graph.network)
    assert {pair: size for pair, size in found.items() if size} == {p: size for p, size in expected.items() if size}


@pytest.mark.parametrize("name", ["small", "skips", "pair", "words"])
def test_without_reductions_expected_bytes_are_the_checkers(name: str) -> None:
    graph = captured(name)
    middle = len(graph.network.layers) // 2
    stages = [shared(0, middle, 2), shared(middle, len(graph.network.layers), 2)]
    schedule = schedule_of(graph, plan_for(graph, stages, batch_size=6, micro_batches=3))
    assert not any(isinstance(action, Reduce) for own in schedule.actions.values() for action in own)
    assert plan_bytes(schedule.actions, graph.network) == check_matching(schedule.actions)[1]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", ["small", "pair"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_two_messages_of_a_round_have_one_name(name: str, data: st.DataObject) -> None:
    graph = captured(name)
    schedule = schedule_of(graph, drawn_plan(name, data))
    for device, actions in schedule.actions.items():
        found = expected_messages(actions, device, graph.network)
        received = sum(isinstance(action, Receive) for action in actions)
        assert len([topic for _, topic in found if not topic.startswith("reduce")]) == received


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["small", "pair", "named", "words"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_sample_of_every_target_is_fed_once(name: str, data: st.DataObject) -> None:
    graph = captured(name)
    plan = drawn_plan(name, data)
    lowering = schedule_of(graph, plan).lowering
    fed: dict[str, list[int]] = {}
    for device in plan.devices:
        for part in feed_parts(graph, lowering, device, targets=True):
            if part.is_target and part.is_of_samples:
                assert device in lowering.geometries[-1].devices
                fed.setdefault(part.name, []).extend(range(*part.box.intervals[0]))
    assert fed.keys() == set(target_names(graph))
    assert all(sorted(samples) == list(range(plan.micro_batch_size)) for samples in fed.values())
    for device in plan.devices:
        assert not any(part.is_target for part in feed_parts(graph, lowering, device, targets=False))


def test_every_byte_of_a_feed_is_expected() -> None:
    graph = captured("pair")
    stages = [shared(0, 4, 2, 1), shared(4, len(graph.network.layers), 1, 2)]
    ran = run(graph, plan_for(graph, stages, batch_size=6, micro_batches=2), batches_of("pair", 2, 6))
    ran.assert_as_planned(2)
    for device, executor in ran.executors.items():
        fed = {topic: size for (source, topic), size in executor.expected().items() if source == COORDINATOR}
        assert len(fed) == 2  # every device reads an input or targets
        assert ran.logs[device].received_bytes[COORDINATOR] == 2 * sum(fed.values())


def test_a_stream_of_shares_needs_running_statistics() -> None:
    graph = captured("norms")
    count = len(graph.network.layers)
    plan = resolve(plan_for(graph, [shared(0, count, 2, 1)], batch_size=3, order="stream"), graph.network)
    with pytest.raises(BadPlan, match="still keeps no running"):
        runs_here(plan, graph.network)
    runs_here(msgspec.structs.replace(plan, batch_norm="local"), graph.network)
    runs_here(msgspec.structs.replace(plan, order="1f1b"), graph.network)
    middle = graph.network.find_layer("still")
    apart = [shared(0, middle, 2, 1), shared(middle, middle + 1, 3), shared(middle + 1, count, 1, 2)]
    runs_here(resolve(plan_for(graph, apart, batch_size=3, order="stream"), graph.network), graph.network)

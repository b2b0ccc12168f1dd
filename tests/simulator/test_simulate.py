"""The simulator against closed forms, lower bounds and itself."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_plans import FIXED_ORDERS, plans
from hand_made import FREE, MAP_BYTES, WEIGHT_BYTES, chain, cluster, even_profile, profile, step_seconds
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, BadSchedule
from manyhands.facts.lab import with_slots
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Single, Stage
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import Action, Backward, Forward, Reduce, Send, Step
from manyhands.schedule.checker import check
from manyhands.schedule.policies import FixedOrder
from manyhands.schedule.policy import Schedule
from manyhands.schedule.reduction import pair_bytes
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

F, B = 0.01, 0.02
"""Forward and backward seconds of one sample through one hand-made layer."""


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def pipeline(stages: int, micro_batches: int, order: str = "1f1b", **facts: object) -> tuple[Plan, Network]:
    """One layer and one device per stage, one sample per micro-batch."""
    made = tuple(Stage((index, index + 1), (f"d{index}",)) for index in range(stages))
    return Plan("chain", micro_batches, made, micro_batches, order, **facts), chain(stages)  # type: ignore[arg-type]


def run(plan: Plan, network: Network, link: Link = FREE, **facts: float) -> Simulation:
    return simulate(plan, network, cluster(plan.devices, link, **facts), even_profile(network, plan.devices, F, B))


# Closed forms


@pytest.mark.parametrize("order", ["sequential", "gpipe", "1f1b", "eager"])
@pytest.mark.parametrize(("micro_batches", "samples"), [(1, 1), (4, 1), (3, 5)])
def test_one_device(order: str, micro_batches: int, samples: int) -> None:
    """M (f + b) + step."""
    network = chain(4)
    stages = (Stage((0, 4), ("d0",)),)
    result = run(Plan("chain", micro_batches * samples, stages, micro_batches, order), network)  # type: ignore[arg-type]
    assert result.seconds == exactly(micro_batches * samples * 4 * (F + B) + step_seconds(4))
    assert result.idle_part("d0") == pytest.approx(0, abs=1e-9)
    assert result.total_bytes == 0
    assert result.samples_per_second == exactly(micro_batches * samples / result.seconds)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_data_parallel_with_one_bucket(count: int, micro_batches: int) -> None:
    """Compute, then the fullest pair's chunks over its link and two delays, then the step."""
    network, link = chain(4), Link(1e5, 0.003)
    stages = (Stage((0, 4), tuple(f"d{i}" for i in range(count)), BySamples((2,) * count)),)
    result = run(Plan("chain", 2 * count * micro_batches, stages, micro_batches), network, link)
    pairs = pair_bytes(Reduce(0, "gradients", 0, 4, stages[0].devices, 4 * WEIGHT_BYTES), network)
    compute = micro_batches * 2 * 4 * (F + B)
    assert result.seconds == exactly(compute + max(pairs.values()) / 1e5 + 2 * 0.003 + step_seconds(4))
    assert result.total_bytes == 2 * (count - 1) * 4 * WEIGHT_BYTES
    for name, one in result.devices.items():
        assert one.bytes_sent == sum(size for (source, _), size in pairs.items() if source == name)
        assert one.bytes_received == sum(size for (_, target), size in pairs.items() if target == name)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_norm_waits_for_the_sums_and_costs_a_delay(count: int) -> None:
    """Sixteen bytes over every pair's link, one delay, and three more passes over the weights."""
    network, link = chain(4), Link(1e5, 0.003)
    share = BySamples((2,) * count) if count > 1 else Single()
    plan = Plan("chain", 2 * count, (Stage((0, 4), tuple(f"d{i}" for i in range(count)), share),))
    without = run(plan, network, link)
    with_norm = run(msgspec.structs.replace(plan, gradient_norm=True), network, link)
    passes = 4 * WEIGHT_BYTES * 3 / 1e9
    exchange = 0.003 + 16 / 1e5 if count > 1 else 0.0
    assert with_norm.seconds == exactly(without.seconds + exchange + passes)
    assert with_norm.total_bytes - without.total_bytes == exactly(16 * count * (count - 1))


@pytest.mark.slow
@given(st.integers(1, 6 * WEIGHT_BYTES), st.integers(2, 4), st.floats(1e4, 1e7), st.floats(0, 0.05))
@settings(max_examples=60, deadline=None)
def test_buckets_are_never_slower(bucket: int, count: int, rate: float, delay: float) -> None:
    network = chain(5)
    stages = (Stage((0, 5), tuple(f"d{i}" for i in range(count)), BySamples((1,) * count)),)
    at_once = run(Plan("chain", count, stages), network, Link(rate, delay))
    in_buckets = run(Plan("chain", count, stages, bucket_bytes=bucket), network, Link(rate, delay))
    assert in_buckets.seconds <= at_once.seconds * (1 + 1e-9)
    assert in_buckets.total_bytes == exactly(at_once.total_bytes)


def test_a_bucket_travels_while_backward_goes_on() -> None:
    """Two layers, two buckets: the first needs 0.01 s and fits under the second's backward of 0.02 s."""
    network, link = chain(2), Link(WEIGHT_BYTES / 0.01, 0.0)
    stages = (Stage((0, 2), ("d0", "d1"), BySamples((1, 1))),)
    result = run(Plan("chain", 2, stages, bucket_bytes=1), network, link)
    assert result.seconds == exactly(2 * (F + B) + 0.01 + step_seconds(2))


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 9])
def test_equal_stages_and_free_links(order: str, stages: int, micro_batches: int) -> None:
    """(M + P - 1)(f + b) + step, and the bubble is (P - 1) of those M + P - 1."""
    plan, network = pipeline(stages, micro_batches, order)
    result = run(plan, network)
    assert result.seconds == exactly((micro_batches + stages - 1) * (F + B) + step_seconds(1))
    for device in plan.devices:
        bubble = result.idle_part(device) * result.seconds / (result.seconds - step_seconds(1))
        assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), rel=1e-9)


def test_sequential_does_not_overlap() -> None:
    plan, network = pipeline(3, 4, "sequential")
    assert run(plan, network).seconds == exactly(4 * 3 * (F + B) + step_seconds(1))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (3, 1), (4, 7)])
def test_a_stream_of_inferences(stages: int, micro_batches: int) -> None:
    plan, network = pipeline(stages, micro_batches, "stream")
    result = run(plan, network)
    assert result.seconds == exactly((micro_batches + stages - 1) * F)
    assert not any(isinstance(action, (Backward, Step)) for own in result.log.values() for action in own)


def test_a_stream_over_a_link() -> None:
    """A link faster than the stages only adds one message; a slower one sets the pace (its messages share it)."""
    plan, network = pipeline(2, 10, "stream")
    fast = run(plan, network, Link(MAP_BYTES / 0.005, 0.002))
    assert fast.seconds == exactly(F + 0.005 + 0.002 + 10 * F)
    slow = run(plan, network, Link(MAP_BYTES / 0.1, 0.002))
    assert F + 10 * 0.1 + 0.002 + F <= slow.seconds <= F + 10 * 0.1 + 0.002 + 10 * F


@pytest.mark.parametrize(("senders", "times"), [(("a.1", "a.2"), 2), (("a.1", "c.1"), 1)])
def test_slots_that_send_at_once_share_one_port(senders: tuple[str, str], times: int) -> None:
    """A map takes 0.1 s through a port: two of one device's slots need it twice, slots of two devices do not."""
    network = chain(2)
    real = cluster(["a", "b", "c", "d"], Link(math.inf, 0.002), up_bytes_per_second=MAP_BYTES / 0.1)
    stages = (Stage((0, 1), senders, BySamples((1, 1))), Stage((1, 2), ("b.1", "d.1"), BySamples((1, 1))))
    plan = Plan("chain", 2, stages, 1, "stream")
    result = simulate(plan, network, with_slots(real, 2), even_profile(network, plan.devices, F, B))
    assert result.seconds == exactly(F + times * 0.1 + 0.002 + F)


def test_slots_of_one_device_exchange_through_its_memory() -> None:
    """1 GB/s there, whatever the port is; a message begins two operators' time later."""
    network = chain(2)
    real = cluster(["a", "b"], Link(1.0, 9.0), up_bytes_per_second=1.0, down_bytes_per_second=1.0)
    plan = Plan("chain", 1, (Stage((0, 1), ("a.1",)), Stage((1, 2), ("a.2",))), 1, "stream")
    result = simulate(plan, network, with_slots(real, 2), even_profile(network, plan.devices, F, B))
    assert result.seconds == exactly(F + MAP_BYTES / 1e9 + 2 * real.devices[0].operator_seconds + F)
    both = Plan("chain", 2, (Stage((0, 2), ("a.1", "a.2"), BySamples((1, 1))),))
    summed = simulate(both, network, with_slots(real, 2), even_profile(network, both.devices, F, B))
    assert summed.seconds < 2 * (F + B) + 0.001


def test_two_stages_with_communication_by_hand() -> None:
    """Forward and backward 1 s, a message 0.5 s and 0.25 s of delay; v0 arrives at 1.75, g0 at 4.5, g1 at 6.5.

    d0  F0 F1 . . . . . . . . B0 . . B1       0-1, 1-2, 4.5-5.5, 6.5-7.5
    d1  . . . . F0 B0 F1 B1                   1.75-2.75, -3.75, -4.75, -5.75
    """
    plan, network = pipeline(2, 2)
    made = cluster(plan.devices, Link(MAP_BYTES / 0.5, 0.25))
    result = simulate(plan, network, made, even_profile(network, plan.devices, 1.0, 1.0))
    assert result.seconds == exactly(7.5 + step_seconds(1))
    spans = {(s.device, str(s.what)): (s.start, s.end) for s in result.spans if s.track == "compute"}
    for place, when in {
        ("d0", "forward s0 m1 0:1"): (1, 2),
        ("d1", "forward s1 m0 1:2"): (1.75, 2.75),
        ("d1", "backward s1 m1 1:2"): (4.75, 5.75),
        ("d0", "backward s0 m0 0:1"): (4.5, 5.5),
        ("d0", "backward s0 m1 0:1"): (6.5, 7.5),
    }.items():
        assert spans[place] == pytest.approx(when, rel=1e-9)
    sent = [(s.start, s.end) for s in result.spans if (s.device, s.track) == ("d0", "send")]
    assert sent == [(1, 1.5), (2, 2.5)]
    received = [(s.start, s.end) for s in result.spans if (s.device, s.track) == ("d1", "receive")]
    assert received == [(1.25, 1.75), (2.25, 2.75)]
    assert result.devices["d0"].transfer_seconds == exactly(2.5)
    assert result.devices["d1"].transfer_seconds == exactly(2.5)


def test_unequal_stages_go_at_the_pace_of_the_slowest() -> None:
    """GPipe: the second stage, three times slower, is busy from 1 on: 1 + 3M forward, 3M back, and 1 for the first."""
    plan, network = pipeline(2, 5, "gpipe")
    times = profile(network, {"d0": [(1.0, 1.0)] * 2, "d1": [(3.0, 3.0)] * 2})
    result = simulate(plan, network, cluster(plan.devices), times)
    assert result.seconds == exactly(2 + 5 * 6 + step_seconds(1))
    assert result.idle_part("d1") == pytest.approx(2 / 32, rel=1e-3)


def test_samples_go_by_each_devices_share_and_speed() -> None:
    network = chain(2)
    stages = (Stage((0, 2), ("fast", "slow"), BySamples((3, 1))),)
    times = profile(network, {"fast": [(1.0, 2.0)] * 2, "slow": [(2.0, 4.0)] * 2})
    result = simulate(Plan("chain", 4, stages), network, cluster(["fast", "slow"]), times)
    assert result.devices["fast"].busy_seconds == exactly(3 * 2 * 3.0 + step_seconds(2))
    assert result.devices["slow"].busy_seconds == exactly(1 * 2 * 6.0 + step_seconds(2))
    assert result.seconds == exactly(18 + step_seconds(2))


def test_tiles_exchange_a_halo_at_every_layer() -> None:
    """Two tiles of two layers: half each, and between the layers one row each way.

    The first gathers the output and gives its gradient back, which is half a map each; of the second layer the
    gradients of its inputs, which the other waits for, come before those of its weights, while the row travels.
    """
    network, link = chain(2), Link(1e4, 0.001)
    stages = (Stage((0, 2), ("d0", "d1"), ByTiles((1, 1))),)
    result = run(Plan("chain", 1, stages), network, link)
    row = 4 * 4 * 6
    halo = row / 1e4 + 0.001
    ring = 2 * WEIGHT_BYTES / 1e4 + 2 * 0.001
    half = MAP_BYTES / 2 / 1e4 + 0.001
    forward, backward = 2 * 0.5 * F + halo, 0.25 * B + halo + 0.5 * B
    assert result.seconds == exactly(forward + 2 * half + backward + ring + step_seconds(2))
    assert result.bytes_between[("d0", "d1")] == exactly(2 * row + MAP_BYTES / 2 + 2 * WEIGHT_BYTES)


def test_statistics_are_waited_for() -> None:
    network, link = chain(2, statistics=[1]), Link(1e4, 0.001)
    stages = (Stage((0, 2), ("d0", "d1"), BySamples((1, 1))),)
    exact = run(Plan("chain", 2, stages), network, link)
    local = run(Plan("chain", 2, stages, batch_norm="local"), network, link)
    forward, backward = (2 * 4 + 1) * 4 / 1e4 + 0.001, 2 * 4 * 4 / 1e4 + 0.001
    assert exact.seconds - local.seconds == exactly(forward + backward)


def test_a_gateway_takes_its_turn() -> None:
    """Everybody's gradients to one device, its step, and the weights back, on links of their own."""
    network, link = chain(2), Link(1e4, 0.001)
    stages = (Stage((0, 2), ("d0", "d1", "d2"), BySamples((1, 1, 1)), reduce="gateway"),)
    result = run(Plan("chain", 3, stages), network, link)
    there = 2 * WEIGHT_BYTES / 1e4 + 0.001
    assert result.seconds == exactly(2 * (F + B) + 2 * there + step_seconds(2))


def test_an_input_comes_from_its_home() -> None:
    plan, network = pipeline(1, 1, homes={"x": "phone"})
    result = run(plan, network, Link(1e4, 0.001))
    assert result.seconds == exactly(MAP_BYTES / 1e4 + 0.001 + F + B + step_seconds(1))
    assert result.bytes_between == {("phone", "d0"): MAP_BYTES}


# What is counted


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "eager"])
def test_a_home_in_a_later_stage_does_not_hold_the_first_up(order: str) -> None:
    """Inputs leave their home as far ahead as the first stage runs, so with free links nothing is lost."""
    plan, network = pipeline(3, 6, order)
    away = msgspec.structs.replace(plan, homes={"x": plan.stages[2].devices[0]})
    assert run(away, network).seconds == exactly(run(plan, network).seconds)


def expected_bytes(schedule: Schedule, costs: CostModel) -> dict[tuple[str, str], float]:
    """The plan's messages, and its reductions."""
    found: dict[tuple[str, str], float] = {}
    for device, own in schedule.actions.items():
        for action in own:
            if isinstance(action, Send):
                found[device, action.to] = found.get((device, action.to), 0) + action.message.bytes
            elif isinstance(action, Reduce):
                for pair, size in pair_bytes(action, costs.network).items():
                    if pair[0] == device:
                        found[pair] = found.get(pair, 0) + size
    return found


MIXED = chain(4, statistics=[1, 2])
NAMES = [f"d{i}" for i in range(12)] + ["phone"]
MIXED_PROFILE = even_profile(MIXED, NAMES, F, B)


def drawn_cluster(rate: float = 2e5, delay: float = 0.002) -> Cluster:
    return cluster(NAMES, Link(rate, delay), up_bytes_per_second=3e5, watts_active=5, watts_idle=2, watts_transfer=1)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(plans(MIXED, repeats=True))
def test_drawn_plans_keep_to_every_bound(plan: Plan) -> None:
    """No plan beats its busiest device or one micro-batch's way there and back, and the log is the checked list."""
    made = drawn_cluster()
    result = simulate(plan, MIXED, made, MIXED_PROFILE)
    schedule, costs = Schedule(plan, MIXED), CostModel(MIXED, made, MIXED_PROFILE)
    checked = check(schedule)
    assert {device: tuple(own) for device, own in result.log.items()} == schedule.actions
    assert result.bytes_between == pytest.approx(expected_bytes(schedule, costs))
    assert sum(checked.bytes_between.values()) <= result.total_bytes * (1 + 1e-9)
    busiest = max(one.busy_seconds for one in result.devices.values())
    assert result.seconds >= busiest * (1 - 1e-9)
    path = 0.0
    for geometry in schedule.lowering.geometries:
        span = (geometry.index, 0, geometry.first, geometry.last)
        path += min(costs.compute_seconds(geometry, device, Forward(*span)) for device in geometry.devices)
        if plan.is_training:
            path += min(costs.compute_seconds(geometry, device, Backward(*span)) for device in geometry.devices)
    assert result.seconds >= path * (1 - 1e-9)
    for one in result.devices.values():
        sent = sum(count for (source, _), count in result.bytes_between.items() if source == one.device)
        received = sum(count for (_, target), count in result.bytes_between.items() if target == one.device)
        assert (one.bytes_sent, one.bytes_received) == pytest.approx((sent, received))
        assert one.peak_bytes == checked.peak_bytes[one.device]
        idle = result.seconds - one.busy_seconds
        assert one.joules == exactly(5 * one.busy_seconds + 2 * idle + one.transfer_seconds)
        assert 0 <= one.transfer_seconds <= result.seconds * (1 + 1e-9)
        assert result.idle_part(one.device) == exactly(idle / result.seconds)
    assert result.joules == exactly(sum(one.joules for one in result.devices.values()))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(MIXED, repeats=True))
def test_a_faster_world_is_not_slower(plan: Plan) -> None:
    slow = simulate(plan, MIXED, drawn_cluster(), MIXED_PROFILE)
    free = simulate(plan, MIXED, cluster(NAMES), MIXED_PROFILE)
    assert free.seconds <= slow.seconds * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(MIXED, repeats=True))
def test_two_runs_are_equal_to_the_last_digit(plan: Plan) -> None:
    one, two = (simulate(plan, MIXED, drawn_cluster(), MIXED_PROFILE) for _ in range(2))
    assert one.to_dict() == two.to_dict()
    assert one.log == two.log
    assert one.spans == two.spans


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(chain(4), kinds=("single", "samples"), orders=(*FIXED_ORDERS, "eager")))
def test_a_log_run_as_a_list_gives_the_same(plan: Plan) -> None:
    network = chain(4)
    own = even_profile(network, NAMES, F, B)
    first = simulate(plan, network, drawn_cluster(), own)
    lists: dict[str, list[Action]] = first.log
    again = simulate(plan, network, drawn_cluster(), own, policies={d: FixedOrder(a) for d, a in lists.items()})
    assert again.seconds == exactly(first.seconds)
    assert again.log == first.log
    assert again.bytes_between == first.bytes_between


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(MIXED, repeats=True))
def test_a_device_does_one_thing_at_a_time(plan: Plan) -> None:
    result = simulate(plan, MIXED, drawn_cluster(), MIXED_PROFILE)
    for device in plan.devices:
        spans = [s for s in result.spans if (s.device, s.track) == (device, "compute")]
        assert all(before.end <= after.start * (1 + 1e-12) for before, after in pairwise(spans))
        assert sum(s.end - s.start for s in spans) == pytest.approx(result.devices[device].busy_seconds)


def test_energy_by_hand() -> None:
    """One device 5 W busy; the other waits at 2 W; what travels costs 1 W at both ends."""
    plan, network = pipeline(2, 1, "stream")
    watts = {"watts_active": 5.0, "watts_idle": 2.0, "watts_transfer": 1.0}
    result = run(plan, network, Link(MAP_BYTES / 0.1, 0.0), **watts)
    assert result.seconds == exactly(2 * F + 0.1)
    each = 5 * F + 2 * (F + 0.1) + 1 * 0.1
    assert [one.joules for one in result.devices.values()] == [exactly(each), exactly(each)]
    assert result.joules_per_sample == exactly(2 * each)


def test_without_spans_nothing_else_changes() -> None:
    plan, network = pipeline(2, 3)
    made, own = cluster(plan.devices, Link(1e5, 0.001)), even_profile(network, plan.devices, F, B)
    lean = simulate(plan, network, made, own, keep_spans=False)
    assert lean.spans == []
    assert lean.to_dict() == simulate(plan, network, made, own).to_dict()


def test_warnings() -> None:
    plan, network = pipeline(2, 3)
    estimated = simulate(plan, network, cluster(plan.devices))
    assert any("estimated" in text for text in estimated.warnings)
    small = simulate(plan, network, cluster(plan.devices, memory_bytes=1000), even_profile(network, plan.devices))
    assert [text.split()[0] for text in small.warnings] == ["d0", "d1"]
    assert all("runs out of memory" in text and "1 kB" in text for text in small.warnings)


def test_a_run_that_does_not_end_says_where_everybody_waits() -> None:
    plan, network = pipeline(2, 2)
    schedule = Schedule(plan, network)
    lists = {**schedule.actions, "d0": schedule.actions["d0"][:1]}
    with pytest.raises(BadSchedule, match=r"d1 waits at 'receive d0 s1 m0 value t0"):
        simulate(
            plan, network, cluster(plan.devices), even_profile(network, plan.devices),
            policies={device: FixedOrder(own) for device, own in lists.items()},
        )  # fmt: skip


def test_a_plan_that_does_not_fit_is_refused_first() -> None:
    plan, network = pipeline(2, 2)
    with pytest.raises(BadPlan, match=r"stages\[1\].devices names 'd1', which is not in cluster made"):
        simulate(plan, network, cluster(["d0"]))


@pytest.mark.slow
def test_a_thousand_devices() -> None:
    """Eleven stages of ninety devices, sharing unevenly so that neighbours must cut each other's samples."""
    network = chain(11)
    stages = []
    for index in range(11):
        devices = tuple(f"d{index}-{number}" for number in range(90))
        uneven = tuple(1 + (number * 7 + index) % 3 for number in range(89))
        stages.append(Stage((index, index + 1), devices, BySamples((*uneven, 200 - sum(uneven)))))
    plan = Plan("chain", 200 * 8, tuple(stages), 8)
    begin = time.process_time()  # other processes may have the core meanwhile
    result = run(plan, network, Link(1e8, 1e-4), up_bytes_per_second=1e8, down_bytes_per_second=1e8)
    assert time.process_time() - begin < 20
    assert len(result.devices) == 990
    assert math.isfinite(result.seconds)
    assert result.devices["d10-0"].most_micro_batches_held == 1


def test_moving_bytes_holds_computing_up() -> None:
    """Every byte sent or received costs its device 1 ms here: 1600 bytes each way in all, beside free links."""
    network = chain(4)
    stages = (Stage((0, 4), ("d0", "d1"), BySamples((1, 1))),)
    plan = Plan("chain", 2, stages)
    profile = even_profile(network, ["d0", "d1"], F, B)
    free = simulate(plan, network, cluster(["d0", "d1"]), profile)
    held = simulate(plan, network, cluster(["d0", "d1"], copy_seconds_per_gigabyte=1e6), profile)
    moved = 2 * 4 * WEIGHT_BYTES  # half there and half back, in and out
    assert held.seconds - free.seconds == exactly(moved * 1e-3)

"""Prices of actions: ranges add up, parts of layers are parts of their time, between measured points a line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_made import MAP_BYTES, WEIGHT_BYTES, chain, changed, cluster, profile, step_seconds
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.link import Link
from manyhands.facts.plan import BySamples, ByTiles, Plan, Share, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import Backward, Forward, Message, Receive, Reduce, Send
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.reduction import pair_bytes
from manyhands.schedule.sharing import geometry_of

NETWORK = chain(4, operators_per_layer=3)
TIMES = [(0.01, 0.02), (0.03, 0.05), (0.02, 0.07), (0.04, 0.01)]
PROFILE = profile(NETWORK, {"a": TIMES, "b": [(2 * f, 2 * b) for f, b in TIMES]})
CLUSTER = cluster(["a", "b"], Link(1e6, 0.001))


def model() -> CostModel:
    return CostModel(NETWORK, CLUSTER, PROFILE)


def seconds(first: int, last: int, samples: float = 1, device: str = "a") -> tuple[float, float]:
    return model().range_seconds(PROFILE.of(device), device, first, last, samples)


def test_whole_layers_take_what_was_measured() -> None:
    assert seconds(0, 3) == TIMES[0]
    assert seconds(0, 12) == pytest.approx((sum(f for f, _ in TIMES), sum(b for _, b in TIMES)))
    assert seconds(3, 9, samples=5) == pytest.approx((5 * 0.05, 5 * 0.12))
    assert seconds(0, 3, device="b") == pytest.approx((0.02, 0.04))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.sampled_from((0.25, 1, 3, 7.5)))
def test_ranges_add_up_over_any_split(one: int, two: int, three: int, samples: float) -> None:
    first, middle, last = sorted((one, two, three))
    whole = seconds(first, last, samples)
    left, right = seconds(first, middle, samples), seconds(middle, last, samples)
    assert whole == pytest.approx((left[0] + right[0], left[1] + right[1]), rel=1e-12)


def test_a_part_of_a_layer_takes_its_operators_part() -> None:
    """Operators of equal weight share a layer equally; one that moves nothing takes nothing."""
    assert seconds(0, 1) == pytest.approx((0.01 / 3, 0.02 / 3))
    network = changed(chain(4, operators_per_layer=3), 1, macs=0, moved_bytes=0)
    costs = CostModel(network, CLUSTER, PROFILE)
    assert costs.range_seconds(PROFILE.of("a"), "a", 1, 2, 1) == (0, 0)
    assert costs.range_seconds(PROFILE.of("a"), "a", 0, 1, 1) == pytest.approx((0.005, 0.01))


LADDER = (Timing(2, 0.2, 0.4), Timing(4, 0.3, 0.8), Timing(8, 0.7, 2.0))


@pytest.mark.parametrize(
    ("samples", "forward", "backward"),
    [
        (0, 0.0, 0.0),
        (1, 0.1, 0.2),  # below the first point: in proportion
        (0.5, 0.05, 0.1),
        (2, 0.2, 0.4),
        (3, 0.25, 0.6),  # half-way
        (4, 0.3, 0.8),
        (5, 0.4, 1.1),
        (8, 0.7, 2.0),
        (10, 0.9, 2.6),  # beyond the last: the last slope
    ],
)
def test_between_measured_points(samples: float, forward: float, backward: float) -> None:
    base = PROFILE.of("a")
    layers = tuple(LayerTiming(layer.name, LADDER) for layer in NETWORK.layers)
    own = DeviceProfile(base.network, base.fingerprint, base.input, base.granularity, "a", "measured", layers)
    costs = CostModel(NETWORK, CLUSTER, Profile({"a": own}))
    assert costs.range_seconds(own, "a", 0, 3, samples) == pytest.approx((forward, backward))


def geometry(share: Share, samples: int = 4) -> StageGeometry:
    plan = Plan("chain", samples, (Stage((0, 4), ("a", "b"), share),))
    return geometry_of(resolve(plan, NETWORK), 0, NETWORK)


def test_a_share_of_the_samples() -> None:
    stage = geometry(BySamples((1, 3)))
    assert model().compute_seconds(stage, "a", Forward(0, 0, 0, 3)) == pytest.approx(1 * 0.01)
    assert model().compute_seconds(stage, "b", Forward(0, 0, 0, 3)) == pytest.approx(3 * 0.02)
    assert model().compute_seconds(stage, "b", Backward(0, 0, 0, 3)) == pytest.approx(3 * 0.04)


def test_devices_that_wait_for_each_other_take_as_long_as_the_slowest() -> None:
    uneven = Profile({name: msgspec.structs.replace(one, spread=0.2) for name, one in PROFILE.devices.items()})
    waiting, stage = CostModel(NETWORK, CLUSTER, uneven), geometry(BySamples((1, 3)))
    assert waiting.compute_seconds(stage, "b", Forward(0, 0, 0, 3)) == pytest.approx(3 * 0.02 * 1.113, rel=0.01)
    assert waiting.compute_seconds(stage, "b", Backward(0, 0, 0, 3)) == pytest.approx(3 * 0.04 * 1.113, rel=0.01)
    plan = resolve(Plan("chain", 4, (Stage((0, 4), ("a",)),)), NETWORK)
    alone = geometry_of(plan, 0, NETWORK)
    assert waiting.compute_seconds(alone, "a", Forward(0, 0, 0, 3)) == pytest.approx(4 * 0.01)


def test_a_tile_costs_its_part_of_every_operator() -> None:
    """Half the rows, grown inside one group by a row per operator towards its start."""
    stage = geometry(ByTiles((1, 1), forward_groups=(0, 1, 2, 3)))
    grown = (6 / 8 + 5 / 8 + 4 / 8) / 3
    assert model().compute_seconds(stage, "a", Forward(0, 0, 0, 3)) == pytest.approx(4 * 0.01 * grown)
    assert model().compute_seconds(stage, "a", Backward(0, 0, 0, 3)) == pytest.approx(4 * 0.02 * grown)


def test_backward_groups_price_their_regions() -> None:
    stage = geometry(ByTiles((1, 1), forward_groups=(0, 1, 2, 3), backward_groups=(0,)))
    # The gradients of inputs over the region, those of weights over what is owned; the input of operator 0 has none.
    regions = (4 / 8 + (5 / 8 + 4 / 8) / 2 + (6 / 8 + 4 / 8) / 2) / 3
    forward = (6 / 8 + 5 / 8 + 4 / 8) / 3
    assert model().compute_seconds(stage, "a", Forward(0, 0, 0, 3)) == pytest.approx(4 * 0.01 * forward)
    assert model().compute_seconds(stage, "a", Backward(0, 0, 0, 3)) == pytest.approx(4 * 0.02 * regions)
    last = model().compute_seconds(stage, "a", Backward(0, 0, 9, 12))
    assert last > model().compute_seconds(
        geometry(ByTiles((1, 1), forward_groups=(0, 1, 2, 3))), "a", Backward(0, 0, 9, 12)
    )


@pytest.mark.parametrize("groups", [None, (0,)])
def test_the_two_parts_of_a_backward_are_all_of_it(groups: tuple[int, ...] | None) -> None:
    stage = geometry(ByTiles((1, 1), backward_groups=groups))
    whole, *parts = (
        model().compute_seconds(stage, "a", Backward(0, 0, 4, 5, part)) for part in ("", "inputs", "weights")
    )
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(whole)


def test_an_interior_and_its_rim_are_all_of_an_operator() -> None:
    stage = geometry(ByTiles((1, 1), interior_first=(1,)))
    whole, inside, rim = (
        model().compute_seconds(stage, "a", Forward(0, 0, 3, 4, part)) for part in ("", "interior", "rim")
    )
    assert inside > rim > 0
    assert inside + rim == pytest.approx(whole)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_step_passes_over_the_weights(slots: int) -> None:
    plan = Plan("chain", 4, (), optimizer_slots=slots)
    stage = geometry(BySamples((2, 2)))
    assert model().step_seconds(stage, "a", plan) == pytest.approx(step_seconds(12, slots=slots))
    clipped = msgspec.structs.replace(plan, gradient_norm=True)  # gradients are read once more, then read and written
    assert model().step_seconds(stage, "a", clipped) == pytest.approx(
        step_seconds(12, slots=slots) * (6 + 2 * slots) / (3 + 2 * slots)
    )


def test_a_reduction() -> None:
    """2(n-1)/n of the bytes leave each device (ASTEROID Eq. 5), in two rounds that wait for the slowest link."""
    names = ["a", "b", "c"]
    made = cluster(names, Link(1e6, 0.001)).with_link(Link(2e5, 0.003), ("c", "a"))
    costs = CostModel(NETWORK, made, PROFILE)
    reduce = Reduce(0, "gradients", 0, 12, tuple(names), 3 * WEIGHT_BYTES)
    found = pair_bytes(reduce, NETWORK)
    assert found == {(a, b): 2 * WEIGHT_BYTES for a in names for b in names if a != b}
    assert costs.phase_delay_seconds(reduce, 0) == pytest.approx(2 * 0.003)


def test_a_profile_of_another_network_is_refused() -> None:
    with pytest.raises(BadFile, match="does not belong to chain"):
        CostModel(chain(3), CLUSTER, PROFILE)
    with pytest.raises(BadValue, match="no profile of device 'c'"):
        Profile({}).of("c")


def test_hand_made_sizes() -> None:
    """What the other numbers stand on."""
    assert MAP_BYTES == 4 * 4 * 8 * 6
    assert NETWORK.cut_bytes(2, samples=3) == 3 * MAP_BYTES


def test_moving_bytes_takes_computing_where_cores_are_short() -> None:
    names = ["a", "b", "c"]
    made = cluster(names, Link(1e6, 0.001), copy_seconds_per_gigabyte=2e6)
    costs = CostModel(NETWORK, made, PROFILE)
    reduce = Reduce(0, "gradients", 0, 12, tuple(names), 3 * WEIGHT_BYTES)
    moved = sum(size for pair, size in pair_bytes(reduce, NETWORK).items() if "b" in pair)
    assert costs.copy_seconds("b", reduce) == pytest.approx(moved * 2e-3)
    message = Message("value", 0, 0, (), 500)
    assert costs.copy_seconds("a", Send("b", message)) == costs.copy_seconds("b", Receive("a", message)) == 1.0
    free = CostModel(NETWORK, cluster(names, Link(1e6, 0.001)), PROFILE)
    assert free.copy_seconds("a", reduce) == 0.0


def test_what_leaves_a_gpu_is_copied_to_the_memory_of_the_machine() -> None:
    """Unless those that it goes to compute on the same GPU: then it stays there."""
    names = ("a", "b", "c")
    copying = {
        name: msgspec.structs.replace(PROFILE.of("a"), host_copy_seconds=0.5, host_copy_seconds_per_gigabyte=1e6)
        for name in ("a", "b")
    }
    apart = cluster(names, Link(1e6, 0.001))
    gpus = {"a": "one", "b": "one", "c": ""}
    shared = msgspec.structs.replace(
        apart, devices=tuple(msgspec.structs.replace(device, gpu=gpus[device.name]) for device in apart.devices)
    )
    times = Profile({**copying, "c": PROFILE.of("a")})
    costs, message = CostModel(NETWORK, shared, times), Message("value", 0, 0, (), 500)
    assert costs.copies("a")
    assert not costs.copies("c")
    assert costs.copy_seconds("a", Send("c", message)) == pytest.approx(0.5 + 500 * 1e-3)
    assert costs.copy_seconds("c", Receive("a", message)) == 0.0
    assert costs.copy_seconds("a", Send("b", message)) == 0.0
    assert costs.copy_seconds("a", Reduce(0, "gradients", 0, 12, ("a", "b"), 3 * WEIGHT_BYTES)) == 0.0
    assert costs.copy_seconds("a", Reduce(0, "gradients", 0, 12, names, 3 * WEIGHT_BYTES)) > 0.5
    assert CostModel(NETWORK, apart, times).copy_seconds("a", Send("b", message)) == pytest.approx(1.0)


def test_small_kernels_of_a_gpu_take_as_long_as_launching_them() -> None:
    """Unless the GPU computes a whole round alone, which is launched at once."""
    times = PROFILE.of("a")
    launches = ((0.001, 0.5), (0.5, 0.001), (0.03, 0.03), (0.0, 0.0))
    on_gpu = Profile({"a": msgspec.structs.replace(times, launch_seconds=launches), "b": PROFILE.of("b")})
    costs, plain = CostModel(NETWORK, CLUSTER, on_gpu), model()
    count = len(NETWORK.ops)

    def priced(costs: CostModel, plan: Plan, stage: int, first: int, last: int) -> tuple[float, float]:
        geometry = geometry_of(resolve(plan, NETWORK, CLUSTER), stage, NETWORK)
        forward, backward = Forward(stage, 0, first, last), Backward(stage, 0, first, last)
        return costs.compute_seconds(geometry, "a", forward), costs.compute_seconds(geometry, "a", backward)

    alone = Plan(NETWORK.name, 1, (Stage((0, 4), ("a",)),))
    assert priced(costs, alone, 0, 0, count) == priced(plain, alone, 0, 0, count)
    piped = Plan(NETWORK.name, 1, (Stage((0, 2), ("a",)), Stage((2, 4), ("b",))))
    assert priced(costs, piped, 0, 0, 6) == pytest.approx((0.501, 0.501))
    assert priced(costs, piped, 0, 0, 3) == pytest.approx((TIMES[0][0], 0.5))
    assert priced(costs, piped, 0, 0, 1) == pytest.approx((TIMES[0][0] / 3, 0.5 / 3))
    assert priced(plain, piped, 0, 0, 6) == pytest.approx((0.04, 0.07))


def test_what_each_step_costs_comes_with_the_first_stage_of_a_device() -> None:
    names = ["a", "b"]
    costly = CostModel(NETWORK, cluster(names, Link(1e6, 0.001), round_seconds=0.25), PROFILE)
    free = CostModel(NETWORK, cluster(names, Link(1e6, 0.001)), PROFILE)
    stages = (Stage((0, 1), ("a",)), Stage((1, 2), ("b",)), Stage((2, 4), ("a",)))
    plan = resolve(Plan("chain", 4, stages), NETWORK)
    for index, device, added in ((0, "a", 0.25), (1, "b", 0.25), (2, "a", 0.0)):
        geometry = geometry_of(plan, index, NETWORK)
        more = costly.step_seconds(geometry, device, plan) - free.step_seconds(geometry, device, plan)
        assert more == pytest.approx(added)

"""Re-planning: whatever is lost or joins, the adapted plan is sound, keeps what it must, and is not much slower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn_plans import plans
from hand_made import chain, changed, cluster, even_profile, profile
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import BadPlan, ManyhandsError, OutOfMemory, UnknownName
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import EVERYWHERE, BySamples, ByTiles, Plan, Share, Single, Stage
from manyhands.facts.plan_check import layer_range, resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.replanning import Replanned, replanned
from manyhands.planner.strategies import plan_by_name
from manyhands.planner.task import Price, Task
from manyhands.plans.networks import load_network
from manyhands.plans.simulating import simulate

CHAIN = chain(6, statistics=(1, 4), skips={3: 1})
LINK = Link(1e6, 0.001)
DEVICES = tuple(f"d{number}" for number in range(6))


def priced(network: Network, present: Cluster, known: Profile) -> Price:
    def price(plan: Plan) -> float:
        return simulate(plan, network, present, known, keep_spans=False, within_memory=True).seconds

    return price


def uneven(network: Network, names: Sequence[str], speeds: Sequence[float]) -> Profile:
    return profile(
        network, {name: [(0.01 / speed, 0.02 / speed)] * len(network.layers) for name, speed in zip(names, speeds)}
    )


def adapted(plan: Plan, network: Network, names: Sequence[str], known: Profile | None = None, **facts: float) -> Plan:
    """The light plan for these devices."""
    present = cluster(names, LINK, **facts)
    known = known or even_profile(network, names)
    found = replanned(plan, network, present, known, how="light", price=priced(network, present, known))
    check_sound(found, plan, network, present)
    assert found.how == "light"
    assert found.plan.micro_batches == plan.micro_batches
    return found.plan


def check_sound(found: Replanned, old: Plan, network: Network, present: Cluster) -> None:
    plan = found.plan
    assert resolve(plan, network, present) == plan
    assert set(plan.devices) <= set(present.names)
    ranges = [layer_range(stage) for stage in plan.stages]
    assert (ranges[0][0], ranges[-1][1]) == (0, len(network.layers))
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    for stage in plan.stages:
        if isinstance(stage.share, BySamples):
            assert sum(stage.share.samples) == plan.micro_batch_size
    assert plan.batch_size == old.batch_size
    assert (plan.batch_norm, plan.optimizer_slots) == (old.batch_norm, old.optimizer_slots)
    assert set(plan.homes) == set(old.homes)
    assert found.seconds > 0
    assert found.reason


# Everything drawn


@st.composite
def changes(draw: st.DrawFn, network: Network, **options: object) -> tuple[Plan, tuple[str, ...], Profile]:
    """A plan, the devices there are after some were lost and some joined, and what all of them take."""
    plan: Plan = draw(plans(network, repeats=True, **options))  # type: ignore[arg-type]
    working = tuple(dict.fromkeys(name for stage in plan.stages for name in stage.devices))
    kept = sorted(draw(st.sets(st.sampled_from(working), min_size=1)))
    others = sorted({*plan.devices, "d90", "d91"} - set(working))
    joined = sorted(draw(st.sets(st.sampled_from(others), max_size=2)))
    names = sorted({*plan.devices, *kept, *joined})
    known = uneven(network, names, [draw(st.sampled_from((1.0, 1.0, 2.5))) for _ in names])
    return plan, (*kept, *joined), known


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes(CHAIN))
def test_a_adapted_plan_is_sound(drawn: tuple[Plan, tuple[str, ...], Profile]) -> None:
    plan, names, known = drawn
    present = cluster(names, LINK)
    found = replanned(plan, CHAIN, present, known, how="light", price=priced(CHAIN, present, known))
    check_sound(found, plan, CHAIN, present)
    new = found.plan
    assert found.how == "light"
    assert found.seconds == pytest.approx(simulate(new, CHAIN, present, known).seconds)
    assert (new.micro_batches, new.order, new.bucket_bytes) == (plan.micro_batches, plan.order, plan.bucket_bytes)
    assert isinstance(new.warm_up, tuple) == isinstance(plan.warm_up, tuple)
    ways = {(stage.codec, stage.reduce) for stage in plan.stages}
    for stage in new.stages:
        if not {"d90", "d91", "phone"} & set(stage.devices):
            assert (stage.codec, stage.reduce) in ways


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes(chain(5), kinds=("single", "samples"), orders=("1f1b", "eager")))
def test_orders_that_are_decided_under_way(drawn: tuple[Plan, tuple[str, ...], Profile]) -> None:
    plan, names, known = drawn
    network, present = chain(5), cluster(names, LINK)
    found = replanned(plan, network, present, known, how="light", price=priced(network, present, known))
    check_sound(found, plan, network, present)
    assert found.plan.order == plan.order


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes(CHAIN, kinds=("single", "samples", "tiles"), orders=("1f1b",)), st.sampled_from((None, 0.001, 1e6)))
def test_auto_is_never_slower_than_either_unless_it_is_near_the_ideal(
    drawn: tuple[Plan, tuple[str, ...], Profile], reference: float | None
) -> None:
    plan, names, known = drawn
    present = cluster(names, LINK)
    price = priced(CHAIN, present, known)
    light, heavy, auto = (
        replanned(plan, CHAIN, present, known, how=how, price=price, reference_seconds=reference)
        for how in ("light", "heavy", "auto")
    )
    check_sound(auto, plan, CHAIN, present)
    check_sound(heavy, plan, CHAIN, present)
    assert heavy.plan.micro_batches == plan.micro_batches  # batch norm must see the same batches
    if reference == 1e6:
        assert (auto.how, auto.plan) == ("light", light.plan)
    if reference == 0.001:
        assert auto.seconds == pytest.approx(min(light.seconds, heavy.seconds))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes(CHAIN, kinds=("single", "samples")), st.integers(4_000, 60_000))
def test_memory_is_respected_or_refused(drawn: tuple[Plan, tuple[str, ...], Profile], memory: int) -> None:
    plan, names, known = drawn
    present = cluster(names, LINK, memory_bytes=memory)
    try:
        found = replanned(plan, CHAIN, present, known, how="light", price=priced(CHAIN, present, known))
    except (OutOfMemory, BadPlan):
        return
    result = simulate(found.plan, CHAIN, present, known)
    assert all(one.peak_bytes <= memory for one in result.devices.values())


# Samples


def by_samples(samples: Sequence[int], layers: tuple[int, int] = (0, 6), first: int = 0, **facts: object) -> Stage:
    names = tuple(f"d{first + number}" for number in range(len(samples)))
    share: Share = BySamples(tuple(samples)) if len(samples) > 1 else Single()
    return Stage(layers, names, share, **facts)  # type: ignore[arg-type]


def test_samples_are_shared_by_speed_among_those_left() -> None:
    plan = Plan("chain", 24, (by_samples((4, 4, 4), reduce="gateway"),), 2)
    new = adapted(plan, CHAIN, ("d1", "d2"), uneven(CHAIN, ("d1", "d2"), (1, 2)))
    assert new.stages == (Stage((0, 6), ("d1", "d2"), BySamples((4, 8)), reduce="gateway"),)


def test_one_device_does_it_all() -> None:
    stages = (by_samples((2, 2), (0, 3)), Stage((3, 6), ("d2",)))
    plan = Plan("chain", 16, stages, 4, warm_up=(3, 1), homes={"x": "d2"})
    new = adapted(plan, CHAIN, ("d1",))
    assert [(stage.layers, stage.devices, stage.share) for stage in new.stages] == [((0, 6), ("d1",), Single())]
    assert new.warm_up == (3,)
    assert new.homes == {"x": "d1"}


def test_local_statistics_have_two_samples_at_least() -> None:
    tensors = {name: msgspec.structs.replace(one, shape=(1, 4, 1, 1)) for name, one in chain(4).tensors.items()}
    network = msgspec.structs.replace(chain(4, statistics=(2,)), tensors=tensors, name="chain")
    stage = Stage((0, 4), ("d0", "d1", "d2"), BySamples((2, 2, 2)))
    plan = Plan("chain", 6, (stage,), batch_norm="local")
    new = adapted(plan, network, ("d0", "d1"), uneven(network, ("d0", "d1"), (50, 1)))
    assert new.stages[0].share == BySamples((4, 2))


# Pipelines


def pipeline(ends: Sequence[int], micro_batches: int = 8, **facts: object) -> Plan:
    stages = tuple(Stage(layers, (f"d{number}",)) for number, layers in enumerate(pairwise((0, *ends))))
    return Plan("chain", 2 * micro_batches, stages, micro_batches, **facts)  # type: ignore[arg-type]


def cuts(plan: Plan) -> list[int]:
    return [layer_range(stage)[1] for stage in plan.stages[:-1]]


def test_a_stage_that_lost_its_device_is_dissolved_by_capacity() -> None:
    network = chain(12)
    plan = pipeline((4, 8, 12), warm_up=(5, 3, 1))
    new = adapted(plan, network, ("d0", "d2"), uneven(network, ("d0", "d2"), (1, 2)))
    assert [stage.devices for stage in new.stages] == [("d0",), ("d2",)]
    assert cuts(new) == [4]
    assert new.warm_up == (5, 1)
    assert cuts(adapted(plan, network, ("d1", "d2"))) == [6]


def test_cuts_that_are_good_enough_stay() -> None:
    network = chain(12)
    stages = (by_samples((4, 4, 4), (0, 6)), by_samples((4, 4, 4), (6, 12), first=3))
    plan = Plan("chain", 96, stages, 8)
    new = adapted(plan, network, ("d0", "d1", "d3", "d4"))
    assert cuts(new) == [6]
    assert [stage.share for stage in new.stages] == [BySamples((6, 6))] * 2


def test_layers_move_from_the_stage_that_shrank() -> None:
    network = chain(12)
    stages = (by_samples((6, 6), (0, 6)), by_samples((6, 6), (6, 12), first=2))
    new = adapted(Plan("chain", 96, stages, 8), network, ("d0", "d2", "d3"))
    assert cuts(new) == [4]
    assert new.stages[0].share == Single()


def test_cuts_stay_out_of_a_buffer_that_is_written() -> None:
    tied = changed(changed(chain(6), 4, weights=("w1",)), 1, writes=("w1",))
    plan = msgspec.structs.replace(pipeline((1, 5, 6)), network="chain")
    for lost in range(3):
        names = [name for name in ("d0", "d1", "d2") if name != f"d{lost}"]
        assert not {2, 3, 4} & set(cuts(adapted(plan, tied, names)))


def test_cuts_part_tied_weights_where_the_stages_can_add_up_their_gradients() -> None:
    tied = changed(chain(6), 4, weights=("w1", "w4"))
    assert cuts(adapted(pipeline((2, 4, 6)), tied, ("d0", "d2"))) == [3]
    stages = (by_samples((1, 1, 1), (0, 5), reduce="gateway"), Stage((5, 6), ("d3",)))
    plan = Plan("chain", 24, stages, 8)
    new = adapted(plan, tied, ("d0", "d3"))
    assert not {2, 3, 4} & set(cuts(new))
    assert cuts(adapted(plan, chain(6), ("d0", "d3"))) == [3]


def test_a_stage_whose_samples_mix_stays_single() -> None:
    network = changed(chain(4), 3, mixes_samples=True)
    stages = (by_samples((4, 4), (0, 3)), Stage((3, 4), ("d2",)))
    new = adapted(Plan("chain", 8, stages), network, ("d0", "d1"))
    assert all(stage.share == Single() for stage in new.stages if layer_range(stage)[1] == 4)


# Tiles


def tiled(rows: Sequence[float], columns: Sequence[float] = (1,), last: int = 6, **facts: object) -> Stage:
    names = tuple(f"d{number}" for number in range(len(rows) * len(columns)))
    return Stage((0, last), names, ByTiles(tuple(rows), tuple(columns), **facts))  # type: ignore[arg-type]


def tiles_of(plan: Plan, stage: int = 0) -> ByTiles:
    share = plan.stages[stage].share
    assert isinstance(share, ByTiles)
    return share


def test_rows_are_split_anew_and_groups_stay() -> None:
    stage = tiled((1, 1), (1, 1), forward_groups=(0, 2), backward_groups=(0, 4), interior_first=(2,))
    plan = Plan("chain", 2, (stage,))
    new = adapted(plan, CHAIN, ("d0", "d1", "d3"), uneven(CHAIN, ("d0", "d1", "d3"), (2, 1, 1)))
    share = tiles_of(new)
    assert new.stages[0].devices == ("d0", "d1", "d3")
    assert (share.rows, share.columns) == ((1, 0.5, 0.5), (1,))
    assert (share.forward_groups, share.backward_groups, share.interior_first) == ((0, 2), (0, 4), (2,))


def test_a_grid_is_made_where_rows_are_too_few() -> None:
    plan = Plan("chain", 2, (tiled((1,) * 3, (1,) * 4),))
    new = adapted(plan, CHAIN, [f"d{number}" for number in range(1, 11)])
    share = tiles_of(new)
    assert (len(share.rows), len(share.columns)) == (5, 2)


def test_one_tile_is_the_whole() -> None:
    new = adapted(Plan("chain", 2, (tiled((1, 1)),)), CHAIN, ("d1",))
    assert new.stages == (Stage((0, 6), ("d1",)),)


def test_tiles_take_the_layers_of_a_lost_stage_each_in_a_group() -> None:
    stages = (tiled((1, 1), last=3, forward_groups=(0, 2), backward_groups=(0,)), Stage((3, 6), ("d2",)))
    new = adapted(Plan("chain", 8, stages, 4), CHAIN, ("d0", "d1"))
    assert new.stages[0].layers == (0, 6)
    assert tiles_of(new).forward_groups == (0, 2, 3, 4, 5)
    assert tiles_of(new).backward_groups == (0, 3, 4, 5)


UNTILED = changed(CHAIN, 5, tiling="none")
"""Its last layer cannot be cut into tiles."""


def test_a_tail_moves_to_the_fastest_that_is_left() -> None:
    stages = (tiled((2, 1, 1), last=5), Stage((5, 6), ("d0",)))
    plan = Plan("chain", 8, stages, 4, "sequential", homes={"x": "d0"})
    new = adapted(plan, UNTILED, ("d1", "d2"), uneven(UNTILED, ("d1", "d2"), (1, 2)))
    assert [stage.devices for stage in new.stages] == [("d1", "d2"), ("d2",)]
    assert new.homes == {"x": "d1"}


def test_a_tile_gives_a_device_to_a_tail_that_nobody_else_can_do() -> None:
    stages = (tiled((1, 1, 1), last=5), Stage((5, 6), ("d3",)))
    new = adapted(Plan("chain", 8, stages, 4), UNTILED, ("d0", "d1", "d2"))
    assert [stage.devices for stage in new.stages] == [("d0", "d1"), ("d2",)]
    assert len(tiles_of(new).rows) == 2


@pytest.mark.parametrize("lost", range(6))
def test_tiles_feed_samples_feed_one(lost: int) -> None:
    """Each in turn, and then all of a stage."""
    stages = (
        tiled((1, 1), last=2, forward_groups=(0, 1)), by_samples((2, 2), (2, 4), first=2, reduce="gateway"),
        Stage((4, 6), ("d4",)),
    )  # fmt: skip
    plan = Plan("chain", 16, stages, 4, warm_up=(4, 2, 1), homes={"x": "d0"})
    names = [name for name in DEVICES[:5] if name != f"d{lost}"]
    if lost == 5:
        names = ["d2", "d3", "d4"]
    new = adapted(plan, CHAIN, names)
    assert set(names) == {name for stage in new.stages for name in stage.devices}
    assert new.homes == {"x": "d0" if "d0" in names else new.stages[0].devices[0]}


def test_an_input_at_hand_everywhere_stays_so() -> None:
    plan = pipeline((3, 6), homes={"x": EVERYWHERE})
    assert adapted(plan, CHAIN, ("d1",)).homes == {"x": EVERYWHERE}


# Joining


def test_a_device_joins_where_it_helps_most() -> None:
    network = chain(6)
    plan = Plan("chain", 24, (by_samples((4, 4)),), 3)
    assert adapted(plan, network, ("d0", "d1", "d9")).devices == ("d0", "d1", "d9")
    tiles = Plan("chain", 2, (tiled((1, 1)),))
    assert len(tiles_of(adapted(tiles, network, ("d0", "d1", "d9"))).rows) == 3


def test_what_was_lost_and_joins_again_is_used_again() -> None:
    network = chain(12)
    plan = pipeline((4, 8, 12))
    smaller = adapted(plan, network, ("d0", "d2"))
    again = adapted(smaller, network, ("d0", "d1", "d2"))
    assert set(again.devices) == {"d0", "d1", "d2"}
    present, known = cluster(("d0", "d1", "d2"), LINK), even_profile(network, ("d0", "d1", "d2"))
    assert priced(network, present, known)(again) <= 1.05 * priced(network, present, known)(plan)


def test_a_device_that_only_slows_is_left_out() -> None:
    network = chain(6)
    plan = Plan("chain", 8, (Stage((0, 6), ("d0",)),))
    assert adapted(plan, network, ("d0", "d9"), uneven(network, ("d0", "d9"), (1, 0.001))).devices == ("d0",)


# Words, refusals, and the choice


def test_words_say_what_changed() -> None:
    network, names = chain(12), ("d0", "d2")
    present, known = cluster(names, LINK), even_profile(chain(12), names)
    price = priced(network, present, known)
    light = replanned(pipeline((4, 8, 12)), network, present, known, how="light", price=price)
    assert light.reason == (
        "The old plan, adapted: without d1; 2 stage(s) instead of 3; cuts 6 instead of 4, 8."
    )  # fmt: skip
    heavy = replanned(pipeline((4, 8, 12)), network, present, known, how="heavy", price=price)
    assert heavy.reason == "Planned again (pipeline)."
    alone = cluster(("d1",), LINK)
    one = replanned(
        pipeline((4, 8, 12)), network, alone, even_profile(network, ("d1",)), how="heavy", strategy="tiles",
        price=priced(network, alone, even_profile(network, ("d1",))),
    )  # fmt: skip
    assert one.plan.stages == (Stage((0, 12), ("d1",)),)


def test_what_cannot_be_adapted_is_planned_again() -> None:
    network, names = chain(6), ("d8", "d9")
    present, known = cluster(names, LINK), even_profile(chain(6), names)
    price = priced(network, present, known)
    with pytest.raises(BadPlan, match=r"The plan's devices \(d0, d1\) are not in cluster made any more"):
        replanned(pipeline((3, 6)), network, present, known, how="light", price=price)
    found = replanned(pipeline((3, 6)), network, present, known, price=price)
    assert found.how == "heavy"
    assert found.reason.startswith("The old plan cannot be adapted (The plan's devices (d0, d1)")
    with pytest.raises(UnknownName, match="lihgt"):
        replanned(pipeline((3, 6)), network, present, known, how="lihgt", price=price)
    with pytest.raises(UnknownName, match="pipelines"):
        replanned(pipeline((3, 6)), network, present, known, strategy="pipelines", price=price)


def test_a_strategy_that_has_no_plan_gives_way_to_the_others() -> None:
    """Three devices cannot share two samples."""
    network, names = chain(6), ("d0", "d1", "d2")
    present, known = cluster(names, LINK), even_profile(chain(6), names)
    plan = Plan("chain", 2, (Stage((0, 6), ("d0",)),))
    found = replanned(
        plan, network, present, known, how="heavy", strategy="samples", price=priced(network, present, known)
    )  # fmt: skip
    check_sound(found, plan, network, present)
    assert "samples has no plan for these 3 devices" in found.reason


def test_what_is_far_from_the_old_speed_is_planned_again() -> None:
    network, names = chain(6), ("d0", "d1", "d2")
    present, known = cluster(names, LINK), even_profile(chain(6), names)
    price = priced(network, present, known)
    plan = Plan("chain", 12, (Stage((0, 6), ("d0", "d1"), BySamples((6, 6))),))
    near = replanned(plan, network, present, known, price=price, reference_seconds=price(plan))
    assert near.how == "light"
    far = replanned(plan, network, present, known, price=price, reference_seconds=price(plan) / 10)
    assert far.seconds <= near.seconds
    assert "was expected" in far.reason


def test_what_fits_nowhere_is_refused_with_the_bytes() -> None:
    network, present = chain(6), cluster(("d0",), LINK, memory_bytes=3000)
    known = even_profile(network, ("d0",))
    for how in ("light", "auto", "heavy"):
        with pytest.raises(OutOfMemory, match=r"d0 would hold .* of 3 kB"):
            replanned(pipeline((3, 6)), network, present, known, how=how, price=priced(network, present, known))


# The papers' networks


def as_large_as_mobilenet() -> Network:
    return chain(34, operators_per_layer=6, statistics=range(1, 204, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "environment"),
    [
        pytest.param("", "env-d", id="chain"),
        pytest.param("mobilenetv2", "env-c", marks=pytest.mark.slow),
        pytest.param("mobilenetv2", "env-d", marks=pytest.mark.slow),
    ],
)
def test_adapted_in_milliseconds_and_nearly_as_fast_as_planned_again(model: str, environment: str) -> None:
    """ASTEROID §5.5: the throughput after a light recovery is that after a heavy one, nearly."""
    network = load_network(model) if model else as_large_as_mobilenet()
    whole = preset(environment)
    known = estimate_cluster(network, whole)
    task = Task(network, whole, known, 32, micro_batches=8)
    plan = plan_by_name("pipeline", task, priced(network, whole, known))[0].plan
    assert plan is not None
    for lost in plan.devices if model else plan.devices[:1]:
        present = whole.without(lost)
        price = priced(network, present, known)
        taken = []
        for _ in range(3):
            own = time.process_time()
            light = replanned(plan, network, present, known, how="light", price=lambda plan: 1.0)
            taken.append(time.process_time() - own)
        seconds = price(light.plan)
        heavy = replanned(plan, network, present, known, how="heavy", price=price)
        assert seconds <= 1.25 * heavy.seconds
        assert min(taken) < 0.2  # 0.01 to 0.03 s on an idle machine


def test_nothing_to_do_changes_nothing() -> None:
    plan = resolve(pipeline((3, 6)), CHAIN)
    assert adapted(plan, CHAIN, ("d0", "d1")) == plan


def test_other_errors_are_not_hidden() -> None:
    def price(plan: Plan) -> float:
        raise ManyhandsError("the price is broken")

    with pytest.raises(ManyhandsError, match="the price is broken"):
        replanned(
            pipeline((3, 6)), CHAIN, cluster(("d0",), LINK), even_profile(CHAIN, ("d0",)), how="light", price=price
        )


@pytest.mark.parametrize("how", ["auto", "light", "heavy"])
def test_a_split_keeps_its_steps(how: str) -> None:
    """Order replay steps after every micro-batch: what is left of it does, too."""
    network = chain(4)
    stages = (Stage((0, 2), ("d0",)), Stage((2, 4), ("d1",)))
    plan = resolve(Plan("chain", 8, stages, 4, "replay"), network)
    names = ("d1",)
    found = replanned(plan, network, cluster(names), even_profile(network, names), price=lambda one: 1.0, how=how).plan
    assert (found.order, found.batch_size, found.micro_batches, found.devices) == ("replay", 8, 4, names)

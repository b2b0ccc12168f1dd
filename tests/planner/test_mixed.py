"""Mixed plans: the search equals exhaustive search by its own prices, and auto is never behind a corner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import msgspec
import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import BadPlan, BadValue, ManyhandsError, OutOfMemory, UnknownName
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.planner.context import Batch, DevicePairs, sizes
from manyhands.planner.mixed import MOST_STAGES, Repeating, is_mixed, mixed_plans
from manyhands.planner.refining import moved_cuts, quick_price, shortened
from manyhands.planner.strategies import CORNERS
from manyhands.planner.task import Task
from manyhands.planner.tile_steps import Tiling, _divided
from manyhands.plans.networks import load_network
from manyhands.plans.planned import Planned
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.simulating import simulate
from manyhands.schedule.policy import Schedule
from manyhands.schedule.tileable import tileable_layers

KINDS = ("pi3", "pi4", "pi5", "nano", "tx2", "laptop")


@pytest.fixture(scope="module")
def tiny() -> Network:
    return load_network("tiny")


@pytest.fixture(scope="module")
def resnet() -> Network:
    return load_network("resnet18", (3, 64, 64))


@st.composite
def drawn_clusters(draw: st.DrawFn, most: int = 4) -> Cluster:
    """Unequal devices with all or a part of their memory, and links that differ per pair."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=most))
    devices: list[dict[str, object]] = [{"name": f"d{i}", "kind": kind} for i, kind in enumerate(kinds)]
    for device in devices:
        if draw(st.booleans()):
            device["memory"] = draw(st.sampled_from(("40 MB", "200 MB")))
    rates = st.sampled_from(("5 Mbit/s", "100 Mbit/s", "2 Gbit/s"))
    document: dict[str, object] = {
        "name": "drawn", "devices": devices,
        "link": {"rate": draw(rates), "delay": draw(st.sampled_from(("0.1 ms", "5 ms")))},
    }  # fmt: skip
    if draw(st.booleans()):
        document["links"] = [{"between": ["d0", "d1"], "rate": draw(rates), "delay": "1 ms"}]
    return Cluster.from_dict(document)


def of_40_megabytes(count: int) -> Cluster:
    devices = [{"name": f"d{number}", "kind": "pi3", "memory": "40 MB"} for number in range(count)]
    return Cluster.from_dict({"name": "small", "devices": devices, "link": {"rate": "100 Mbit/s", "delay": "1 ms"}})


def task_of(network: Network, cluster: Cluster, batch_size: int) -> Task:
    return Task(network, cluster, estimate_cluster(network, cluster), batch_size)


def every_way(search: Repeating, most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Places and options of every plan of up to so many stages."""
    end = len(search.positions) - 1
    for count in range(1, most + 1):
        for inside in combinations(range(1, end), count - 1):
            for options in product(range(len(search.options)), repeat=count):
                yield (0, *inside, end), options


@pytest.mark.parametrize("cluster", ["env-d", "home"])
def test_the_repeating_search_equals_exhaustive_search(tiny: Network, cluster: str) -> None:
    """Without weight gradients to add up, which hide behind other stages: those are simulated."""
    search = Repeating(task_of(tiny, preset(cluster), 8), Batch(8, 1), Tiling.of(tiny))
    search.positions = [0, *numpy.linspace(1, len(tiny.layers), 4).astype(int).tolist()]
    search.options = [*search.options[:2], *search.options[-4:]]
    prices, moves = search._prices, search._moves
    prices.reduce[:], prices.tail[:] = 0.0, 0.0

    def seconds(places: tuple[int, ...], options: tuple[int, ...]) -> float:
        own = sum(prices.own[option, a, b] for option, a, b in zip(options, places, places[1:]))
        return float(own + sum(moves[at, a, b] for at, a, b in zip(places[1:], options, options[1:])))

    found = search.plans()
    for bits in ({1}, {2}, {1, 2}):
        ways = [
            seconds(places, options) for places, options in every_way(search, MOST_STAGES)
            if {search.options[option].bit for option in options} == bits
        ]  # fmt: skip
        own = [
            one for one, plan in found
            if {2 if isinstance(stage.share, ByTiles) else 1 for stage in plan.stages} == bits
        ]  # fmt: skip
        assert min(own, default=numpy.inf) == pytest.approx(min(ways))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(drawn_clusters(), st.sampled_from((1, 2, 8, 32)))
def test_auto_is_never_behind_a_corner(tiny: Network, cluster: Cluster, batch_size: int) -> None:
    try:
        planned = make_plan(tiny, cluster, batch_size=batch_size)
    except BadPlan:
        for strategy in CORNERS:
            with pytest.raises(ManyhandsError):
                make_plan(tiny, cluster, batch_size=batch_size, strategy=strategy)
        return
    chosen = simulate(planned.plan, tiny, cluster, within_memory=True).seconds
    assert chosen == planned.candidates[0].seconds
    for strategy in CORNERS:
        try:
            corner = make_plan(tiny, cluster, batch_size=batch_size, strategy=strategy).plan
        except ManyhandsError:
            continue
        assert chosen <= simulate(corner, tiny, cluster).seconds * (1 + 1e-9), strategy


@pytest.mark.slow
def test_a_mixed_plan_beats_every_corner_where_none_fits_well() -> None:
    """Six slow devices, four samples: tiles for the large maps, samples for the weights."""
    network = load_network("resnet18")
    planned = make_plan(network, preset("pi3x6"), batch_size=4)
    best, corner = planned.candidates[0], _best_corner(planned)
    assert best.name == "mixed"
    assert best.plan is not None
    assert is_mixed(best.plan, tileable_layers(network)[0])
    assert best.seconds < corner


def _best_corner(planned: Planned) -> float:
    return min(one.seconds for one in planned.candidates if not one.name.startswith("mixed"))


def test_what_is_mixed(tiny: Network) -> None:
    names, layers = ("a", "b"), len(tiny.layers)
    end = tileable_layers(tiny)[0]
    tiles, samples = ByTiles((1, 1)), BySamples((4, 4))

    def plan(*stages: Stage) -> Plan:
        return Plan(tiny.name, 8, stages)

    corners = [
        plan(Stage((0, layers), ("a",))),
        plan(Stage((0, layers), names, samples)),
        plan(Stage((0, 2), ("a",)), Stage((2, layers), ("b",))),
        plan(Stage((0, 2), names, samples), Stage((2, layers), ("c",))),
        plan(Stage((0, end), names, tiles), Stage((end, layers), ("a",))),
    ]
    assert not any(is_mixed(one, end) for one in corners)
    others = [
        plan(Stage((0, 2), names, samples), Stage((2, layers), ("a",))),
        plan(Stage((0, end - 1), names, tiles), Stage((end - 1, layers), ("a",))),
        plan(Stage((0, 2), names, tiles), Stage((2, layers), names, samples)),
    ]
    assert all(is_mixed(one, end) for one in others)


def test_asked_for_by_name(tiny: Network) -> None:
    cluster = preset("env-d")
    planned = make_plan(tiny, cluster, batch_size=16, strategy="mixed")
    assert is_mixed(planned.plan, tileable_layers(tiny)[0])
    for other in planned.runners_up:
        assert is_mixed(other, tileable_layers(tiny)[0])
    with pytest.raises(BadPlan, match="no mixed plan of tiny"):
        make_plan(tiny, Cluster.local(1), batch_size=16, strategy="mixed")


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@example(of_40_megabytes(2), 4)
@given(drawn_clusters(), st.sampled_from((1, 4, 16)))
def test_every_mixed_plan_can_run(resnet: Network, cluster: Cluster, batch_size: int) -> None:
    """A refusal is right where one layer's weights, gradients and momentum are more than any device has."""
    end = tileable_layers(resnet)[0]
    try:
        plans = mixed_plans(task_of(resnet, cluster, batch_size))
    except OutOfMemory:
        largest = max(sum(3 * resnet.weights[name].bytes for name in layer.weights) for layer in resnet.layers)
        assert largest > max(device.memory_bytes for device in cluster.devices)
        return
    assert plans
    for plan in plans:
        resolved = resolve(plan, resnet, cluster)
        assert is_mixed(resolved, end)
        Schedule(resolved, resnet)


@pytest.mark.parametrize(
    "name",
    ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "mobilenetv3-large", "vgg16"))],
)
def test_what_is_said_to_be_tileable_is(name: str) -> None:
    network = load_network(name)
    tiling = Tiling.of(network)
    layers = len(network.layers)
    for first in range(layers):
        last = int(tiling.end[first])
        if last == first or tiling.rows[first] < 4:
            continue
        stages = [
            Stage((0, first), ("a",)), Stage((first, last), ("b", "c"), ByTiles((1, 1))), Stage((last, layers), ("d",)),
        ]  # fmt: skip
        given = tuple(one for one in stages if one.layers[0] != one.layers[1])
        Schedule(resolve(Plan(name, 2, given), network), network)


@given(st.data())
def test_tiles_follow_speed_as_far_as_memory_goes(data: st.DataObject) -> None:
    kinds = data.draw(st.integers(1, 4))
    numbers = st.floats(0.01, 10)
    speed = numpy.array([[data.draw(numbers) for _ in range(kinds)]])
    counts = numpy.array([[data.draw(st.integers(0, 3)) for _ in range(kinds)]])
    caps = numpy.array([[data.draw(st.floats(-0.5, 1.5)) for _ in range(kinds)]])
    parts, fits = _divided(speed, counts, caps)
    has = counts[0] > 0
    room = float((numpy.maximum(caps, 0) * counts).sum())
    if not fits[0]:
        assert room < 1 + 1e-6 or not has.any() or (caps[0][has] <= 0).any()
        return
    assert (parts * counts).sum() == pytest.approx(1)
    assert (parts[0][has] <= caps[0][has] + 1e-9).all()
    free = has & (parts[0] < caps[0] - 1e-9)
    rates = parts[0][free] / speed[0][free]
    assert numpy.allclose(rates, rates[:1]) if free.any() else True
    assert all(
        parts[0][kind] / speed[0][kind] <= rates[0] * (1 + 1e-9)
        for kind in numpy.flatnonzero(has & ~free)
        if free.any()
    )


@pytest.mark.slow
def test_little_memory_and_little_energy(tiny: Network) -> None:
    cluster = preset("env-d")
    fast, small, thrifty = (
        make_plan(tiny, cluster, batch_size=16, best=best) for best in ("throughput", "memory", "energy")
    )

    def peak(planned: Planned) -> float:
        return max(one.peak_bytes for one in simulate(planned.plan, tiny, cluster).devices.values())

    assert small.candidates[0].score == peak(small)
    assert peak(small) < peak(fast)
    assert peak(small) <= min(one.score for one in small.candidates if one.score is not None)
    joules = simulate(thrifty.plan, tiny, cluster).joules_per_sample
    assert thrifty.candidates[0].score == joules
    assert joules <= simulate(fast.plan, tiny, cluster).joules_per_sample
    with pytest.raises(BadValue, match=r"the watts of local-1, local-2 are unknown"):
        make_plan(tiny, Cluster.local(2), best="energy")
    with pytest.raises(UnknownName, match="sped"):
        make_plan(tiny, cluster, best="sped")


def test_long_rounds_are_priced_by_short_ones(tiny: Network) -> None:
    cluster = preset("env-d")
    stages = (Stage((0, 3), ("tx2-1",)), Stage((3, len(tiny.layers)), ("nano-1",)))
    plan = resolve(Plan(tiny.name, 128, stages, micro_batches=64), tiny, cluster)
    asked: list[int] = []

    def price(plan: Plan) -> float:
        asked.append(plan.micro_batches)
        return simulate(plan, tiny, cluster).seconds

    assert quick_price(price)(plan) == pytest.approx(price(plan), rel=0.02)
    assert asked == [8, 12, 64]
    assert shortened(plan, 100) == plan
    moved = list(moved_cuts(plan))
    assert {one.stages[1].layers[0] for one in moved} == {1, 2, 4, 5} & set(range(1, len(tiny.layers)))
    assert all(one.stages[0].layers[1] == one.stages[1].layers[0] for one in moved)


@given(st.integers(2, 80))
def test_sizes_rise_to_all(count: int) -> None:
    found = sizes(count)
    assert found == sorted(set(found))
    assert found[-1] == count
    assert found[: min(6, count - 1)] == list(range(2, 2 + min(6, count - 1)))


def test_pairs_are_the_clusters() -> None:
    plain = preset("home")
    pairs = DevicePairs.of(plain, plain.names)
    for a, b in product(range(len(plain.names)), repeat=2):
        if a != b:
            assert pairs.rates[a, b] == plain.bytes_per_second_between(plain.names[a], plain.names[b])
            assert pairs.delays[a, b] == plain.link_between(plain.names[a], plain.names[b]).delay_seconds
    even = preset("pi3x6")
    assert not even.links
    same = DevicePairs.of(even, even.names)
    named = DevicePairs.of(msgspec.structs.replace(even, links=_written_out(even)), even.names)
    apart = ~numpy.eye(6, dtype=bool)
    assert (same.rates == named.rates)[apart].all()
    assert (same.delays == named.delays)[apart].all()


def _written_out(cluster: Cluster) -> tuple[object, ...]:
    from manyhands.facts.link import DirectedLink

    return tuple(DirectedLink(a, b, cluster.link) for a in cluster.names for b in cluster.names if a != b)

"""Many devices: as fast as asked, and the same as when every flow of every sum is shared plainly, one by one."""

from __future__ import annotations

import math
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_links import PlainNetwork

from drawn_plans import FIXED_ORDERS, plans
from hand_made import chain, cluster, even_profile
from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.cluster import Cluster
from manyhands.facts.lab import with_slots
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Share, Single, Stage
from manyhands.facts.site import Site
from manyhands.planner.cost import CostModel
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import byte_points, pair_bytes, phases, rounds_of
from manyhands.simulator import links
from manyhands.simulator import simulate as module
from manyhands.simulator.result import Simulation
from manyhands.simulator.simulate import simulate

# The same as plainly

MIXED = chain(4, statistics=[1, 2])
NAMES = [f"d{i}" for i in range(12)] + ["phone"]


def unequal(names: list[str], seed: int, *, slots: bool = False) -> Cluster:
    """Ports and links of several rates, some of them without a limit, and device's own copying."""
    draw = random.Random(seed)
    base = cluster(names, Link(draw.choice((1e4, 2e5, 1e6, math.inf)), 0.002), watts_active=5, watts_transfer=1)
    devices = tuple(
        msgspec.structs.replace(
            device,
            up_bytes_per_second=draw.choice((1e4, 1e5, 3e5, math.inf)),
            down_bytes_per_second=draw.choice((1e5, 3e5, math.inf)),
            copy_seconds_per_gigabyte=draw.choice((0.0, 0.0, 1000.0)),
        )
        for device in base.devices
    )
    pairs = [draw.sample(names, 2) for _ in range(draw.randint(0, 9))]
    special = {(a, b): Link(draw.choice((1e4, 1e5, 5e5)), draw.choice((0.0, 0.01))) for a, b in pairs}
    relays = {pair: draw.choice(("", "", "coordinator", *names)) for pair in special}
    links = tuple(
        DirectedLink(*pair, link, "" if relays[pair] in pair else relays[pair]) for pair, link in special.items()
    )
    made = Cluster("drawn", devices, base.link, links)
    if not slots:
        sites = tuple(Site(f"s{i}", draw.choice((2e4, 1e5)), math.inf, 0.001, within="s0" * (i > 1)) for i in range(3))
        placed = (msgspec.structs.replace(one, site=draw.choice(("", "s0", "s1", "s2"))) for one in devices)
        return Cluster("drawn", tuple(placed), base.link, links, sites) if draw.random() < 0.5 else made
    halved = with_slots(made, 2)  # two workers each, under the names of as many devices
    renamed = dict(zip(halved.names, names))
    kept = tuple(
        msgspec.structs.replace(device, name=renamed[device.name], host=f"host-{device.host_name}")
        for device in halved.devices
        if device.name in renamed
    )
    between = tuple(
        DirectedLink(renamed[one.sender], renamed[one.receiver], one.link, renamed.get(one.relay, one.relay))
        for one in halved.links
        if one.sender in renamed and one.receiver in renamed
        and renamed.get(one.relay, one.relay) not in (renamed[one.sender], renamed[one.receiver])
    )  # fmt: skip
    return Cluster("drawn", kept, base.link, between)


def numbers(result: Simulation) -> dict[object, float]:
    own: dict[object, float] = {
        f"{name} {field}": getattr(one, field)
        for name, one in result.devices.items()
        for field in ("busy_seconds", "transfer_seconds", "finished_seconds", "bytes_sent", "bytes_received", "joules")
    }
    return {"seconds": result.seconds, "actions": result.actions, **own, **result.bytes_between}


def both_ways(plan: Plan, network: Network, made: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    known = even_profile(network, made.names)
    found = numbers(simulate(plan, network, made, known, keep_spans=False))
    with monkeypatch.context() as changed:
        changed.setattr(module, "LinkNetwork", PlainNetwork)
        expected = numbers(simulate(plan, network, made, known, keep_spans=False))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    with monkeypatch.context() as changed:
        changed.setattr(links, "MOST_FEW", 0)
        as_arrays = numbers(simulate(plan, network, made, known, keep_spans=False))
    assert as_arrays == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_drawn_plans_are_shared_as_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=25, deadline=None)
    @given(plans(MIXED, orders=FIXED_ORDERS, repeats=True), st.integers(0, 999), st.booleans())
    def check(plan: Plan, seed: int, slots: bool) -> None:
        made = unequal(NAMES, seed, slots=slots)
        places = {name: made.place(name) for name in plan.devices if seed % 2}
        both_ways(msgspec.structs.replace(plan, places=places), MIXED, made, monkeypatch)

    check()


def staged(network: Network, names: list[str], shares: list[tuple[int, Share]], samples: int, **facts: object) -> Plan:
    """Stages of about as many layers each, on so many devices."""
    layers, stages, used = len(network.layers), [], 0
    for number, (count, share) in enumerate(shares):
        bounds = (number * layers // len(shares), (number + 1) * layers // len(shares))
        stages.append(Stage(bounds, tuple(names[used : used + count]), share))
        used += count
    return Plan(network.name, samples * int(str(facts.get("micro_batches", 1))), tuple(stages), **facts)  # type: ignore[arg-type]


def even(devices: int, samples: int) -> tuple[int, Share]:
    return devices, BySamples(
        tuple((place + 1) * samples // devices - place * samples // devices for place in range(devices))
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rings_and_wide_sums_are_shared_as_plainly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More devices than add up directly, beside a stage that they send to."""
    names = [f"d{i}" for i in range(21)]
    plan = staged(MIXED, names, [even(18, 20), even(3, 20)], 20, micro_batches=2, bucket_bytes=500)
    both_ways(plan, MIXED, unequal(names, seed), monkeypatch)


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("count", [2, 3, 16, 17, 40])
@pytest.mark.parametrize("what", ["gradients", "statistics"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_what_flows_carry_is_what_the_rounds_carry(count: int, what: str, hosts: int) -> None:
    network = chain(3, weight_elements=101)
    places = tuple(f"h{i % hosts}" for i in range(count))
    reduce = Reduce(0, what, 0, 3, tuple(f"d{i}" for i in range(count)), 3 * 404, places=places)  # type: ignore[arg-type]
    points = byte_points(reduce, network)
    expected: dict[tuple[str, str], int] = {}
    for hops in rounds_of(reduce):
        for hop in hops:
            size = points[hop.last] - points[hop.first]
            expected[hop.source, hop.target] = expected.get((hop.source, hop.target), 0) + size
    assert pair_bytes(reduce, network) == expected
    assert sum(flows.rounds for flows in phases(reduce)) == len(rounds_of(reduce))
    pair = next(iter(expected))
    special = cluster(list(reduce.devices), Link(1e6, 0.001)).with_link(Link(1e6, 0.004), pair)
    costs = CostModel(network, special, even_profile(network, special.names))
    delays = [costs.phase_delay_seconds(reduce, number) for number in range(len(phases(reduce)))]
    slow = [pair in {(f"d{a}", f"d{b}") for a, b in zip(flows.sources, flows.targets)} for flows in phases(reduce)]
    assert delays == pytest.approx([f.rounds * (0.004 if s else 0.001) for f, s in zip(phases(reduce), slow)])
    assert any(slow)


# Energy, and time


def check_energy(result: Simulation, made: Cluster) -> None:
    """Active watts while busy, idle ones for the rest, and what transfers add."""
    for name, one in result.devices.items():
        facts = made.device(name)
        rest = result.seconds - one.busy_seconds
        assert one.transfer_seconds <= result.seconds * (1 + 1e-9)
        assert one.joules == pytest.approx(
            facts.watts_active * one.busy_seconds
            + facts.watts_idle * rest
            + facts.watts_transfer * one.transfer_seconds
        )
        assert one.joules > 0
    assert result.joules == pytest.approx(sum(one.joules for one in result.devices.values()))
    assert result.joules_per_sample == pytest.approx(result.joules / result.samples)


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_kind_of_the_catalogue_has_watts(kind: str) -> None:
    made = Cluster.from_dict({"devices": [{"kind": kind, "count": 2}], "link": {"rate": "100 Mbit/s", "delay": "1 ms"}})
    for device in made.devices:
        assert device.watts_active > device.watts_idle > 0
        assert device.watts_transfer > 0
    plan = staged(MIXED, list(made.names), [even(2, 4)], 4)
    check_energy(simulate(plan, MIXED, made, keep_spans=False), made)


def test_energy_that_is_not_known_is_not_told() -> None:
    """Workers on this machine have no watts: that is no zero."""
    known, local = many(2), Cluster.local(2)
    for made in (known, local):
        result = simulate(staged(MIXED, list(made.names), [even(2, 4)], 4), MIXED, made, keep_spans=False)
        assert result.is_energy_known == (made is known)
        assert (result.to_dict()["joules_per_sample"] is None) == (made is local)


DEEP = chain(50, statistics=range(1, 50, 2), weight_elements=50_000)


def many(count: int) -> Cluster:
    devices = [{"kind": "pi4", "count": count // 2}, {"kind": "jetson-nano", "count": count - count // 2}]
    return Cluster.from_dict({"devices": devices, "link": {"rate": "1 Gbit/s", "delay": "1 ms"}})


def timed(plan: Plan, made: Cluster, limit: float) -> Simulation:
    started = time.process_time()
    result = simulate(plan, DEEP, made, keep_spans=False)
    assert time.process_time() - started < limit
    assert not any("memory" in warning for warning in result.warnings)
    check_energy(result, made)
    return result


WIDE = [(200, 20), pytest.param(1000, 60, marks=pytest.mark.slow)]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("batch_norm", ["local", "synchronised"])
@pytest.mark.parametrize(("count", "limit"), WIDE)
def test_a_pipeline_of_wide_stages(count: int, limit: float, batch_norm: str) -> None:
    made, width = many(count), count // 10
    shares = [even(width, 2 * width)] * 10
    plan = staged(DEEP, list(made.names), shares, 2 * width, micro_batches=4, batch_norm=batch_norm)
    timed(plan, made, limit)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("batch_norm", ["local", "synchronised"])
@pytest.mark.parametrize(("count", "limit"), WIDE)
def test_one_stage_by_samples(count: int, limit: float, batch_norm: str) -> None:
    """Everybody adds up with everybody, statistics too."""
    made = many(count)
    timed(staged(DEEP, list(made.names), [even(count, 2 * count)], 2 * count, batch_norm=batch_norm), made, limit)


@pytest.mark.slow
def test_a_wide_grid_of_tiles_feeds_a_pipeline() -> None:
    """Maps of 8 x 6 are cut into 48 tiles."""
    made = many(53)
    shares: list[tuple[int, Share]] = [(48, ByTiles((1,) * 8, (1,) * 6)), *((1, Single()) for _ in range(5))]
    timed(staged(DEEP, list(made.names), shares, 2, micro_batches=2), made, 60)

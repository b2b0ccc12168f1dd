"""Fair sharing of links and ports, against a slow reference that raises all rates together, little by little."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import cluster
from manyhands.facts.cluster import Cluster
from manyhands.facts.lab import with_slots
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.site import Site
from manyhands.simulator.flows import Transfer
from manyhands.simulator.links import LinkNetwork


@dataclass
class Clock:
    """Runs transfers to their ends, as the simulator does."""

    network: LinkNetwork
    now: float = 0.0
    ends: dict[Transfer, float] = field(default_factory=dict)
    finished: list[tuple[str, float]] = field(default_factory=list)

    def start(self, source: str, target: str, byte_count: float, label: str = "", *, is_urgent: bool = True) -> None:
        label = label or f"{source}{target}"
        self.network.start(source, target, byte_count, label, self.now, is_urgent=is_urgent)
        self._settle()

    def _settle(self) -> None:
        for transfer in self.network.settle(self.now):
            assert isinstance(transfer, Transfer)
            self.ends.pop(transfer, None)
            if transfer.rate:
                self.ends[transfer] = transfer.ends

    def until(self, limit: float = math.inf) -> None:
        while self.ends:
            transfer = min(self.ends, key=self.ends.__getitem__)
            if self.ends[transfer] > limit:
                break
            self.now = self.ends.pop(transfer)
            self.finished.append((str(transfer.label), self.now))
            self.network.end(transfer, self.now)
            self._settle()
        self.now = max(self.now, limit) if limit < math.inf else self.now


HUNDRED = Link(100.0, 0.0)


def clock(link: Link = HUNDRED, names: str = "abcd", **ports: float) -> Clock:
    return Clock(LinkNetwork(cluster(list(names), link, **ports)))


def test_alone_on_a_link() -> None:
    run = clock()
    run.start("a", "b", 50)
    run.until()
    assert run.finished == [("ab", 0.5)]


def test_two_equal_transfers_on_one_link_take_twice_as_long() -> None:
    run = clock()
    run.start("a", "b", 50, "one")
    run.start("a", "b", 50, "two")
    run.until()
    assert run.finished == [("one", 1.0), ("two", 1.0)]


def test_what_one_leaves_the_other_takes() -> None:
    """At 0.5 s the first has 25 of 50 sent and the second starts; they share until the first ends, at 1.0."""
    run = clock()
    run.start("a", "b", 75, "one")
    run.until(0.5)
    run.start("a", "b", 75, "two")
    run.until()
    assert run.finished == [("one", 1.0), ("two", 1.5)]


def test_pairs_have_links_of_their_own() -> None:
    run = clock()
    run.start("a", "b", 50)
    run.start("a", "c", 50)
    run.start("d", "b", 50)
    run.until()
    assert [end for _, end in run.finished] == [0.5, 0.5, 0.5]


def test_a_port_is_shared_by_all_that_crosses_it() -> None:
    up = clock(up_bytes_per_second=100.0)
    up.start("a", "b", 50)
    up.start("a", "c", 50)
    up.until()
    assert [end for _, end in up.finished] == [1.0, 1.0]
    down = clock(down_bytes_per_second=50.0)
    down.start("a", "d", 50)
    down.start("b", "d", 50)
    down.until()
    assert [end for _, end in down.finished] == [2.0, 2.0]


def test_directions_do_not_disturb_each_other() -> None:
    run = clock(up_bytes_per_second=100.0, down_bytes_per_second=100.0)
    run.start("a", "b", 50)
    run.start("b", "a", 50)
    run.until()
    assert [end for _, end in run.finished] == [0.5, 0.5]


def test_each_direction_has_its_rate() -> None:
    base = cluster(["a", "b"], Link(100.0, 0.0))
    run = Clock(LinkNetwork(base.with_link(Link(25.0, 0.0), ("b", "a"))))
    run.start("a", "b", 50)
    run.start("b", "a", 50)
    run.until()
    assert run.finished == [("ab", 0.5), ("ba", 2.0)]


def test_what_a_bottleneck_leaves_goes_to_the_others() -> None:
    """a -> b is limited to 10 by its link; a -> c gets the other 90 of a's port."""
    base = cluster(["a", "b", "c"], Link(math.inf, 0.0), up_bytes_per_second=100.0)
    run = Clock(LinkNetwork(base.with_link(Link(10.0, 0.0), ("a", "b"))))
    run.start("a", "b", 10)
    run.start("a", "c", 90)
    assert sorted(transfer.rate for transfer in run.ends) == [10.0, 90.0]
    run.until()
    assert [end for _, end in run.finished] == [1.0, 1.0]


def relayed(*pairs: str, relay: str, rate: float = 100.0, **ports: float) -> Clock:
    base = cluster(list("abcde"), HUNDRED, **ports)
    links = tuple(DirectedLink(*pair, Link(rate, 0.0), relay) for pair in pairs)
    return Clock(LinkNetwork(Cluster("relayed", base.devices, base.link, links)))


def test_a_relay_is_shared_by_all_pairs_that_it_serves() -> None:
    """Each pair has 100 B/s alone; together they have no more, whoever else talks."""
    run = relayed("ab", "cd", "dc", relay="coordinator")
    run.start("a", "b", 100)
    run.until()
    for source, target in ("ab", "cd", "dc", "ad"):
        run.start(source, target, 100)
    run.until()
    assert run.finished[:2] == [("ab", 1.0), ("ad", 2.0)]
    assert sorted(run.finished[2:]) == [("ab", 4.0), ("cd", 4.0), ("dc", 4.0)]


def test_a_device_that_relays_shares_its_own_port() -> None:
    """e passes on what a sends to b, and sends to c itself: both leave through its port."""
    run = relayed("ab", relay="e", up_bytes_per_second=100.0, down_bytes_per_second=100.0)
    run.start("a", "b", 50)
    run.start("e", "c", 50)
    run.start("d", "c", 10)
    run.until()
    assert dict(run.finished) == {"ab": 1.0, "ec": 1.0, "dc": 0.2}


def slotted(port: float = 100.0, link: float = math.inf, memory: float = 1000.0) -> Cluster:
    """a, b and c, each with two slots: a.1, a.2 ..."""
    base = cluster(["a", "b", "c"], Link(link, 0.0), up_bytes_per_second=port, down_bytes_per_second=port)
    devices = tuple(msgspec.structs.replace(device, memory_bytes_per_second=memory) for device in base.devices)
    return with_slots(Cluster(base.name, devices, base.link), 2)


@pytest.mark.parametrize("targets", [("b.1", "c.1"), ("b.1", "b.2"), ("b.1", "b.1")])
def test_slots_share_their_devices_port(targets: tuple[str, str]) -> None:
    """50 B through 100 B/s: 0.5 s alone, and both 1 s at the same time, wherever they go."""
    run = Clock(LinkNetwork(slotted()))
    run.start("a.1", targets[0], 50)
    run.until()
    assert [end for _, end in run.finished] == [0.5]
    run.start("a.1", targets[0], 50)
    run.start("a.2", targets[1], 50)
    run.until()
    assert [end for _, end in run.finished] == [0.5, 1.5, 1.5]


def test_slots_share_the_port_that_receives() -> None:
    run = Clock(LinkNetwork(slotted()))
    run.start("b.1", "a.1", 50)
    run.start("c.1", "a.2", 50)
    run.until()
    assert [end for _, end in run.finished] == [1.0, 1.0]


def test_slots_share_the_link_between_their_devices() -> None:
    """Each direction of a - b carries 20 B/s in all, and a - c another 20."""
    run = Clock(LinkNetwork(slotted(link=20.0)))
    for source, target in [("a.1", "b.1"), ("a.2", "b.2"), ("a.1", "c.1"), ("b.1", "a.1")]:
        run.start(source, target, 10)
    assert [transfer.rate for transfer in run.ends] == [10.0, 10.0, 20.0, 20.0]
    run.until()
    assert [end for _, end in run.finished] == [0.5, 0.5, 1.0, 1.0]


def test_slots_of_one_device_exchange_as_fast_as_its_memory() -> None:
    """1000 B/s between a.1 and a.2, each way, while both send through the port of 100 B/s."""
    run = Clock(LinkNetwork(slotted()))
    run.start("a.1", "a.2", 500, "there")
    run.start("a.2", "a.1", 500, "back")
    run.start("a.1", "b.1", 50, "out")
    run.start("a.2", "c.1", 50, "out too")
    run.until()
    assert dict(run.finished) == {"there": 0.5, "back": 0.5, "out": 1.0, "out too": 1.0}


def test_a_host_may_bear_the_name_of_a_device_elsewhere() -> None:
    """x, on y, sends to y inside; z, on x, to y through ports: they share nothing."""
    base = cluster(["x", "y", "z"], Link(100.0, 0.0))
    hosts = {"x": "y", "z": "x"}
    devices = tuple(msgspec.structs.replace(one, host=hosts.get(one.name, "")) for one in base.devices)
    run = Clock(LinkNetwork(Cluster("made", devices, base.link)))
    run.start("x", "y", 50)
    run.start("z", "y", 50)
    run.until()
    assert [end for _, end in run.finished] == [0.5, 0.5]


def test_an_uplink_is_shared_by_all_devices_of_its_site() -> None:
    """a and b, in a site, send to c and d outside, and to each other past the uplink."""
    base = cluster(list("abcd"), HUNDRED)
    devices = tuple(msgspec.structs.replace(one, site="s" if one.name in "ab" else "") for one in base.devices)
    run = Clock(LinkNetwork(Cluster("made", devices, HUNDRED, (), (Site("s", 60.0, 120.0),))))
    run.start("a", "c", 30)
    run.start("b", "d", 30)
    run.start("a", "b", 50)
    run.start("c", "a", 50, "in")
    run.until()
    assert dict(run.finished) == {"ab": 0.5, "in": 0.5, "ac": 1.0, "bd": 1.0}


def test_what_a_device_relays_crosses_the_uplinks_before_and_behind_it() -> None:
    """a and b are in one site, and reach each other through e outside: out through its uplink, and in again."""
    base = cluster(list("abcde"), HUNDRED)
    devices = tuple(msgspec.structs.replace(one, site="s" if one.name in "ab" else "") for one in base.devices)
    links = (DirectedLink("a", "b", HUNDRED, "e"),)
    run = Clock(LinkNetwork(Cluster("made", devices, HUNDRED, links, (Site("s", 40.0, 60.0),))))
    run.start("a", "b", 20)
    run.start("b", "c", 20)  # half of the uplink out
    run.start("d", "a", 40)  # what the relayed transfer leaves of the uplink in
    run.start("e", "c", 80)  # nothing of theirs: e has no port of its own
    run.until()
    assert dict(run.finished) == {"ab": 1.0, "bc": 1.0, "da": 1.0, "ec": 0.8}


def test_an_unlimited_link_takes_no_time() -> None:
    run = clock(Link(math.inf, 0.0))
    run.start("a", "b", 1e12)
    run.start("a", "b", 1e12)
    run.until()
    assert [end for _, end in run.finished] == [0.0, 0.0]


def test_nothing_to_send_takes_no_time() -> None:
    run = clock()
    run.start("a", "b", 0)
    run.until()
    assert run.finished == [("ab", 0.0)]


# Against a reference

Rates = st.sampled_from((1, 2, 3, 5, 10, 40))


@st.composite
def in_sites(draw: st.DrawFn, made: Cluster) -> Cluster:
    """The cluster with its devices in sites, some within others, or in none."""
    sites: list[Site] = []
    for number in range(draw(st.integers(0, 4))):
        up, down = (float(draw(Rates)) if draw(st.booleans()) else math.inf for _ in range(2))
        link = Link(float(draw(Rates)), 0.0) if draw(st.booleans()) else None
        within = draw(st.sampled_from(["", *(site.name for site in sites)]))
        sites.append(Site(f"s{number}", up, down, 0.0, link, within))
    at = st.sampled_from(["", *(site.name for site in sites)])
    devices = tuple(msgspec.structs.replace(device, site=draw(at)) for device in made.devices)
    return Cluster("drawn", devices, made.link, made.links, tuple(sites))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Cluster, list[tuple[str, str]]]:
    names = "abcd"[: draw(st.integers(2, 4))]
    pairs = [(one, two) for one in names for two in names if one != two]
    base = cluster(list(names), Link(float(draw(Rates)), 0.0))
    devices = tuple(
        msgspec.structs.replace(
            device,
            up_bytes_per_second=float(draw(Rates)) if draw(st.booleans()) else math.inf,
            down_bytes_per_second=float(draw(Rates)) if draw(st.booleans()) else math.inf,
        )
        for device in base.devices
    )
    special = draw(st.sets(st.sampled_from(pairs), max_size=3))
    relays = st.sampled_from(["", "", "coordinator", *base.names])
    drawn = {pair: draw(relays) for pair in sorted(special)}
    links = tuple(
        DirectedLink(*pair, Link(float(draw(Rates)), 0.0), "" if relay in pair else relay)
        for pair, relay in drawn.items()
    )
    flows = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=7))
    made = Cluster("drawn", devices, base.link, links)
    if draw(st.booleans()):
        return draw(in_sites(made)), flows
    slots = with_slots(made, 2)
    pairs = [(one, two) for one in slots.names for two in slots.names if one != two]
    return slots, draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=7))


def crossed(made: Cluster, source: str, target: str) -> dict[tuple[str, ...], Fraction]:
    rate, a, b = made.link_between(source, target).bytes_per_second, *(name.split(".")[0] for name in (source, target))
    limits: dict[tuple[str, ...], float] = {
        ("link", a, b): rate,
        ("up", a): made.device(source).up_bytes_per_second,
        ("down", b): made.device(target).down_bytes_per_second,
    }
    by = made.relays.get((source, target), "")
    stops = [made.device(name) for name in (source, *[by] * (by in made.names), target)]
    for one, other in zip(stops, stops[1:]):
        if one.host_name != other.host_name:
            limits |= {("up", one.host_name): one.up_bytes_per_second}
            limits |= {("down", other.host_name): other.down_bytes_per_second}
        way = made.tree.way(one.site, other.site)
        limits |= {("out of", site.name): site.up_bytes_per_second for site in way.leaves}
        limits |= {("into", site.name): site.down_bytes_per_second for site in way.enters}
    if by and by not in made.names:
        limits["relay", by] = made.relay_rates[by]
    if a == b:
        limits = {("memory", source, target): rate}
    return {name: Fraction(limit) for name, limit in limits.items() if limit < math.inf}


def max_min(made: Cluster, flows: list[tuple[str, str]]) -> list[Fraction]:
    """By definition: raise every rate that can still rise, equally, as far as the first full resource allows."""
    uses = [crossed(made, *flow) for flow in flows]
    room = {name: limit for use in uses for name, limit in use.items()}
    rates = [Fraction(0)] * len(flows)
    rising = set(range(len(flows)))
    while rising:
        counts = {name: sum(name in uses[flow] for flow in rising) for name in room}
        step = min(room[name] / counts[name] for name in room if counts[name])
        for flow in rising:
            rates[flow] += step
        room = {name: left - step * counts[name] for name, left in room.items()}
        rising = {flow for flow in rising if all(room[name] > 0 for name in uses[flow])}
    return rates


@settings(max_examples=300, deadline=None)
@given(crowds())
def test_rates_are_max_min_fair(drawn: tuple[Cluster, list[tuple[str, str]]]) -> None:
    made, flows = drawn
    run = Clock(LinkNetwork(made))
    for number, (source, target) in enumerate(flows):
        run.start(source, target, 1e6, str(number))
    got = {str(transfer.label): transfer.rate for transfer in run.ends}
    expected = max_min(made, flows)
    assert [got[str(number)] for number in range(len(flows))] == pytest.approx([float(rate) for rate in expected])
    used: dict[tuple[str, ...], float] = {}
    for number, flow in enumerate(flows):
        for name in crossed(made, *flow):
            used[name] = used.get(name, 0.0) + got[str(number)]
    limits = {name: float(limit) for flow in flows for name, limit in crossed(made, *flow).items()}
    assert all(rate <= limits[name] * (1 + 1e-9) for name, rate in used.items()), "more than a link carries"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(crowds(), st.data())
def test_rates_are_fair_again_when_one_has_ended(
    drawn: tuple[Cluster, list[tuple[str, str]]], data: st.DataObject
) -> None:
    made, flows = drawn
    network = LinkNetwork(made)
    transfers = {str(n): network.start(*flow, 1e6, str(n), 0.0) for n, flow in enumerate(flows)}
    network.settle(0.0)
    gone = data.draw(st.integers(0, len(flows) - 1))
    network.end(transfers.pop(str(gone)), 1.0)
    network.settle(1.0)
    rest = [number for number in range(len(flows)) if number != gone]
    expected = max_min(made, [flows[number] for number in rest])
    assert [transfers[str(n)].rate for n in rest] == pytest.approx([float(rate) for rate in expected])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(crowds(), st.lists(st.integers(1, 100), min_size=7, max_size=7))
def test_everything_sent_arrives_and_no_limit_is_broken(
    drawn: tuple[Cluster, list[tuple[str, str]]], sizes: list[int]
) -> None:
    """Each resource needs at least its bytes over its rate; all ends lie between that and one after another."""
    made, flows = drawn
    run = Clock(LinkNetwork(made))
    loads: dict[tuple[str, ...], Fraction] = {}
    for number, (source, target) in enumerate(flows):
        run.start(source, target, sizes[number], str(number))
        for name, limit in crossed(made, source, target).items():
            loads[name] = loads.get(name, Fraction(0)) + sizes[number] / limit
    run.until()
    assert sorted(label for label, _ in run.finished) == sorted(str(number) for number in range(len(flows)))
    last = max(end for _, end in run.finished)
    alone = [sizes[n] / made.bytes_per_second_between(*flow) for n, flow in enumerate(flows)]
    assert float(max(loads.values())) * (1 - 1e-9) <= last <= sum(alone) * (1 + 1e-9)


def test_bulk_waits_while_its_sender_has_something_urgent() -> None:
    run = clock(Link(math.inf, 0.0), up_bytes_per_second=100.0)
    run.start("a", "b", 100, "bulk", is_urgent=False)
    run.until(0.5)
    run.start("a", "c", 50, "urgent")
    run.until()
    assert run.finished == [("urgent", 1.0), ("bulk", 1.5)]


def test_bulk_of_others_does_not_wait() -> None:
    run = clock(Link(math.inf, 0.0), down_bytes_per_second=100.0)
    run.start("a", "c", 50, "bulk", is_urgent=False)
    run.start("b", "c", 50, "urgent")
    run.until()
    assert dict(run.finished) == {"bulk": 1.0, "urgent": 1.0}


def test_bulk_that_starts_beside_urgent_transfers_waits_for_all_of_them() -> None:
    run = clock(Link(math.inf, 0.0), up_bytes_per_second=100.0)
    run.start("a", "b", 50, "one")
    run.start("a", "c", 100, "two")
    run.start("a", "d", 50, "bulk", is_urgent=False)
    run.until()
    assert run.finished == [("one", 1.0), ("two", 1.5), ("bulk", 2.0)]

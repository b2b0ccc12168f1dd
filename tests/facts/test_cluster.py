"""Clusters: what a person writes, what is refused and how, and questions asked of a thousand devices."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.facts.link import HERE, DirectedLink, Link


def home() -> dict[str, Any]:
    return {
        "name": "home",
        "devices": [
            {"name": "laptop", "kind": "laptop"},
            {"kind": "pi4", "count": 2},
            {"name": "nano", "kind": "nano", "memory": "3 GB", "gflops": 60, "port": "100 Mbit/s"},
        ],
        "link": {"rate": "100 Mbit/s", "delay": "1 ms"},
        "links": [
            {"from": "laptop", "to": "pi4-1", "rate": "1 Gbit/s", "delay": "0.3 ms"},
            {"between": ["laptop", "nano"], "rate": "300 Mbit/s", "delay": "2 ms"},
        ],
    }


def test_what_a_person_writes() -> None:
    cluster = Cluster.from_dict(home())
    assert cluster.names == ("laptop", "pi4-1", "pi4-2", "nano")
    pi = cluster.device("pi4-2")
    assert (pi.kind, pi.gflops, pi.memory_bytes) == ("pi4", CATALOGUE["pi4"].gflops, 4 * 10**9)
    assert pi.source == CATALOGUE["pi4"].source
    nano = cluster.device("nano")
    assert (nano.kind, nano.gflops, nano.memory_bytes) == ("jetson-nano", 60.0, 3 * 10**9)
    assert (nano.up_bytes_per_second, nano.down_bytes_per_second) == (12.5e6, 12.5e6)
    assert nano.watts_active == CATALOGUE["jetson-nano"].watts_active
    assert "Given by hand: memory, gflops, port." in nano.source


def test_links_differ_by_pair_and_direction() -> None:
    cluster = Cluster.from_dict(home())
    assert cluster.link_between("laptop", "pi4-1") == Link(125e6, 0.0003)
    assert cluster.link_between("pi4-1", "laptop") == Link(12.5e6, 0.001)
    assert cluster.link_between("laptop", "nano") == cluster.link_between("nano", "laptop") == Link(37.5e6, 0.002)
    assert cluster.link_between("nano", "nano") == HERE
    assert HERE.seconds(10**9) == 0
    assert Link(1e6, 0.5).seconds(2e6) == 2.5


def test_a_link_keeps_the_default_for_what_it_leaves_out() -> None:
    raw = home()
    raw["links"] = [
        {"from": "laptop", "to": "nano", "delay": "8 ms"},
        {"from": "nano", "to": "laptop", "rate": "1 MB/s"},
    ]
    cluster = Cluster.from_dict(raw)
    assert cluster.link_between("laptop", "nano") == Link(12.5e6, 0.008)
    assert cluster.link_between("nano", "laptop") == Link(1e6, 0.001)


def test_a_pair_that_reaches_each_other_through_a_relay() -> None:
    raw = home()
    raw["links"] = [
        {"between": ["nano", "pi4-1"], "rate": "20 Mbit/s", "relay": "laptop"},
        {"from": "laptop", "to": "nano", "rate": "4 Mbit/s", "relay": "coordinator"},
    ]
    cluster = Cluster.from_dict(raw)
    assert cluster.relays == {
        ("nano", "pi4-1"): "laptop", ("pi4-1", "nano"): "laptop", ("laptop", "nano"): "coordinator",
    }  # fmt: skip
    assert cluster.relay_rates == {"laptop": 2.5e6, "coordinator": 0.5e6}
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert cluster.with_link(Link(1.0, 0.0), ("nano", "pi4-1")).relays == cluster.relays
    assert set(cluster.without("nano").relays) == set()


@pytest.mark.parametrize(
    ("relay", "problem"), [("nano", "cannot relay between itself"), ("a b", "cannot name"), (3, "text")]
)
def test_a_relay_that_makes_no_sense_is_refused(relay: object, problem: str) -> None:
    raw = home()
    raw["links"] = [{"from": "laptop", "to": "nano", "relay": relay}]
    with pytest.raises(BadValue, match=problem):
        Cluster.from_dict(raw)


def test_a_transfer_is_held_by_the_ports_of_a_device_that_relays() -> None:
    raw = home()
    raw["links"] = [{"from": "laptop", "to": "pi4-1", "rate": "1 Gbit/s", "relay": "nano"}]
    assert Cluster.from_dict(raw).bytes_per_second_between("laptop", "pi4-1") == 12.5e6  # the nano's port


def test_a_transfer_is_held_by_the_narrowest_of_link_and_ports() -> None:
    cluster = Cluster.from_dict(home())
    assert cluster.bytes_per_second_between("laptop", "nano") == 12.5e6  # the nano's port, not the 300 Mbit/s link
    assert cluster.bytes_per_second_between("laptop", "pi4-1") == 125e6
    assert cluster.bytes_per_second_between("nano", "nano") == math.inf


def shared_host() -> dict[str, Any]:
    """Two workers on `pi`, one of them called so, and a third machine."""
    each = {"gflops": 1, "memory": "1 GB", "port": "10 MB/s"}
    return {
        "name": "shared",
        "devices": [
            {"name": "pi", **each},
            {"name": "pi.2", "host": "pi", **each},
            {"name": "desk", "gflops": 1, "memory": "1 GB", "port": "20 MB/s"},
        ],
        "link": {"rate": "15 MB/s", "delay": "1 ms"},
        "links": [{"between": ["pi", "pi.2"], "rate": "3 GB/s", "delay": 0}],
    }


def test_devices_of_one_host_pass_no_port_among_themselves() -> None:
    cluster = Cluster.from_dict(shared_host())
    assert [(device.host, device.host_name) for device in cluster.devices] == [("", "pi"), ("pi", "pi"), ("", "desk")]
    assert cluster.bytes_per_second_between("pi", "pi.2") == cluster.bytes_per_second_between("pi.2", "pi") == 3e9
    for name in ("pi", "pi.2"):  # alone, each may use all of the port
        assert cluster.bytes_per_second_between(name, "desk") == cluster.bytes_per_second_between("desk", name) == 10e6
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert cluster.without("pi").bytes_per_second_between("pi.2", "desk") == 10e6


def test_devices_of_one_host_have_one_port_and_one_link_to_another() -> None:
    raw = shared_host()
    raw["devices"][1]["up"] = "5 MB/s"
    with pytest.raises(BadValue, match=r"'pi' and 'pi\.2' share one port; up_bytes_per_second differs"):
        Cluster.from_dict(raw)
    raw = shared_host()
    raw["links"].append({"from": "pi", "to": "desk", "rate": "1 MB/s"})
    with pytest.raises(BadValue, match="from pi to desk there is one link, but its rate differs"):
        Cluster.from_dict(raw)
    raw["links"].append({"from": "pi.2", "to": "desk", "rate": "1 MB/s", "delay": 0})
    cluster = Cluster.from_dict(raw)
    assert cluster.bytes_per_second_between("pi", "desk") == cluster.bytes_per_second_between("pi.2", "desk") == 1e6
    assert cluster.bytes_per_second_between("desk", "pi") == 10e6


def test_a_host_that_is_no_name_is_refused() -> None:
    with pytest.raises(BadValue, match="a: host 'b c' cannot name a device"):
        Device(name="a", gflops=1, memory_bytes=1, host="b c")


def test_up_and_down_win_over_port() -> None:
    entry = {"gflops": 1, "memory": 1, "port": "unlimited", "up": "8 bit/s"}
    device = Cluster.from_dict({"devices": [entry]}).devices[0]
    assert (device.name, device.up_bytes_per_second, device.down_bytes_per_second) == ("custom", 1.0, math.inf)


def _set(raw: dict[str, Any], path: list[Any], value: object) -> dict[str, Any]:
    place: Any = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return raw


HUGE = 16**5000  # YAML's hexadecimal numbers have no limit
BOMB: list[object] = ["x"]
for _ in range(60):
    BOMB = [BOMB] * 10  # YAML aliases build this in a few lines; printed in full it would not end

REFUSED: list[tuple[list[Any], object, type[ManyhandsError], str]] = [
    (["devices"], [], BadValue, "devices: there are 0; there must be 1 to 10000"),
    (["devices"], None, BadFile, "devices: is missing"),
    (["devices"], {"kind": "pi4"}, BadFile, "devices: .* is not a list"),
    (["device"], [], UnknownName, "device: there is no such field(.|\n)*devices"),
    ([7], [], UnknownName, "7: there is no such field"),
    (["name"], 5, BadValue, "name: 5 must be a text"),
    (["devices", 1], "pi4", BadFile, r"devices\[1\]: 'pi4' is not a set"),
    (["devices", 1, "kind"], "pi44", UnknownName, r"devices\[1\]\.kind: .*'pi44'(.|\n)*pi4"),
    (["devices", 1, "kind"], BOMB, BadValue, r"devices\[1\]\.kind: .* must be a text"),
    (["devices", 1, "kind"], "custom", BadFile, r"devices\[1\]\.gflops: is missing"),
    (["devices", 1, "memroy"], "3 GB", UnknownName, r"devices\[1\]\.memroy: (.|\n)*Did you mean memory"),
    (["devices", 1, "host"], "-x", BadValue, r"devices\[1\]\.host: '-x' cannot name a device"),
    (["devices", 1, "host"], 7, BadValue, r"devices\[1\]\.host: 7 cannot name a device"),
    (["devices", 1, "count"], 0, BadValue, r"devices\[1\]\.count: 0 must be a whole number from 1 to 10000"),
    (["devices", 1, "count"], 2.5, BadValue, r"devices\[1\]\.count: 2.5"),
    (["devices", 1, "count"], True, BadValue, r"devices\[1\]\.count: True"),
    (["devices", 1, "count"], 10_000, BadValue, "devices: there are 10001; there must be 1 to 10000"),
    (["devices", 1, "name"], "a b", BadValue, r"devices\[1\]\.name: 'a b' cannot name"),
    (["devices", 1, "name"], 4, BadValue, r"devices\[1\]\.name: 4 cannot name"),
    (["devices", 1, "name"], "../../etc", BadValue, r"devices\[1\]\.name"),
    (["devices", 3], {"kind": "laptop"}, BadValue, "devices: two devices have the name 'laptop'"),
    (["devices", 2, "gflops"], 0, BadValue, r"devices\[2\]\.gflops: 0 must be > 0"),
    (["devices", 2, "gflops"], "fast", BadValue, r"devices\[2\]\.gflops: 'fast' must be > 0"),
    (["devices", 2, "gflops"], math.nan, BadValue, r"devices\[2\]\.gflops: nan"),
    (["devices", 2, "gflops"], math.inf, BadValue, r"devices\[2\]\.gflops: inf"),
    (["devices", 2, "gflops"], HUGE, BadValue, r"devices\[2\]\.gflops: .* must be > 0"),
    (["devices", 2, "gflops"], BOMB, BadValue, r"devices\[2\]\.gflops: .* must be > 0"),
    (["devices", 2, "memory"], "3 Gigs", BadValue, r"devices\[2\]\.memory: cannot read '3 Gigs'"),
    (["devices", 2, "memory"], 0, BadValue, r"devices\[2\]\.memory: 0 must be > 0"),
    (["devices", 2, "memory"], "1e308 TB", BadValue, r"devices\[2\]\.memory: '1e308 TB' must be .* between 0 and"),
    (["devices", 2, "memory"], HUGE, BadValue, r"devices\[2\]\.memory"),
    (["devices", 2, "memory_rate"], "unlimited", BadValue, r"devices\[2\]\.memory_rate: cannot read 'unlimited'"),
    (["devices", 2, "port"], 100, BadValue, r"devices\[2\]\.port: 100 has no unit"),
    (["devices", 2, "up"], "0 Mbit/s", BadValue, r"devices\[2\]\.up: '0 Mbit/s' must be > 0"),
    (["devices", 2, "watts_idle"], -1, BadValue, r"devices\[2\]\.watts_idle: -1 must be >= 0"),
    (["devices", 2, "estimated"], "no", BadValue, r"devices\[2\]\.estimated: 'no' must be true or false"),
    (["devices", 2, "source"], 3, BadValue, r"devices\[2\]\.source: 3 must be a text"),
    (["link"], None, BadFile, "link: is missing or empty"),
    (["link"], "100 Mbit/s", BadFile, "link: '100 Mbit/s' is not a set"),
    (["link"], {"rate": "1 MB/s"}, BadFile, r"link\.delay: is missing"),
    (["link", "rate"], "0 Mbit/s", BadValue, r"link\.rate: '0 Mbit/s' must be > 0"),
    (["link", "rate"], "-5 Mbit/s", BadValue, r"link\.rate: cannot read '-5 Mbit/s'"),
    (["link", "rate"], "1e308 Gbit/s", BadValue, r"link\.rate: '1e308 Gbit/s' must be .* between 0 and"),
    (["link", "rate"], "1" * 100_000 + "x", BadValue, r"link\.rate"),
    (["link", "delay"], "-1 ms", BadValue, r"link\.delay: cannot read '-1 ms'"),
    (["link", "latency"], "1 ms", UnknownName, r"link\.latency: there is no such field"),
    (["links"], {}, BadFile, "links: {} is not a list"),
    (["links", 0, "to"], "pi4-3", UnknownName, r"links\[0\]\.to: .*'pi4-3'(.|\n)*Did you mean pi4-"),
    (["links", 0, "to"], None, UnknownName, r"links\[0\]\.to: .*None"),
    (["links", 0, "to"], BOMB, UnknownName, r"links\[0\]\.to"),
    (["links", 0, "to"], "laptop", BadValue, "links: the link from 'laptop' to 'laptop' leads back"),
    (["links", 0, "between"], ["laptop", "nano"], BadFile, r"links\[0\]: a link has two ends"),
    (["links", 1, "between"], ["laptop"], BadFile, r"links\[1\]: a link has two ends"),
    (["links", 1, "between"], ["laptop", "nani"], UnknownName, r"links\[1\]\.between\[1\]: .*'nani'(.|\n)*nano"),
    (
        ["links", 1, "between"],
        ["laptop", "pi4-1"],
        BadValue,
        "links: the link from 'laptop' to 'pi4-1' is written twice",
    ),
    (["links", 0, "rate"], "0 B/s", BadValue, r"links\[0\]\.rate: '0 B/s' must be > 0"),
    (["links", 0, "rat"], "1 B/s", UnknownName, r"links\[0\]\.rat: (.|\n)*rate"),
]


@pytest.mark.quick(every=19)
@pytest.mark.parametrize(("path", "value", "kind", "message"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_every_mistake_is_refused_by_its_path(
    path: list[Any], value: object, kind: type[ManyhandsError], message: str
) -> None:
    raw = home()
    if path == ["devices", 3]:
        raw["devices"].append(None)
    with pytest.raises(ManyhandsError, match=message) as caught:
        Cluster.from_dict(_set(raw, path, value))
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("raw", [None, [], "home", 3, [home()]])
def test_a_document_that_is_no_cluster(raw: object) -> None:
    with pytest.raises(BadFile, match="cluster: ") as caught:
        Cluster.from_dict(raw)
    assert "devices" in caught.value.hint


def test_one_device_needs_no_link_but_two_do() -> None:
    assert Cluster.from_dict({"devices": [{"kind": "pi4"}]}).link == HERE
    with pytest.raises(BadFile, match="link: is missing"):
        Cluster.from_dict({"devices": [{"kind": "pi4", "count": 2}]})


def test_an_unknown_device_names_the_closest() -> None:
    cluster = Cluster.from_dict(home())
    for ask in (cluster.device, cluster.without, lambda name: cluster.link_between("laptop", name)):
        with pytest.raises(UnknownName, match="'laptpo'") as caught:
            ask("laptpo")
        assert caught.value.hint == "Did you mean laptop?"


def test_a_device_leaves_with_its_links() -> None:
    cluster = Cluster.from_dict(home())
    left = cluster.without("nano")
    assert left.names == ("laptop", "pi4-1", "pi4-2")
    assert [(one.sender, one.receiver) for one in left.links] == [("laptop", "pi4-1")]
    assert "nano" in cluster.names
    with pytest.raises(BadValue, match="1 to"):
        Cluster.local(1).without("local-1")


def test_a_changed_link() -> None:
    slow = Link(1e3, 0.1)
    cluster = Cluster.from_dict(home())
    assert cluster.with_link(slow).link_between("pi4-1", "pi4-2") == slow
    assert cluster.with_link(slow).link_between("laptop", "pi4-1") == Link(125e6, 0.0003)
    changed = cluster.with_link(slow, ("laptop", "pi4-1"))
    assert changed.link_between("laptop", "pi4-1") == slow
    assert changed.link_between("pi4-1", "laptop") == cluster.link
    with pytest.raises(UnknownName, match="nobody"):
        cluster.with_link(slow, ("laptop", "nobody"))


def test_local_workers_on_gpus_and_beside_them() -> None:
    assert [device.compute for device in Cluster.local(3, gpus=2).devices] == ["cuda:0", "cuda:1", "cpu"]
    several = Cluster.local(5, gpus=[0, 0, 1, 1])
    assert [device.compute for device in several.devices] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cpu"]
    assert several.names == Cluster.local(5).names
    for count, gpus in ((1, 2), (1, [0, 0]), (2, -1), (2, [0, -1])):
        with pytest.raises(BadValue, match="gpus="):
            Cluster.local(count, gpus=gpus)


def test_local_workers_are_equal_but_for_their_names() -> None:
    cluster = Cluster.local(3, gflops=7.0)
    assert cluster.names == ("local-1", "local-2", "local-3")
    assert {(device.kind, device.gflops) for device in cluster.devices} == {("local", 7.0)}
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    for bad in (0, -1, True, 10_001):
        with pytest.raises(BadValue, match=f"{bad}"):
            Cluster.local(bad)


def test_facts_built_in_code_are_checked_too() -> None:
    with pytest.raises(BadValue, match=r"gflops is 0\.0"):
        Device(name="a", gflops=0.0, memory_bytes=1)
    with pytest.raises(BadValue, match="watts_idle is -1"):
        Device(name="a", gflops=1.0, memory_bytes=1, watts_idle=-1)
    with pytest.raises(BadValue, match="rate is 0"):
        Link(0.0, 0.0)
    with pytest.raises(BadValue, match="delay is nan"):
        Link(1.0, math.nan)


def test_a_cluster_is_a_frozen_hashable_fact() -> None:
    cluster = Cluster.from_dict(home())
    assert cluster.device("nano") is cluster.devices[3]  # fills the cache, which must not count
    assert cluster == Cluster.from_dict(home())
    assert hash(cluster) == hash(Cluster.from_dict(home()))
    with pytest.raises(AttributeError):
        cluster.name = "other"  # type: ignore[misc]


def test_a_thousand_devices_answer_at_once() -> None:
    raw = {"devices": [{"kind": "pi4", "count": 1000}], "link": {"rate": "1 MB/s", "delay": 0}}
    raw["links"] = [{"from": "pi4-1", "to": f"pi4-{n}", "delay": "1 ms"} for n in range(2, 1001)]
    began = time.process_time()
    cluster = Cluster.from_dict(raw)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    total = sum(cluster.link_between("pi4-1", name).delay_seconds for name in cluster.names for _ in range(50))
    assert total == pytest.approx(999 * 50 * 1e-3)
    assert time.process_time() - began < 2.0  # a search per question would take tens of seconds


amounts = st.floats(1e-12, 1e17, exclude_min=True)
rates = amounts | st.just(math.inf)
link_facts = st.builds(Link, rates, st.floats(0, 1e6))
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    chosen = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    device = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["custom", "local", *CATALOGUE]),
            "gflops": amounts, "memory_bytes": st.integers(1, 2**53), "memory_bytes_per_second": amounts,
            "cores": st.integers(1, 256), "operator_seconds": st.floats(0, 10), "watts_active": st.floats(0, 1e4),
            "watts_idle": st.floats(0, 1e4), "watts_transfer": st.floats(0, 1e4), "up_bytes_per_second": rates,
            "down_bytes_per_second": rates, "estimated": st.booleans(), "source": st.text(max_size=20),
        }
    )  # fmt: skip
    devices = tuple(Device(name=name, **draw(device)) for name in chosen)
    if len(devices) > 1 and draw(st.booleans()):  # the last beside the one before it
        facts = msgspec.structs.asdict(devices[-2]) | {"name": devices[-1].name, "host": devices[-2].name}
        devices = (*devices[:-1], Device(**facts))
        pairs = [(chosen[-1], chosen[-2]), (chosen[-2], chosen[-1])]
    else:
        pairs = [(a, b) for a in chosen for b in chosen if a != b]
    picked = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    links = tuple(DirectedLink(a, b, draw(link_facts)) for a, b in picked)
    return Cluster(draw(st.text(max_size=10)), devices, draw(link_facts), links)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(clusters())
def test_written_and_read_back_every_digit_is_the_same(cluster: Cluster) -> None:
    document = json.loads(json.dumps(cluster.to_dict(), allow_nan=False))
    assert Cluster.from_dict(document) == cluster


plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["pi4", "1 MB/s"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from([path for path, *_ in REFUSED if path != ["devices", 3]]), plain)
def test_no_document_breaks_the_reader(path: list[Any], value: object) -> None:
    try:
        cluster = Cluster.from_dict(_set(home(), path, value))
    except ManyhandsError:
        return
    assert Cluster.from_dict(cluster.to_dict()) == cluster

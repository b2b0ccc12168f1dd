"""Sites in a cluster's file, and the tree of links that they make."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName
from manyhands.facts.link import HERE, Link
from manyhands.facts.site import MOST_LEVELS, Site, SiteTree


def world() -> dict[str, Any]:
    each = {"gflops": 1, "memory": "1 GB"}
    return {
        "name": "world",
        "sites": [
            {"name": "paris", "rate": "10 MB/s", "delay": "10 ms", "link": {"rate": "100 MB/s", "delay": "1 ms"}},
            {"name": "lab", "count": 2, "up": "2 MB/s", "down": "4 MB/s", "delay": "3 ms", "within": "paris"},
        ],
        "devices": [
            {"name": "pi", "count": 2, "site": "lab", **each},
            {"name": "server", "site": "paris", "port": "1 GB/s", **each},
            {"name": "desk", **each},
        ],
        "link": {"rate": "1 GB/s", "delay": "5 ms"},
    }


def test_a_device_of_several_sites_is_in_each() -> None:
    cluster = Cluster.from_dict(world())
    assert cluster.names == ("lab-1.pi-1", "lab-1.pi-2", "lab-2.pi-1", "lab-2.pi-2", "server", "desk")
    assert [device.site for device in cluster.devices] == ["lab-1", "lab-1", "lab-2", "lab-2", "paris", ""]


@pytest.mark.parametrize(
    ("sender", "receiver", "rate", "milliseconds"),
    [
        ("lab-1.pi-1", "lab-1.pi-1", math.inf, 0),
        ("lab-1.pi-1", "lab-1.pi-2", 100e6, 1),  # without a link of its own, the lab has that of paris
        ("lab-1.pi-1", "lab-2.pi-1", 2e6, 1 + 3 + 3),
        ("lab-1.pi-1", "server", 2e6, 1 + 3),
        ("server", "lab-1.pi-1", 4e6, 1 + 3),
        ("server", "desk", 10e6, 5 + 10),
        ("desk", "lab-2.pi-2", 4e6, 5 + 10 + 3),
    ],
)
def test_the_link_of_a_pair_is_its_way_through_the_tree(
    sender: str, receiver: str, rate: float, milliseconds: float
) -> None:
    cluster = Cluster.from_dict(world())
    link = cluster.link_between(sender, receiver)
    assert link.bytes_per_second == rate
    assert link.delay_seconds == pytest.approx(milliseconds / 1000)
    assert cluster.bytes_per_second_between(sender, receiver) == rate


def test_a_link_written_for_a_pair_wins_but_crosses_the_uplinks() -> None:
    cluster = Cluster.from_dict(world()).with_link(Link(50e6, 0.001), ("server", "desk"))
    assert cluster.link_between("server", "desk") == Link(50e6, 0.001)
    assert cluster.bytes_per_second_between("server", "desk") == 10e6
    assert cluster.sites


def test_a_cluster_with_sites_is_written_and_read() -> None:
    cluster = Cluster.from_dict(world())
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert "sites" not in Cluster.local(2).to_dict()
    assert cluster.without("desk").with_devices("few", cluster.devices[:2]).sites == cluster.sites


def test_places_are_sites_and_shared_hosts() -> None:
    raw = world()
    raw["devices"].append(
        {"name": "worker", "host": "server", "site": "paris", "gflops": 1, "memory": 1, "port": "1 GB/s"}
    )
    cluster = Cluster.from_dict(raw)
    assert cluster.place("lab-1.pi-1") == "paris/lab-1"
    assert cluster.place("server") == cluster.place("worker") == "paris/server"
    assert cluster.place("server", hosts=False) == "paris"
    assert cluster.place("worker", sites=False) == "server"
    assert cluster.place("desk") == ""


def changed(path: list[Any], value: object) -> dict[str, Any]:
    raw = place = world()
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "kind", "words"),
    [
        (["sites"], {}, BadFile, "sites: {} is not a list"),
        (["sites", 0, "name"], None, BadValue, r"sites\[0\]\.name: None cannot name"),
        (["sites", 0, "name"], "", BadFile, r"sites\[0\]\.name: is missing"),
        (["sites", 0, "speed"], 1, UnknownName, r"sites\[0\]\.speed: there is no such field"),
        (["sites", 0, "rate"], "0 MB/s", BadValue, r"sites\[0\]\.up: '0 MB/s' must be > 0"),
        (["sites", 0, "delay"], "-1 ms", BadValue, r"sites\[0\]\.delay"),
        (["sites", 0, "link"], {"rate": "1 MB/s"}, BadFile, r"sites\[0\]\.link\.delay: is missing"),
        (["sites", 1, "count"], 0, BadValue, r"sites\[1\]\.count: 0 must be a whole number"),
        (["sites", 1, "within"], "pari", UnknownName, "(?i)pari(.|\n)*paris"),
        (["sites", 1], {"name": "paris"}, BadValue, "sites: two sites have the name 'paris'"),
        (["sites", 0, "within"], "paris", BadValue, "'paris' is within itself"),
        (["devices", 1, "site"], "rome", UnknownName, "(?i)rome"),
    ],
)
def test_what_is_no_tree_of_sites_is_refused(
    path: list[Any], value: object, kind: type[ManyhandsError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Cluster.from_dict(changed(path, value))


def test_workers_of_one_host_are_in_one_site() -> None:
    raw = world()
    raw["devices"].append({"name": "worker", "host": "server", "gflops": 1, "memory": 1, "port": "1 GB/s"})
    with pytest.raises(BadValue, match="on one host, but in different sites"):
        Cluster.from_dict(raw)


def test_sites_lie_only_so_deep() -> None:
    sites = [Site("s0"), *(Site(f"s{number}", within=f"s{number - 1}") for number in range(1, MOST_LEVELS + 1))]
    SiteTree(sites[:-1], HERE)
    with pytest.raises(BadValue, match=f"more than {MOST_LEVELS} levels"):
        SiteTree(sites, HERE)


def test_a_lab_plays_no_sites() -> None:
    with pytest.raises(BadValue, match="a lab plays no uplinks"):
        Cluster.lab(Cluster.from_dict(world()))
    assert Cluster.lab(Cluster("one", (Device(name="a", gflops=1, memory_bytes=1),))).cluster.sites == ()

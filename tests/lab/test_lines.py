"""The lines that make a lab's network, without a kernel to read them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.lab import lines
from manyhands.lab.lines import PortFlow

MBIT = 125_000.0
rates = st.floats(min_value=1000.0, max_value=2e9)


def test_members_have_addresses_of_their_own() -> None:
    assert [lines.address_of(number) for number in (0, 1, 254, 255, 10_000)] == [
        "10.77.0.1", "10.77.0.2", "10.77.0.255", "10.77.1.0", "10.77.39.17",
    ]  # fmt: skip
    assert lines.hardware_of(0x1234) == "02:6d:68:00:12:34"


@pytest.mark.parametrize("name", ["a", "pi3x6", "env_a", "0.5", "x" * 64])
def test_names_a_lab_can_have(name: str) -> None:
    assert lines.check_lab_name(name) == name


@pytest.mark.parametrize("name", ["", "a-b", "-a", "../a", "a/b", "a b", "x" * 65, ".a", "a\n"])
def test_names_a_lab_cannot_have(name: str) -> None:
    with pytest.raises(BadValue, match="cannot name a lab"):
        lines.check_lab_name(name)


@given(rates)
def test_a_burst_holds_a_packet_is_short_and_fits_its_queue(rate: float) -> None:
    burst = lines.burst_bytes(rate)
    assert burst >= 2 * 1514
    assert burst == 2 * 1514 or burst / rate <= 0.0085
    assert lines.queue_bytes(rate) >= 2 * burst
    assert lines.unit_bytes(rate) * 1514 <= burst * 1448  # with a header for every packet
    assert lines.unit_bytes(rate) <= 65_536


def test_fast_ports_take_whole_pieces() -> None:
    assert lines.unit_bytes(1000 * MBIT) == lines.unit_bytes(480 * MBIT) == 65_536
    assert lines.burst_bytes(0.05 * MBIT) == 2 * 1514


@given(rates, rates)
def test_a_kept_burst_never_strands_a_piece_unless_it_must(before: float, after: float) -> None:
    old = lines.burst_bytes(before)
    kept = lines.kept_burst(old, after)
    assert kept >= lines.burst_bytes(after)
    if kept < old:
        assert old / after > 0.02  # it would have lasted too long


def test_a_port_without_a_limit_has_no_qdisc() -> None:
    assert lines.shaping_lines("p1", math.inf) == []


def test_a_port_with_one_rate() -> None:
    assert lines.shaping_lines("p1", 5 * MBIT) == [
        "qdisc add dev p1 root handle 1: tbf rate 5000000bit burst 3028 limit 125000"
    ]


def test_a_slower_pair_has_a_class_of_its_own() -> None:
    found = lines.shaping_lines("p2", 100 * MBIT, [PortFlow(3, 5 * MBIT)])
    assert found[0] == "qdisc add dev p2 root handle 1: htb default 2"
    whole, others, pair = (line for line in found if line.startswith("class"))
    assert "parent 1: classid 1:1 htb rate 100000000bit ceil 100000000bit" in whole
    assert "parent 1:1 classid 1:2 htb rate 50000000bit ceil 100000000bit" in others
    assert "parent 1:1 classid 1:13 htb rate 50000000bit ceil 100000000bit" in pair
    assert "qdisc add dev p2 parent 1:2 handle 12: tbf rate 100000000bit burst 12112 limit 2500000" in found
    assert "qdisc add dev p2 parent 1:13 handle 23: tbf rate 5000000bit burst 3028 limit 125000" in found
    assert found[-1] == "filter add dev p2 parent 1: protocol ip prio 1 u32 match ip src 10.77.0.4/32 flowid 1:13"
    assert not any("netem" in line for line in found)


def test_netem_holds_what_a_pair_delays() -> None:
    found = lines.shaping_lines("p2", math.inf, [PortFlow(1, math.inf, 0.02), PortFlow(3, 5 * MBIT, 0.0005)])
    netem = [line for line in found if "netem" in line]
    assert netem[0].startswith("qdisc add dev p2 parent 21:1 handle 8011: netem delay 20000us limit ")
    assert netem[1].startswith("qdisc add dev p2 parent 23:1 handle 8013: netem delay 500us limit ")
    held = int(netem[0].split()[-1]) * 1514
    assert held > 12.5e9 * 0.02  # all that is under way at once
    assert found.index(netem[1]) > next(index for index, line in enumerate(found) if "handle 23: tbf" in line)


def test_no_two_qdiscs_of_a_port_share_a_handle() -> None:
    flows = [PortFlow(number, MBIT, 0.001) for number in (1, 2, 17, 255, 9_999)]
    handles = [word for line in lines.shaping_lines("p3", MBIT, flows) for word in re.findall(r"handle (\w+:)", line)]
    assert len(set(handles)) == len(handles) == 1 + 2 * len(flows) + 1
    assert all(int(handle[:-1], 16) < 0xFFFF for handle in handles)


def test_a_rate_changes_in_place() -> None:
    found = lines.reshaping_lines("p1", 4 * MBIT, [], {"1:": 3027}, is_shaped=True)
    assert found == ["qdisc replace dev p1 root handle 1: tbf rate 4000000bit burst 3028 limit 100000"]
    found = lines.reshaping_lines("p1", 100 * MBIT, [], {"1:": 125_000}, is_shaped=True)
    assert found == ["qdisc replace dev p1 root handle 1: tbf rate 100000000bit burst 125000 limit 2500000"]


def test_a_burst_that_must_shrink_makes_the_qdisc_anew() -> None:
    """tbf would keep a longer piece in its queue, and all behind it, for ever."""
    found = lines.reshaping_lines("p1", 5 * MBIT, [], {"1:": 125_000}, is_shaped=True)
    assert found[0] == "qdisc del dev p1 root"
    assert "burst 3028 " in found[1]


def test_a_limit_that_is_lifted_leaves_the_queue() -> None:
    (found,) = lines.reshaping_lines("p1", math.inf, [], {"1:": 3028}, is_shaped=True)
    assert found.startswith("qdisc replace dev p1 root handle 1: tbf rate 100000000000bit burst 25000000 ")
    assert lines.reshaping_lines("p1", math.inf, [], {}, is_shaped=False) == []


def test_pairs_change_with_their_port() -> None:
    flows = [PortFlow(3, 5 * MBIT, 0.01)]
    found = lines.reshaping_lines("p2", 2 * MBIT, flows, {"12:": 12_112, "23:": 3028}, is_shaped=True)
    assert [line.split()[1] for line in found[:3]] == ["change"] * 3
    assert found[3] == "qdisc del dev p2 parent 1:2 handle 12:"
    assert found[4].startswith("qdisc add dev p2 parent 1:2 handle 12: tbf rate 2000000bit burst 3028 ")
    assert found[5].startswith("qdisc change dev p2 parent 1:13 handle 23: tbf rate 2000000bit ")
    assert len(found) == 6  # netem stays as it was
    found = lines.reshaping_lines("p2", 0.1 * MBIT, flows, {"12:": 3028, "23:": 12_112}, is_shaped=True)
    assert any("netem delay 10000us" in line for line in found)


def test_cables_and_addresses() -> None:
    found = lines.making_lines("a", ("desk", "pi4-1"), (math.inf, 5 * MBIT))
    assert found == [
        "netns add mh-a-desk",
        "netns add mh-a-pi4-1",
        "link add name p0 netns mh-a mtu 1500 type veth peer name eth0 address 02:6d:68:00:00:00 mtu 1500 "
        "netns mh-a-desk",
        "link add name p1 netns mh-a mtu 1500 type veth peer name eth0 address 02:6d:68:00:00:01 mtu 1500 "
        "gso_max_size 2896 netns mh-a-pi4-1",
    ]
    assert lines.hub_lines(2, has_bridge=False) == ["link set p0 up", "link set p1 up"]
    assert "link set p1 master br0 up" in lines.hub_lines(2, has_bridge=True)
    assert lines.forwarding_lines(2)[1] == "fdb replace 02:6d:68:00:00:01 dev p1 master static"


def test_a_member_knows_the_others_in_labs_of_a_usual_size() -> None:
    found = lines.member_lines(1, 3)
    assert "address add 10.77.0.2/16 dev eth0 noprefixroute" in found
    assert "route add 10.77.0.0/16 dev eth0 scope link src 10.77.0.2 congctl cubic" in found
    assert [line.split()[2] for line in found if "nud permanent" in line] == ["10.77.0.1", "10.77.0.3"]
    assert not any("nud permanent" in line for line in lines.member_lines(1, lines.MOST_STATIC + 1))
    assert not any("congctl" in line for line in lines.member_lines(1, 3, has_cubic=False))

"""How a cluster is played on fewer cores: proportions stay, and nothing is promised that the cores cannot give."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.cluster import Cluster, LabCluster, preset
from manyhands.facts.device import Device
from manyhands.facts.errors import BadValue, LabError, UnknownName
from manyhands.facts.lab import BUSIEST, play, rounded_up, scale_text, scaled, with_slots
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.presets import PRESETS


def cluster_of(speeds: list[float], rate: float = 1e6, delay: float = 0.001) -> Cluster:
    devices = tuple(
        Device(name=f"d{i}", gflops=speed, memory_bytes=10**9, up_bytes_per_second=rate)
        for i, speed in enumerate(speeds)
    )
    return Cluster("drawn", devices, Link(rate, delay))


SPEEDS = st.lists(st.floats(10.0, 300.0), min_size=1, max_size=12)


@given(SPEEDS, st.integers(1, 8), st.floats(5, 200), st.integers(1, 4))
def test_every_core_has_room_and_shares_are_as_speeds(
    speeds: list[float], cores: int, core_gflops: float, slots: int
) -> None:
    cluster = cluster_of(speeds)
    played = play(LabCluster(cluster, slots=slots), core_gflops=core_gflops, cores=list(range(cores)))
    assert played.scale >= 1
    for seat, speed in zip(played.seats, speeds):
        assert seat.share == pytest.approx(speed / (core_gflops * played.scale))
        assert seat.share == pytest.approx(speed / speeds[0] * played.seats[0].share)
        assert 1 <= len(seat.cores) <= min(slots, cores)
        assert set(seat.cores) <= set(range(cores))
        assert seat.memory_bytes == 10**9
    assert sum(seat.share for seat in played.seats) <= BUSIEST * cores * (1 + 1e-9)
    assert played.slowest_share == min(1.0, *(seat.share for seat in played.seats))
    if slots == 1:
        for core in range(cores):
            assert sum(seat.share for seat in played.seats if seat.cores == (core,)) <= BUSIEST * (1 + 1e-9)


@given(SPEEDS, st.floats(1.0, 500.0), st.floats(1e3, 1e8))
def test_the_ratio_of_computing_to_sending_stays(speeds: list[float], scale: float, rate: float) -> None:
    real = cluster_of(speeds, rate)
    slow = scaled(real, scale)
    for a, b in zip(real.devices, slow.devices):
        assert b.gflops * scale == pytest.approx(a.gflops)
        assert b.up_bytes_per_second * scale == pytest.approx(a.up_bytes_per_second)
        assert b.down_bytes_per_second == math.inf
        assert (b.gflops / slow.link.bytes_per_second) == pytest.approx(a.gflops / real.link.bytes_per_second)
    assert slow.link.seconds(12345) == pytest.approx(scale * real.link.seconds(12345))


@given(st.floats(1e-3, 1e6))
def test_rounded_up_has_two_digits_and_is_no_less(number: float) -> None:
    found = rounded_up(number)
    assert number * (1 - 1e-6) <= found <= number * 1.1 + 1e-9
    assert float(f"{found:.2g}") == pytest.approx(found)


def test_a_scale_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(LabError, match="need more than 80% of this machine's 2 core") as found:
        play(Cluster.lab("env-b", scale=2), core_gflops=60, cores=[0, 1])
    fits = float(found.value.hint.split()[1].removeprefix("scale="))
    assert play(Cluster.lab("env-b", scale=fits), core_gflops=60, cores=[0, 1]).scale == fits


def test_a_device_too_slow_for_the_kernel_is_refused() -> None:
    with pytest.raises(LabError, match="d0 would get"):
        play(LabCluster(cluster_of([1.0, 10_000.0])), core_gflops=60, cores=[0])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plays_on_two_cores(name: str) -> None:
    played = play(Cluster.lab(name), core_gflops=60, cores=[0, 1])
    assert played.network.names == preset(name).names
    assert scale_text(played.scale).startswith(f"time scale {played.scale:g}")


def test_slots_divide_a_device() -> None:
    real = cluster_of([4.0, 8.0]).with_link(Link(5e5, 0.01), ("d0", "d1"))
    slots = with_slots(real, 4)
    assert slots.names == (*(f"d0.{i}" for i in range(1, 5)), *(f"d1.{i}" for i in range(1, 5)))
    assert sum(device.gflops for device in slots.devices) == pytest.approx(12)
    assert sum(device.memory_bytes for device in slots.devices) == 2 * 10**9
    assert slots.link_between("d0.2", "d1.3") == Link(5e5, 0.01)
    assert slots.link_between("d1.3", "d0.2") == real.link
    assert slots.link_between("d0.1", "d0.2").bytes_per_second == real.device("d0").memory_bytes_per_second
    assert with_slots(real, 1) is real


def test_slots_share_a_port_and_pass_none_among_themselves() -> None:
    real = cluster_of([4.0, 8.0], rate=1e6).with_link(Link(5e5, 0.01), ("d0", "d1"))
    slots = with_slots(real, 3)
    assert [device.host for device in slots.devices] == ["d0"] * 3 + ["d1"] * 3
    assert {device.up_bytes_per_second for device in slots.devices} == {1e6}
    assert slots.bytes_per_second_between("d0.1", "d1.3") == real.bytes_per_second_between("d0", "d1") == 5e5
    assert slots.bytes_per_second_between("d1.3", "d0.1") == real.bytes_per_second_between("d1", "d0") == 1e6
    for device in real.devices:
        inside = slots.bytes_per_second_between(f"{device.name}.1", f"{device.name}.2")
        assert inside == device.memory_bytes_per_second > device.up_bytes_per_second
    assert Cluster.from_dict(slots.to_dict()) == slots
    assert {device.host for device in with_slots(slots, 2).devices} == {"d0", "d1"}


def test_bad_wishes() -> None:
    with pytest.raises(BadValue, match="scale is 0"):
        Cluster.lab("pi3x6", scale=0)
    with pytest.raises(BadValue, match="slots is 17"):
        Cluster.lab("pi3x6", slots=17)
    with pytest.raises(UnknownName, match="pi3-7"):
        Cluster.lab("pi3x6", traces={"pi3-7": "x.txt"})
    with pytest.raises(BadValue, match=r"d0\.1 shares a host"):
        Cluster.lab(with_slots(cluster_of([1.0, 2.0]), 2))
    with pytest.raises(UnknownName, match="pi3x7"):
        Cluster.lab("pi3x7")


def test_links_of_their_own_are_scaled_too() -> None:
    real = Cluster("two", cluster_of([1.0, 2.0]).devices, Link(1e6, 0.0), (DirectedLink("d0", "d1", Link(2e6, 0.5)),))
    assert scaled(real, 10).link_between("d0", "d1") == Link(2e5, 5.0)

"""Profiles: reading between measured points, and estimates that say they are."""

from __future__ import annotations

import itertools
import math
import statistics

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.network import Layer, Network, Op
from manyhands.facts.profile import ESTIMATE_LADDER as RUNGS
from manyhands.facts.profile import (
    DeviceProfile,
    Kernel,
    LayerTiming,
    Profile,
    Timing,
    estimate,
    estimate_cluster,
    is_increasing,
    spread_of,
)

seconds = st.floats(0, 1e3)


@st.composite
def ladders(draw: st.DrawFn) -> tuple[Timing, ...]:
    sizes = sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=6)))
    return tuple(Timing(size, draw(seconds), draw(seconds)) for size in sizes)


def _profile(*all_ladders: tuple[Timing, ...]) -> DeviceProfile:
    layers = tuple(LayerTiming(f"layer {i}", ladder) for i, ladder in enumerate(all_ladders))
    return DeviceProfile("net", "f" * 16, "3x8x8", "blocks", "local", "measured", layers)


@given(ladders())
def test_measured_points_are_read_exactly(ladder: tuple[Timing, ...]) -> None:
    profile = _profile(ladder)
    for timing in ladder:
        assert profile.layer_seconds(0, timing.samples) == (timing.forward_seconds, timing.backward_seconds)


@pytest.mark.slow
@given(ladders(), st.floats(0, 1), st.floats(0, 1))
def test_between_two_points_time_is_monotone_and_bounded(ladder: tuple[Timing, ...], a: float, b: float) -> None:
    assume(len(ladder) > 1)
    low, high = ladder[0], ladder[1]
    near, far = (low.samples + part * (high.samples - low.samples) for part in sorted((a, b)))
    profile = _profile(ladder)
    for index, field in enumerate(("forward_seconds", "backward_seconds")):
        first, last = getattr(low, field), getattr(high, field)
        x, y = profile.layer_seconds(0, near)[index], profile.layer_seconds(0, far)[index]
        slack = 1e-9 * max(first, last, 1)
        assert min(first, last) - slack <= x <= max(first, last) + slack
        assert (y - x) * (last - first) >= -slack * max(first, last, 1)


@given(ladders(), st.floats(-5, 2000, allow_nan=False))
def test_time_is_finite_and_not_negative_anywhere(ladder: tuple[Timing, ...], samples: float) -> None:
    assert all(0 <= value < math.inf for value in _profile(ladder).layer_seconds(0, samples))


def test_below_the_first_point_in_proportion_and_beyond_the_last_by_its_slope() -> None:
    profile = _profile((Timing(2, 1.0, 2.0), Timing(4, 3.0, 4.0)))
    assert profile.layer_seconds(0, 1) == (0.5, 1.0)
    assert profile.layer_seconds(0, 6) == (5.0, 6.0)
    assert profile.layer_seconds(0, 0) == (0.0, 0.0)


def test_a_slope_that_noise_turned_down_is_not_followed() -> None:
    profile = _profile((Timing(2, 3.0, 1.0), Timing(4, 2.0, 2.0)))
    assert profile.layer_seconds(0, 40) == (2.0, 20.0)


@pytest.mark.parametrize("timing", [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, math.inf), (1, math.nan, 1.0)])
def test_impossible_timings_are_refused(timing: tuple[int, float, float]) -> None:
    with pytest.raises(BadValue):
        Timing(*timing)


@pytest.mark.parametrize("sizes", [(), (2, 1), (1, 1)])
def test_a_ladder_must_increase(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BadValue, match="must increase"):
        LayerTiming("a", tuple(Timing(size, 1.0, 1.0) for size in sizes))


def _network(fingerprint: str = "f" * 16) -> Network:
    ops = tuple(Op(f"op{i}", "aten.relu.default", (), (), (), (), macs=i * 10**9, moved_bytes=10**6) for i in (0, 1))
    layers = tuple(Layer(f"layer {i}", i, i + 1, i, 0, 0, 0, 0, 0, 0, (), (), ()) for i in (0, 1))
    return Network("net", ops, layers, {}, {}, (), (), "blocks", fingerprint)


def test_an_estimate_is_marked_so() -> None:
    device = Cluster.local(1, gflops=10.0).devices[0]
    guess = estimate(_network(), device)
    assert guess.source == "estimated"
    assert guess.kernels == {}
    assert all(is_increasing(layer.ladder) and len(layer.ladder) == len(RUNGS) for layer in guess.layers)
    # 10^9 multiply-accumulates are 2 GFLOP: 0.2 s at 10 GFLOP/s, and the operator's start.
    assert guess.layer_seconds(1, 1)[0] == pytest.approx(0.2 + device.operator_seconds)
    profile = estimate_cluster(_network(), Cluster.local(3))
    assert profile.is_estimated
    assert len({id(profile.of(f"local-{n}")) for n in (1, 2, 3)}) == 1


def test_a_cluster_of_measured_profiles_is_not_estimated() -> None:
    profile = Profile({"a": _profile((Timing(1, 1.0, 1.0),))})
    assert not profile.is_estimated
    with pytest.raises(BadValue, match="no profile of device 'b'"):
        profile.of("b")


def test_a_profile_belongs_to_one_network() -> None:
    ladder = (Timing(1, 1.0, 1.0),)
    _profile(ladder, ladder).check_matches(_network())
    for profile, network in ((_profile(ladder), _network()), (_profile(ladder, ladder), _network("0" * 16))):
        with pytest.raises(BadFile, match="does not belong to net"):
            profile.check_matches(network)


def test_a_kernel_reads_well() -> None:
    assert str(Kernel()) == "contiguous+oneDNN"
    assert str(Kernel(channels_last=True, onednn=False, threads=1)) == "channels_last+native+1t"
    assert str(Kernel(channels_last=True, product=True)) == "channels_last+product"
    assert str(Kernel(channels_last=True, packed=True)) == "channels_last+packed"


def test_estimated_backward_knows_what_is_frozen() -> None:
    """Nothing flows back through frozen leading layers; the first trainable one needs no input gradient."""
    import torch

    from manyhands.facts.cluster import Cluster
    from manyhands.graph.capture import capture

    module = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    network = capture(module, torch.randn(2, 4, 8, 8), granularity="operators").network
    made = estimate(network, Cluster.local(1).devices[0])
    ratios = [layer.ladder[0].backward_seconds / layer.ladder[0].forward_seconds for layer in made.layers]
    assert ratios == pytest.approx([0, 1, 2])


@given(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=12))
def test_two_together_take_as_long_as_the_slower_of_two_steps(seconds: list[float]) -> None:
    spread = spread_of(seconds)
    slower = statistics.mean(max(a, b) for a, b in itertools.combinations(seconds, 2))
    usual = statistics.median(seconds)
    two = msgspec.structs.replace(_profile((Timing(1, 1.0, 2.0),)), spread=spread).together(2)
    assert two == pytest.approx(max(1.0, slower / usual))


def test_more_wait_longer_and_steady_ones_do_not_wait() -> None:
    assert spread_of([2.0] * 7) == spread_of([3.0]) == spread_of([]) == 0.0
    uneven = msgspec.structs.replace(_profile((Timing(1, 1.0, 2.0),)), spread=0.1)
    factors = [uneven.together(count) for count in (1, 2, 3, 4, 8, 64)]
    assert factors == sorted(set(factors))
    assert factors[0] == 1.0
    assert [round((one - 1) / 0.1, 2) for one in factors[1:5]] == pytest.approx([0.56, 0.85, 1.03, 1.42], abs=0.04)

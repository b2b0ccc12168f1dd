"""Splitting between an edge and a server: what it costs, Algorithm 2 against brute force, baselines, where to cut."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue, OutOfMemory
from manyhands.planner import split_choice
from manyhands.planner.split import (
    WIDTHS,
    Bound,
    Cut,
    Deployment,
    LinkRates,
    SplitProfile,
    memory_of,
    modules,
    moving_seconds,
    pipeline_seconds,
    seconds_of,
)
from manyhands.planner.split_choice import BASELINES, STATIC, choose, edge_only, joint_dnn

times = st.floats(0.001, 10)
rates_drawn = st.builds(LinkRates, st.floats(1e3, 1e8), st.floats(1e3, 1e8), st.floats(0, 0.1))


@st.composite
def profiles(draw: st.DrawFn, edge: str = "upstream") -> SplitProfile:
    """Any numbers at all; the last cut, or the first, leaves everything to the edge."""
    count = draw(st.integers(1, 5))
    alone = count if edge == "upstream" else 0
    layers = draw(st.sets(st.integers(0, count), min_size=1)) - {count - alone} | {alone}
    cuts = []
    for layer in sorted(layers):
        is_split = layer != alone
        is_frozen = draw(st.booleans())
        cuts.append(
            Cut(
                layer=layer,
                upstream_forward_seconds=draw(times) if layer else 0.0,
                upstream_backward_seconds=0.0 if (is_frozen and is_split) or not layer else draw(times),
                downstream_forward_seconds=draw(times) if layer < count else 0.0,
                downstream_backward_seconds=draw(times) if layer < count else 0.0,
                feature_bytes=draw(st.integers(1, 10**7)) if is_split else 0,
                plain_bytes=draw(st.sampled_from([0, 8, 4000])) if is_split else 0,
                returned_bytes=draw(st.integers(1, 10**7)) if is_split and not is_frozen else 0,
                edge_bytes=draw(st.integers(0, 10**9)),
                history_bytes=draw(st.integers(0, 10**8)) if is_split else 0,
                least_bits=draw(st.sampled_from(WIDTHS)),
            )
        )
    return SplitProfile(
        network="drawn",
        fingerprint="drawn",
        batch_size=32,
        cuts=tuple(cuts),
        layer_bytes=tuple(draw(st.lists(st.integers(0, 10**8), min_size=count, max_size=count))),
        edge_side=edge,
        memory_bytes=draw(st.none() | st.integers(5 * 10**8, 2 * 10**9)),
        packing_seconds=draw(st.sampled_from([0.0, 0.004])),
        packing_seconds_per_byte=draw(st.sampled_from([0.0, 4e-9, 3e-8])),
        unpacking_seconds_per_byte=draw(st.sampled_from([0.0, 2e-9])),
        feedback_seconds_per_byte=draw(st.sampled_from([0.0, 1e-9])),
        packs_gradients=draw(st.booleans()),
        redeploy_seconds=draw(st.sampled_from([0.0, 1.0])),
    )  # fmt: skip


def price_by_hand(
    profile: SplitProfile, rates: LinkRates, tau: int, current: Deployment | None, one: Deployment
) -> float:
    """Equations 9, 12 and 13 for one deployment, a number at a time."""
    cut = profile.cuts[profile.index(one.cut)]
    there, back = rates.up_bytes_per_second, rates.down_bytes_per_second
    if profile.edge_side == "downstream":
        there, back = back, there
    is_packed = one.bits < 32 and cut.feature_bytes > 0
    t1 = cut.upstream_forward_seconds + cut.upstream_backward_seconds
    if is_packed:
        t1 += profile.packing_seconds + profile.packing_seconds_per_byte * cut.feature_bytes
        t1 += profile.feedback_seconds_per_byte * cut.returned_bytes
    if cut.returned_bytes:
        t1 += cut.upstream_forward_seconds * (one.k != 0)
    t2 = (cut.plain_bytes + cut.feature_bytes * one.bits / 32) / there
    t3 = cut.downstream_forward_seconds + cut.downstream_backward_seconds
    t3 += profile.unpacking_seconds_per_byte * cut.feature_bytes * is_packed
    t4 = cut.returned_bytes * (one.bits / 32 if profile.packs_gradients else 1) / back
    delays = rates.delay_seconds * ((cut.feature_bytes > 0) + (cut.returned_bytes > 0))
    longest, total = max(t1, t2, t3, t4), t1 + t2 + t3 + t4 + delays
    seconds = (tau - 1) * longest + total
    if one.k is not None:
        seconds += (math.ceil(tau / (one.k + 1)) - 1) * max(0.0, total - (one.k + 1) * longest)
    if current is not None:
        low, high = sorted((current.cut, one.cut))
        seconds += sum(profile.layer_bytes[low:high]) / (there if one.cut < current.cut else back)
        seconds += profile.redeploy_seconds * (one != current)
    return seconds


def whole_space(profile: SplitProfile, k: int, widths: tuple[int, ...]) -> list[Deployment]:
    found = [
        Deployment(cut.layer, ahead, bits)
        for cut, ahead, bits in product(profile.cuts, range(k + 1), widths)
        if cut.layer != profile.edge_only and bits >= cut.least_bits
    ]
    found.append(Deployment(profile.edge_only))
    limit = math.inf if profile.memory_bytes is None else profile.memory_bytes
    return [one for one in found if memory_of(profile, one) <= limit]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data(), rates_drawn, st.integers(1, 400), st.integers(0, 6), st.sampled_from(["upstream", "downstream"]))
def test_the_choice_is_the_best_of_all(data: Any, rates: LinkRates, tau: int, k: int, edge: str) -> None:
    profile = data.draw(profiles(edge))
    space = whole_space(profile, k, WIDTHS)
    current = data.draw(st.none() | st.sampled_from(space)) if space else Deployment(profile.edge_only)
    if not space:
        assert choose(profile, rates, tau, current, k) == current
        return
    found = choose(profile, rates, tau, current, k)
    prices = {one: price_by_hand(profile, rates, tau, current, one) for one in space}
    assert found in prices
    least = min(prices.values())
    alone = Deployment(profile.edge_only)
    if found == alone != current and current is None:
        assert prices[alone] <= least * (1 + split_choice.LINK_RISK) * (1 + 1e-9)
        return
    if current == alone:
        assert (found == alone) == (prices[alone] <= least * (1 + split_choice.LINK_RISK))
        if found == alone:
            return
    assert prices[found] <= least * (1 + split_choice.SLACK) * (1 + 1e-9)
    best = [one for one, price in prices.items() if price <= least * (1 + 2 * split_choice.ALIKE)]
    assert any((one.cut, one.bits) == (found.cut, found.bits) for one in best), "only K may have slack"
    if found != current:
        more = [one for one in space if (one.cut, one.bits) == (found.cut, found.bits) and one.k > found.k]
        assert all(prices[one] > least * (1 + split_choice.SLACK) * (1 - 1e-9) for one in more)


@settings(deadline=None, max_examples=25)
@given(profiles(), rates_drawn, st.integers(1, 300), st.none() | st.integers(0, 6), st.sampled_from(WIDTHS))
def test_one_deployment_by_hand(profile: SplitProfile, rates: LinkRates, tau: int, k: Bound, bits: int) -> None:
    for cut in profile.cuts:
        one = Deployment(cut.layer, k, bits) if cut.layer != profile.edge_only else Deployment(cut.layer)
        by_hand = price_by_hand(profile, rates, tau, None, one)
        assert seconds_of(profile, rates, tau, one) == pytest.approx(by_hand)


@given(st.tuples(times, times, times, times), st.integers(1, 500), st.booleans())
def test_the_ends_of_equation_12(four: tuple[float, ...], tau: int, drains: bool) -> None:
    longest, total = max(four), sum(four)
    assert pipeline_seconds(longest, total, tau, 0, drains=drains) == pytest.approx(tau * total)  # Eq. 10
    full = (tau - 1) * longest + total  # Eq. 11
    assert pipeline_seconds(longest, total, tau, math.inf, drains=drains) == pytest.approx(full)
    enough = tau if drains else math.ceil(total / longest)
    assert pipeline_seconds(longest, total, tau, enough, drains=drains) == pytest.approx(full)


@given(st.tuples(times, times, times, times), st.integers(1, 500), st.integers(0, 10))
def test_draining_every_group_takes_longer(four: tuple[float, ...], tau: int, k: int) -> None:
    longest, total = max(four), sum(four)
    drained = pipeline_seconds(longest, total, tau, k, drains=True)
    assert drained >= pipeline_seconds(longest, total, tau, k) - 1e-9
    assert drained >= pipeline_seconds(longest, total, tau, k + 1, drains=True) - 1e-9


def two_layers(**facts: Any) -> SplitProfile:
    """Half the work on each side; the edge is ten times slower."""
    cut = Cut(
        layer=1, upstream_forward_seconds=0.1, upstream_backward_seconds=0.2, downstream_forward_seconds=0.01,
        downstream_backward_seconds=0.02, feature_bytes=4e5, returned_bytes=4e5, edge_bytes=1000, history_bytes=100,
    )  # fmt: skip
    alone = Cut(
        layer=2, upstream_forward_seconds=0.2, upstream_backward_seconds=0.4, downstream_forward_seconds=0,
        downstream_backward_seconds=0, edge_bytes=3000,
    )  # fmt: skip
    usual: dict[str, Any] = {"network": "two", "fingerprint": "", "batch_size": 1, "layer_bytes": (1e6, 2e6)}
    return SplitProfile(**{**usual, "cuts": (cut, alone), **facts})


def test_nothing_is_replayed_without_staleness_or_without_a_gradient() -> None:
    free = LinkRates(math.inf, math.inf)
    profile = two_layers()
    t1 = modules(profile, free, [0, 1, None], [32]).t1[:, 0, 0]
    assert t1 == pytest.approx([0.3, 0.4, 0.4])
    assert modules(profile, free, [0, 1, None], [32], drains=True).t1[:, 0, 0] == pytest.approx([0.3, 0.35, 0.4])
    frozen = msgspec.structs.replace(profile.cuts[0], returned_bytes=0, upstream_backward_seconds=0)
    four = modules(msgspec.structs.replace(profile, cuts=(frozen,)), LinkRates(1e6, 1e6), [5], [8])
    assert four.t1[0, 0, 0] == pytest.approx(0.1)
    assert four.t4[0, 0, 0] == 0


def test_layers_travel_in_their_direction() -> None:
    rates, both = LinkRates(1e5, 1e6), numpy.array([1.0, 2.0])
    upstream = two_layers()
    assert moving_seconds(upstream, rates, 1, both) == pytest.approx([0, 2])  # the edge gets a layer: down
    assert moving_seconds(upstream, rates, 2, both) == pytest.approx([20, 0])  # it gives one away: up
    zero = msgspec.structs.replace(upstream.cuts[1], layer=0)
    downstream = two_layers(edge_side="downstream", cuts=(zero, upstream.cuts[0]))
    assert moving_seconds(downstream, rates, 1, numpy.array([0.0, 1.0])) == pytest.approx([1, 0])
    assert moving_seconds(downstream, rates, 0, numpy.array([0.0, 1.0])) == pytest.approx([0, 10])


def test_extremes() -> None:
    profile = two_layers()
    assert choose(profile, LinkRates(1e3, 1e3), 100, None, 5) == Deployment(2)
    assert choose(profile, LinkRates(1e9, 1e9), 100, None, 5).cut == 1
    assert choose(profile, LinkRates(1e9, 1e9), 1, Deployment(2), 5).cut == 1  # 2 MB are nothing here
    assert choose(profile, LinkRates(1e6, 1e6), 1, Deployment(2), 5) == Deployment(2), "moving must pay"
    assert choose(profile, LinkRates(1e6, 1e6), 1000, Deployment(2), 5).cut == 1


def test_a_dead_link_changes_nothing() -> None:
    dead = LinkRates(0, 0)
    for current in (Deployment(1, 5, 8), Deployment(2)):
        assert choose(two_layers(), dead, 100, current, 5) == current
    assert choose(two_layers(), dead, 100, None, 5) == Deployment(2)
    with pytest.raises(BadValue, match="Nothing passes"):
        choose(two_layers(memory_bytes=2000), dead, 100, None, 5)


def test_memory() -> None:
    slow = LinkRates(1e3, 1e3)
    assert choose(two_layers(memory_bytes=2000), slow, 100, None, 5).cut == 1
    assert choose(two_layers(memory_bytes=1250), slow, 100, None, 5).k == 2
    with pytest.raises(OutOfMemory, match="1e\\+03 bytes"):
        choose(two_layers(memory_bytes=500), slow, 100, None, 5)
    with pytest.raises(OutOfMemory, match="3e\\+03"):
        edge_only(two_layers(memory_bytes=2000), slow, 100, None, 5)


def test_too_few_bits() -> None:
    cut = msgspec.structs.replace(two_layers().cuts[0], least_bits=16)
    with pytest.raises(BadValue, match="needs 16"):
        choose(two_layers(cuts=(cut,)), LinkRates(1e6, 1e6), 10, None, 5, (4, 8))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(profiles(), rates_drawn, st.integers(1, 300))
def test_baselines_are_never_better_at_a_steady_rate(profile: SplitProfile, rates: LinkRates, tau: int) -> None:
    profile = msgspec.structs.replace(profile, memory_bytes=None)
    own = seconds_of(profile, rates, tau, choose(profile, rates, tau, None, 5))
    for name, baseline in BASELINES.items():
        found = baseline(profile, rates, tau, None, 5, WIDTHS)
        if name != "unbounded":
            assert own <= seconds_of(profile, rates, tau, found) * (1 + split_choice.LINK_RISK) * (1 + 1e-9), name
        later = baseline(profile, LinkRates(1e3, 1e3), tau, found, 5, WIDTHS)
        assert name not in STATIC or later == found


def test_jointdnn_neither_packs_nor_runs_ahead() -> None:
    found = joint_dnn(two_layers(), LinkRates(1e7, 1e7), 100, None, 5)
    assert found == Deployment(1, 0, 32)


@pytest.mark.parametrize(
    "facts",
    [{"cuts": ()}, {"phases": ()}, {"phases": ((1, 2),)}, {"phases": ((0, -1),)}, {"layer_bytes": (1.0,)}],
    ids=str,
)
def test_wrong_profiles(facts: dict[str, Any]) -> None:
    with pytest.raises(BadValue):
        two_layers(**facts)


def test_wrong_numbers() -> None:
    with pytest.raises(BadValue, match="up_bytes_per_second is -1"):
        LinkRates(-1, 1)
    with pytest.raises(BadValue, match="delay_seconds is inf"):
        LinkRates(1, 1, math.inf)
    with pytest.raises(BadValue, match="least_bits is 3"):
        msgspec.structs.replace(two_layers().cuts[0], least_bits=3)
    with pytest.raises(BadValue, match="must be finite"):
        msgspec.structs.replace(two_layers().cuts[0], feature_bytes=math.nan)
    with pytest.raises(BadValue, match="Possible cuts: 1, 2"):
        two_layers().index(0)

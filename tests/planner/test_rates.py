"""Rates learnt from transfers, and an engine that neither flaps nor sleeps, on drawn and on recorded links."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.errors import BadValue
from manyhands.facts.trace import Trace, parse_trace
from manyhands.planner.rates import Engine, EngineSettings, Meter, Rates
from manyhands.planner.split import Cut, Deployment, LinkRates, SplitProfile, seconds_of
from manyhands.planner.split_choice import BASELINES, STATIC, choose

MBIT = 1e6 / 8
TRACES = Path(__file__).parents[3] / "shared/data/traces"
WIDTHS = (8, 16, 32)

# The paper's Table 3: ResNet-50 on CIFAR-10, batches of 32; a feature after each of its blocks, in MB.
FEATURES = [8.0] + [32.0] * 3 + [16.0] * 4 + [8.0] * 6 + [4.0] * 3 + [0.25]
WEIGHTS = [0.01, *[0.3] * 3, *[1.2] * 4, *[4.8] * 6, *[19.0] * 3, 0.08]


def resnet_like(edge_seconds: float = 8.0, **facts: Any) -> SplitProfile:
    """Blocks of equal work, `edge_seconds` for a batch at the edge, the server forty times faster."""
    count = len(FEATURES)
    cuts = []
    for layer in range(1, count + 1):
        part = layer / count
        size = 1e6 * FEATURES[layer - 1] / 4 if layer < count else 0  # at half the paper's width and height
        cuts.append(
            Cut(
                layer=layer,
                upstream_forward_seconds=edge_seconds / 3 * part,
                upstream_backward_seconds=edge_seconds * 2 / 3 * part,
                downstream_forward_seconds=edge_seconds / 120 * (1 - part),
                downstream_backward_seconds=edge_seconds / 60 * (1 - part),
                feature_bytes=size,
                returned_bytes=size,
                least_bits=8,
            )
        )
    usual: dict[str, Any] = {
        "layer_bytes": tuple(1e6 * weight for weight in WEIGHTS),
        "packing_seconds_per_byte": 4e-9,
        "redeploy_seconds": 0.5,
        "packs_gradients": True,
    }
    return SplitProfile(network="resnet-like", fingerprint="", batch_size=32, cuts=tuple(cuts), **{**usual, **facts})


# ---- Meters


def test_back_to_back_bytes_tell_the_rate() -> None:
    meter = Meter(delay_seconds=0.05)
    assert meter.estimate(0.0) is None
    for _ in range(20):  # all handed over at once: each waits for the one before
        meter.begin(1e5, 0.0)
    for number in range(20):
        meter.end(0.05 + 0.1 * (number + 1))
    assert meter.estimate(3.0) == pytest.approx(1e6)
    assert meter.last_measured() == pytest.approx(2.05)


def test_idle_time_is_not_the_links_fault() -> None:
    meter = Meter()
    for number in range(20):
        meter.transfer(1e5, 10.0 * number, 10.0 * number + 0.1)
    assert meter.estimate(1000.0) == pytest.approx(1e6)


def test_small_messages_tell_nothing() -> None:
    meter = Meter()
    for number in range(100):
        meter.transfer(200, number, number + 0.05)  # all delay
        meter.transfer(50_000, number + 0.5, number + 0.501)  # all buffer
    assert meter.estimate(200.0) is None
    for _ in range(100):  # but many in a row do
        meter.begin(200, 300.0)
    for number in range(100):
        meter.end(300 + 0.002 * (number + 1))
    assert meter.estimate(301.0) == pytest.approx(1e5)


def test_what_is_late_tells_before_it_ends() -> None:
    meter = Meter()
    for number in range(40):
        meter.transfer(1e6, number, number + 1.0)
    meter.begin(1e6, 40.0)
    assert meter.estimate(40.9) == pytest.approx(1e6)
    seen = [meter.estimate(40.0 + later) for later in (2, 6, 12, 30, 120)]
    assert seen[0] == pytest.approx(1e6), "a short dip is not believed"
    assert all(a is not None and b is not None and a >= b for a, b in zip(seen, seen[1:]))
    assert seen[-1] is not None
    assert seen[-1] < 1e5
    meter.cancel()
    assert meter.estimate(200.0) == pytest.approx(1e6)
    meter.forget()
    assert meter.estimate(200.0) is None


def feed(meter: Meter, rate: float, began: float, seconds: float, size: float = 2e5) -> float:
    """A busy link of a steady rate."""
    now = began
    while now < began + seconds - 1e-9:
        meter.transfer(size, now, now + size / rate)
        now += size / rate
    return now


@settings(deadline=None, max_examples=20)
@given(st.floats(2e5, 1e7), st.floats(0.05, 20.0), st.floats(0.1, 4.0))  # half a second is merged at both of its ends
def test_a_dip_shorter_than_its_part_of_the_window_moves_nothing(rate: float, factor: float, seconds: float) -> None:
    meter = Meter(window_seconds=20, quantile=0.25)
    size = min(rate, rate * factor) * 0.05
    now = feed(meter, rate, 0.0, 40.0, size)
    now = feed(meter, rate * factor, now, seconds, size)
    assert meter.estimate(now) == pytest.approx(rate, rel=1e-3)
    now = feed(meter, rate, now, 3.0, size)
    assert meter.estimate(now) == pytest.approx(rate, rel=1e-3)


@settings(deadline=None, max_examples=20)
@given(st.floats(2e5, 1e7), st.floats(0.05, 20.0))
def test_a_change_for_good_is_believed_within_the_window(rate: float, factor: float) -> None:
    meter = Meter(window_seconds=20, quantile=0.25)
    size = min(rate, rate * factor) * 0.05
    now = feed(meter, rate, 0.0, 40.0, size)
    now = feed(meter, rate * factor, now, 16.0, size)
    assert meter.estimate(now) == pytest.approx(rate * factor, rel=1e-3)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.floats(1, 1e7), st.just(0.0) | st.floats(0.001, 5), st.floats(0.0, 5)), max_size=60))
def test_an_estimate_lies_between_what_was_seen(transfers: list[tuple[float, float, float]]) -> None:
    meter, now, seen = Meter(), 0.0, []
    for size, idle, busy in transfers:
        now += idle
        meter.transfer(size, now, now + busy)
        now += busy
        if size >= 8192 and busy >= 0.02:
            seen.append(size / busy)
    found = meter.estimate(now)
    assert found is None or found > 0
    if found is not None and seen and all(idle > 0 for _, idle, _ in transfers):
        assert min(seen) * (1 - 1e-6) <= found <= max(seen) * (1 + 1e-6)


def test_wrong_meters_and_engines() -> None:
    with pytest.raises(BadValue, match="quantile"):
        Meter(quantile=0.7)
    with pytest.raises(BadValue, match="confirmations"):
        engine_for(resnet_like(), LinkRates(1e6, 1e6), confirmations=0)


# ---- A link that follows a trace, and a pipeline on it


class Road:
    """How many bytes pass by when, over a trace that begins again."""

    def __init__(self, trace: Trace) -> None:
        self.moments = [one - trace.seconds[0] for one in trace.seconds] + [trace.length_seconds]
        self.rates = trace.bytes_per_second
        self.passed = [0.0]
        for index, rate in enumerate(self.rates):
            self.passed.append(self.passed[-1] + rate * (self.moments[index + 1] - self.moments[index]))
        self.mean = self.passed[-1] / self.moments[-1]

    def until(self, start: float, size: float) -> float:
        """When so many bytes are through."""
        if not size:
            return start
        rounds, place = divmod(start, self.moments[-1])
        index = min(bisect_right(self.moments, place), len(self.rates)) - 1
        wanted = rounds * self.passed[-1] + self.passed[index] + self.rates[index] * (place - self.moments[index])
        rounds, rest = divmod(wanted + size, self.passed[-1])
        index = max(1, min(bisect_left(self.passed, rest), len(self.rates)))
        rate = self.rates[index - 1]
        within = (rest - self.passed[index - 1]) / rate if rate else 0.0
        return max(start, rounds * self.moments[-1] + self.moments[index - 1] + within)


def steady(rate: float) -> Road:
    return Road(Trace((0.0, 1.0), (rate, rate)))


class Pipeline:
    """The edge's policy, event by event: update if a gradient is there, else forward if K allows, else wait."""

    def __init__(self, profile: SplitProfile, up: Road, down: Road, *, delay: float = 0.025) -> None:
        self.profile, self.up, self.down, self.delay = profile, up, down, delay
        self.up_free = self.down_free = self.server_free = self.now = 0.0
        self.events: list[tuple[float, int, Meter, float]] = []
        self.told = 0

    def tell(self, meter: Meter | None, size: float, began: float, ended: float) -> None:
        if meter is not None and size:
            heapq.heappush(self.events, (began, self.told, meter, size))
            heapq.heappush(self.events, (ended, self.told + 1, meter, -1.0))
            self.told += 2

    def lift(self, size: float, start: float, meter: Meter | None) -> float:
        self.up_free = self.up.until(max(start, self.up_free), size)
        self.tell(meter, size, start, self.up_free)
        return self.up_free

    def fetch(self, size: float, start: float, meter: Meter | None) -> float:
        self.down_free = self.down.until(max(start, self.down_free), size)
        self.tell(meter, size, start, self.down_free)
        return self.down_free

    def run(self, current: Deployment, batches: int, engine: Engine | None = None, *, drains: bool = False) -> float:
        """Seconds of so many batches."""
        profile, done, group = self.profile, 0, 0
        wanted: Deployment | None = None
        returns: deque[tuple[float, int]] = deque()
        up, down = (engine.rates.up, engine.rates.down) if engine else (None, None)
        while done < batches:
            if engine and wanted is None:
                self.report()
                wanted = engine.look(self.now, done)
                sizes = engine.probe(self.now)
                self.lift(sizes[0], self.now, up)
                self.fetch(sizes[1], self.now, down)
            if wanted is not None and not returns:
                moved = profile.running_bytes[wanted.cut] - profile.running_bytes[current.cut]
                here = self.lift(max(0.0, -moved), self.now, up) if moved < 0 else self.now
                self.now = self.fetch(moved, self.now, down) if moved > 0 else here
                self.now += profile.redeploy_seconds
                current, wanted, group = wanted, None, 0
                if engine:
                    engine.deployed(self.now)
            cut = profile.cuts[profile.index(current.cut)]
            if current.cut == profile.edge_only:
                self.now += cut.upstream_forward_seconds + cut.upstream_backward_seconds
                done += 1
                continue
            most = math.inf if current.k is None else current.k
            if returns and returns[0][0] <= self.now:
                _, version = returns.popleft()
                self.now += cut.upstream_backward_seconds + cut.upstream_forward_seconds * (version != done)
                done += 1
                group *= not drains or bool(returns)
            elif wanted is None and (group if drains else len(returns)) <= most:
                part = current.bits / 32
                packing = profile.packing_seconds_per_byte * cut.feature_bytes * (part < 1)
                self.now += cut.upstream_forward_seconds + packing
                there = self.lift(cut.feature_bytes * part, self.now, up) + self.delay
                work = cut.downstream_forward_seconds + cut.downstream_backward_seconds
                self.server_free = max(self.server_free, there) + work
                back = cut.returned_bytes * (part if profile.packs_gradients else 1)
                returns.append((self.fetch(back, self.server_free, down) + self.delay, done))
                group += 1
            else:
                self.now = min(returns[0][0], self.now + 1.0) if engine and wanted is None else returns[0][0]
        return self.now

    def report(self) -> None:
        while self.events and self.events[0][0] <= self.now:
            moment, _, meter, size = heapq.heappop(self.events)
            if size >= 0:
                meter.begin(size, moment)
            else:
                meter.end(moment)


def engine_for(profile: SplitProfile, rates: LinkRates, name: str = "ours", k: int = 5, **facts: Any) -> Engine:
    chooser = choose if name == "ours" else BASELINES[name]
    current = chooser(profile, rates, 100, None, k, WIDTHS)
    return Engine(profile, Rates(rates), current, k=k, widths=WIDTHS, chooser=chooser, settings=EngineSettings(**facts))


def seconds_per_100(profile: SplitProfile, up: Road, down: Road, name: str, batches: int) -> tuple[float, int]:
    engine = engine_for(profile, LinkRates(up.mean, down.mean, 0.025), name)
    found = Pipeline(profile, up, down).run(engine.current, batches, None if name in STATIC else engine)
    return 100 * found / batches, len(engine.changes)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 18), st.integers(0, 6), st.sampled_from(WIDTHS), st.floats(0.5, 500), st.floats(0.5, 500),
    st.booleans(),
)  # fmt: skip
def test_the_equations_say_what_the_events_take(
    cut: int, k: int, bits: int, up: float, down: float, drains: bool
) -> None:
    profile = resnet_like()
    one = Deployment(cut, k, bits) if cut < 18 else Deployment(18)
    rates = LinkRates(up * MBIT, down * MBIT, 0.025)
    seen = Pipeline(profile, steady(up * MBIT), steady(down * MBIT)).run(one, 60, drains=drains)
    said = seconds_of(profile, rates, 60, one, drains=drains)
    assert 0.8 * said <= seen <= 1.3 * said
    assert seen <= 1.1 * said or 0 < k < 3, "with few batches under way the edge's two halves meet each other"


# ---- The engine


def test_a_dip_that_ends_changes_nothing() -> None:
    profile = resnet_like(1.0)
    engine = engine_for(profile, LinkRates(200 * MBIT, 200 * MBIT, 0.01))
    moments = (0.0, 100.0, 104.5, 200.0, 204.5, 300.0)
    dips = Road(Trace(moments, tuple(rate * MBIT for rate in (200, 10, 200, 2, 200, 200))))
    Pipeline(profile, dips, dips).run(engine.current, 2000, engine)
    assert engine.changes == []


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("first", "later"), [(100.0, 0.5), (0.5, 100.0), (2.0, 100.0)])
def test_a_change_for_good_is_acted_upon(first: float, later: float) -> None:
    profile = resnet_like(1.0, layer_bytes=tuple(1e4 * weight for weight in WEIGHTS))
    before, after = (LinkRates(rate * MBIT, rate * MBIT, 0.025) for rate in (first, later))
    engine = engine_for(profile, before)
    best = choose(profile, after, 300, engine.current, 5, WIDTHS)
    assert best.cut != engine.current.cut
    road = Road(Trace((0.0, 60.0, 1e6), (first * MBIT, later * MBIT, later * MBIT)))
    batches = round(60 * 100 / seconds_of(profile, before, 100, engine.current)) + 150
    Pipeline(profile, road, road).run(engine.current, batches, engine)
    assert engine.changes
    assert engine.changes[0][0] > 60
    assert seconds_of(profile, after, 300, engine.current) <= 1.15 * seconds_of(profile, after, 300, best)
    acted = next(moment for moment, one in engine.changes if one == engine.current)
    assert acted < 60 + 75, "the window, three probes, and the time that moving takes"
    assert len(engine.changes) <= 3


@settings(deadline=None, max_examples=8)
@given(st.lists(st.tuples(st.floats(1, 40), st.floats(0, 300)), min_size=2, max_size=12), st.integers(0, 5))
def test_changes_are_bounded_on_any_link(pieces: list[tuple[float, float]], k: int) -> None:
    moments, rates, now = [], [], 0.0
    for seconds, rate in [*pieces, (10.0, 50.0)]:
        moments.append(now)
        rates.append(rate * MBIT)
        now += seconds
    road = Road(Trace(tuple(moments), tuple(rates)))
    profile = resnet_like(1.0)
    engine = engine_for(profile, LinkRates(road.mean, road.mean, 0.025), k=k)
    seconds = Pipeline(profile, road, road).run(engine.current, 150, engine)
    assert len(engine.changes) <= 1 + seconds / engine.settings.rest_seconds
    gaps = [b - a for (a, _), (b, _) in zip(engine.changes, engine.changes[1:])]
    assert all(gap >= engine.settings.rest_seconds for gap in gaps)
    assert all(one.k is not None and one.k <= k for _, one in engine.changes)


def test_tau_follows_equation_14() -> None:
    engine = engine_for(resnet_like(), LinkRates(1e6, 1e6), tau=100.0, beta=0.75)
    engine.take(Deployment(1, 5, 8), 0.0, 40)
    assert engine.tau == 100.0
    engine.take(Deployment(2, 5, 8), 50.0, 60)
    assert engine.tau == 0.75 * 100 + 0.25 * 20
    assert engine.horizon(70) == engine.tau
    assert engine.horizon(1000) == 940
    engine.ends_at = 1010
    assert engine.horizon(1000) == 10
    assert engine.horizon(1010) == 1


def test_an_engine_prices_groups_as_they_are_run() -> None:
    profile, rates = resnet_like(1.0), LinkRates(20 * MBIT, 20 * MBIT, 0.025)
    seen: list[bool] = []

    def chooser(*words: Any, drains: bool = False) -> Deployment:
        seen.append(drains)
        return choose(*words, drains=drains)

    engine = Engine(profile, Rates(rates), Deployment(18), k=5, chooser=chooser, drains=True)
    engine.look(0.0, 0)
    assert seen == [True]


def test_another_phase_takes_effect_at_once() -> None:
    engine = engine_for(resnet_like(), LinkRates(20 * MBIT, 20 * MBIT))
    assert engine.current.k == 5
    engine.k = 2
    found = engine.look(0.0, 0)
    assert found is not None
    assert found.k == 2
    assert engine.look(1.5, 1) is None


def test_a_lost_link_and_its_return() -> None:
    profile = resnet_like()
    engine = engine_for(profile, LinkRates(200 * MBIT, 200 * MBIT))
    assert engine.current.cut < 18
    engine.rates.up.transfer(1e6, 0.0, 1.0)
    assert engine.lost(10.0, 5) == Deployment(18)
    assert engine.look(12.0, 6) is None
    assert engine.probe(100.0) == (0, 0)
    engine.found(100.0)
    up, down = engine.probe(100.0)
    assert up > 0
    assert down > 0
    assert engine.probe(101.0) == (0, 0)
    found = [engine.look(100.0 + 2 * number, 7 + number) for number in range(1, 60)]
    assert any(one is not None and one.cut < 18 for one in found)
    small = resnet_like(memory_bytes=0.0)
    alone = msgspec.structs.replace(small.cuts[-1], edge_bytes=1)
    small = msgspec.structs.replace(small, cuts=(*small.cuts[:-1], alone))
    assert engine_for(small, LinkRates(1e6, 1e6)).lost(0.0, 0) is None


def test_alone_at_the_edge_it_asks_for_probes_and_comes_back() -> None:
    profile = resnet_like(1.0)
    engine = engine_for(profile, LinkRates(0.2 * MBIT, 0.2 * MBIT, 0.025))
    assert engine.current == Deployment(18)
    road = Road(Trace((0.0, 30.0, 1e6), (0.2 * MBIT, 100 * MBIT, 100 * MBIT)))
    Pipeline(profile, road, road).run(engine.current, 300, engine)
    assert engine.current.cut < 18
    assert engine.changes[0][0] < 120


# ---- Recorded links

KINDS = {
    "foot": ("ghent-4g/foot_0002.txt",) * 2,
    "car": ("ghent-4g/car_0001.txt",) * 2,
    "train": ("ghent-4g/train_0003.txt",) * 2,
    "LTE Verizon": ("mahimahi-100ms/Verizon-LTE-short_up.txt", "mahimahi-100ms/Verizon-LTE-short_down.txt"),
    "LTE AT&T": ("mahimahi-100ms/ATT-LTE-driving_up.txt", "mahimahi-100ms/ATT-LTE-driving_down.txt"),
    "5G": ("lumos5g/5g_trace_109_driving.txt",) * 2,
}


@pytest.mark.quick(every=6)
@pytest.mark.skipif(not TRACES.exists(), reason="the recorded traces are not here")
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_links(kind: str) -> None:
    """Against edge-only, JointDNN and K = 0, in time; and calm."""
    up, down = (Road(parse_trace((TRACES / name).read_text(), name)) for name in KINDS[kind])
    profile = resnet_like(2.0)
    found = {name: seconds_per_100(profile, up, down, name, 150) for name in ("ours", "edge-only", "jointdnn", "k0")}
    ours, changes = found.pop("ours")
    assert ours <= min(seconds for seconds, _ in found.values()) / 0.95
    assert changes <= 10


def test_a_look_that_is_given_up_is_not_repeated_at_once() -> None:
    """Else a job that is alone at the edge of a dead link would do nothing else."""
    profile = resnet_like()
    engine = Engine(
        profile,
        Rates(LinkRates(1e6, 1e6)),
        Deployment(profile.edge_only),
        k=5,
        settings=EngineSettings(probe_seconds=15.0),
    )
    assert any(engine.probe(100.0))
    engine.probed(100.2, has_arrived=False)
    assert engine.probe(101.0) == (0, 0)
    assert engine.probe(130.0) == (0, 0)
    assert any(engine.probe(131.0))
    engine.probed(131.2, has_arrived=False)
    assert engine.probe(191.0) == (0, 0)
    engine.probed(191.1, has_arrived=True)


def test_probes_take_a_small_part_of_the_time_however_slow_the_link_is() -> None:
    """The job stands still meanwhile."""
    profile = resnet_like()
    settings = EngineSettings(probe_seconds=15.0, probe_part=0.02)
    engine = Engine(profile, Rates(LinkRates(1e6, 1e6)), Deployment(profile.edge_only), k=5, settings=settings)
    assert any(engine.probe(100.0))
    engine.probed(101.0, has_arrived=True)
    assert engine.probe(150.0) == (0, 0), "1 s is 2 % of 50 s"
    assert any(engine.probe(151.5))


def test_a_link_that_would_change_nothing_if_it_were_twice_as_fast_is_looked_at_less_often() -> None:
    profile = resnet_like(1.0)
    found = []
    for rate in (0.2 * MBIT, 200 * MBIT):
        engine = engine_for(profile, LinkRates(rate, rate))
        engine.current = Deployment(profile.edge_only)
        engine.rates.up.transfer(rate, 99.0, 100.0)
        engine.rates.down.transfer(rate, 99.0, 100.0)
        found.append([any(engine.probe(now)) for now in (114.0, 116.0, 146.0)])
    assert found == [[False, False, True], [False, True, True]]

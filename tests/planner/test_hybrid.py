"""The pipeline planner: shares, plans and prices equal exhaustive search, written here without its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import chain
from manyhands.facts.cluster import Cluster, Device, DirectedLink, Link
from manyhands.facts.network import Network
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.planner.hybrid import PlannedStage, Search
from manyhands.planner.steps import Batch, Ground, Step, Steps, by_memory, round_seconds
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule


@dataclass
class Instance:
    network: Network
    cluster: Cluster
    profile: Profile
    batch: Batch

    def steps(self) -> Steps:
        ground = Ground(self.network, self.cluster, self.profile, self.batch.samples, self.batch.optimizer_slots)
        return Steps(ground, self.batch)


def with_sizes(network: Network, sizes: Sequence[int], weights: Sequence[int]) -> Network:
    """The chain with maps of other heights and weights of other sizes."""
    tensors = dict(network.tensors)
    for number, size in enumerate(sizes):
        name = f"t{number}"
        tensors[name] = msgspec.structs.replace(tensors[name], shape=(1, 4, size, 6))
    changed = {
        name: msgspec.structs.replace(weight, shape=(size,))
        for (name, weight), size in zip(network.weights.items(), weights)
    }
    text = f"{network.fingerprint} {sizes} {weights}"
    return msgspec.structs.replace(network, tensors=tensors, weights=changed, fingerprint=text)


seconds = st.integers(1, 40).map(lambda number: number / 8)


@st.composite
def instances(draw: st.DrawFn, most_layers: int = 6, most_devices: int = 4, same_ratio: bool = True) -> Instance:
    layers = draw(st.integers(1, most_layers))
    devices = draw(st.integers(1, most_devices))
    samples, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    network = with_sizes(
        chain(layers, statistics=draw(st.sets(st.integers(0, layers - 1), max_size=2))),
        [draw(st.integers(1, 40)) for _ in range(layers)],
        [draw(st.sampled_from((1, 100, 5000))) for _ in range(layers)],
    )
    kinds = []
    for kind in range(draw(st.integers(1, min(3, devices)))):
        timings = []
        for layer in network.layers:
            one = draw(seconds)
            two = one + draw(seconds)
            four = two + draw(seconds)
            back = [2 * one, 2 * two, 2 * four] if same_ratio else [draw(seconds)] * 3
            ladder = [Timing(size, ahead, behind) for size, ahead, behind in zip((1, 2, 4), (one, two, four), back)]
            timings.append(LayerTiming(layer.name, tuple(ladder)))
        facts = network.name, network.fingerprint, "x", "blocks", f"kind{kind}", "measured"
        kinds.append(DeviceProfile(*facts, tuple(timings)))  # type: ignore[arg-type]
    each = layers * 1000 + 5000 * 4 * 4
    rates = st.sampled_from((2e3, 1e4))
    members, profiles = [], {}
    for number in range(devices):
        memory = draw(st.sampled_from((each // 2, 3 * each, 50 * each)))
        up, down = draw(rates), draw(rates)
        one = Device(name=f"d{number}", gflops=1.0, memory_bytes=memory)
        members.append(msgspec.structs.replace(one, up_bytes_per_second=up, down_bytes_per_second=down))
        profiles[f"d{number}"] = draw(st.sampled_from(kinds))
    link = Link(draw(st.sampled_from((3e3, 1e9))), draw(st.sampled_from((0.0, 0.25))))
    pairs = [(a.name, b.name) for a in members for b in members if a != b]
    slow = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    links = tuple(DirectedLink(*pair, Link(draw(st.sampled_from((1e3, 5e4))), 0.125)) for pair in sorted(slow))
    cluster = Cluster("drawn", tuple(members), link, links)
    warm_up = draw(st.sampled_from(("2(P-p)-1", "P-p")))
    batch = Batch(samples, count, draw(st.integers(0, 2)), draw(st.booleans()), warm_up)
    return Instance(network, cluster, Profile(profiles), batch)


class Exhaustive:
    """Every pipeline of an instance, priced as the paper writes it."""

    def __init__(self, instance: Instance) -> None:
        self.one = instance
        self.names = by_memory(instance.cluster)

    def times(self, device: str, first: int, last: int, samples: int) -> tuple[float, float]:
        own = self.one.profile.of(device)
        found = [own.layer_seconds(layer, samples) for layer in range(first, last)]
        return sum(ahead for ahead, _ in found), sum(back for _, back in found)

    def memory(self, first: int, last: int, samples: int, ahead: int) -> float:
        network, slots = self.one.network, self.one.batch.optimizer_slots
        ops = network.ops[first:last]
        static = sum(network.weights[name].bytes * (2 + slots) for op in ops for name in op.weights)
        received = sum(t.bytes_per_sample for t in network.cut(first)) if first else 0
        returned = sum(t.bytes_per_sample for t in network.cut(last)) if last < len(network.layers) else 0
        saved = sum(op.saved_bytes for op in ops) + received
        return static + samples * (ahead * saved + max(returned, *(op.moved_bytes for op in ops)))

    def shares(self, first: int, last: int, devices: Sequence[str], ahead: int) -> tuple[int, ...] | None:
        """Of every share, the one whose slowest device is fastest."""
        samples = self.one.batch.samples
        cuts = combinations(range(1, samples), len(devices) - 1)
        best: tuple[float, tuple[int, ...]] | None = None
        for inside in cuts:
            share = tuple(b - a for a, b in pairwise((0, *inside, samples)))
            budgets = [self.one.cluster.device(device).memory_bytes for device in devices]
            if any(self.memory(first, last, y, ahead) > most for y, most in zip(share, budgets)):
                continue
            slowest = max(sum(self.times(d, first, last, y)) for y, d in zip(share, devices))
            if best is None or slowest < best[0] - 1e-12:
                best = slowest, share
        return None if best is None else best[1]

    def step(self, first: int, last: int, devices: Sequence[str], share: Sequence[int]) -> Step:
        times = [self.times(d, first, last, y) for d, y in zip(devices, share)]
        ahead, back = max(one[0] for one in times), max(one[1] for one in times)
        count, cluster, network = len(devices), self.one.cluster, self.one.network
        if count == 1:
            return Step(ahead, back)
        rate = min(cluster.bytes_per_second_between(a, b) for a in devices for b in devices if a != b)
        delay = max(cluster.link_between(a, b).delay_seconds for a in devices for b in devices if a != b)
        if self.one.batch.is_synchronised:
            norms = [op for op in network.ops[first:last] if op.statistics]
            extra = len(norms) * delay + 2 * sum(4 * op.statistics for op in norms) * (count - 1) / rate
            ahead, back = ahead + extra, back + extra
        weights = sum(network.weights[name].bytes for op in network.ops[first:last] for name in op.weights)
        return Step(ahead, back, 2 * (count - 1) / count * weights / rate + 2 * delay)

    def parts(self, devices: Sequence[str]) -> list[tuple[float, float]]:
        """Which part of a cut each device has: by its speed over the whole network."""
        samples, layers = self.one.batch.samples, len(self.one.network.layers)
        speeds = [1 / sum(self.times(d, 0, layers, samples)) for d in devices]
        points = [0.0]
        for speed in speeds:
            points.append(points[-1] + speed / sum(speeds))
        return list(pairwise(points))

    def cut(self, layer: int, one: Sequence[str], other: Sequence[str]) -> Step:
        cluster = self.one.cluster
        size = sum(t.bytes_per_sample for t in self.one.network.cut(layer)) * self.one.batch.samples
        found, delay = [], 0.0
        for senders, receivers in ((one, other), (other, one)):
            ups, downs, links = dict.fromkeys(senders, 0.0), dict.fromkeys(receivers, 0.0), [0.0]
            for (a, (low, high)), (b, (start, end)) in product(
                zip(senders, self.parts(senders)), zip(receivers, self.parts(receivers))
            ):
                part = min(high, end) - max(low, start)
                if part > 1e-12:
                    link = cluster.link_between(a, b)
                    delay = max(delay, link.delay_seconds)
                    links.append(part / link.bytes_per_second)
                    ups[a] += part / cluster.device(a).up_bytes_per_second
                    downs[b] += part / cluster.device(b).down_bytes_per_second
            found.append(size * max(*ups.values(), *downs.values(), *links))
        return Step(found[0] + delay, found[1] + delay)

    def all(self) -> Iterator[tuple[float, tuple[PlannedStage, ...]]]:
        layers, batch = len(self.one.network.layers), self.one.batch
        for count in range(1, min(layers, len(self.names)) + 1):
            for inside in combinations(range(1, layers), count - 1):
                cuts = list(pairwise((0, *inside, layers)))
                for groups in self.groups(0, count):
                    stages = []
                    for number, ((first, last), devices) in enumerate(zip(cuts, groups)):
                        share = self.shares(first, last, devices, batch.ahead(count - number))
                        if share is None:
                            break
                        stages.append(PlannedStage(first, last, devices, share))
                    else:
                        yield self.price(stages), tuple(stages)

    def groups(self, start: int, count: int) -> Iterator[list[tuple[str, ...]]]:
        if count == 0:
            yield []
            return
        for a in range(start, len(self.names)):
            for b in range(a + 1, len(self.names) + 1):
                for rest in self.groups(b, count - 1):
                    yield [self.names[a:b], *rest]

    def price(self, stages: Sequence[PlannedStage]) -> float:
        steps = [self.step(one.first, one.last, one.devices, one.samples) for one in stages[:1]]
        for one, other in pairwise(stages):
            steps.append(self.cut(other.first, one.devices, other.devices))
            steps.append(self.step(other.first, other.last, other.devices, other.samples))
        return round_seconds(steps, self.one.batch.count)


@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_plan_equals_exhaustive_search(instance: Instance) -> None:
    exhaustive = Exhaustive(instance)
    best = min((seconds for seconds, _ in exhaustive.all()), default=None)
    found = Search(instance.steps()).best()
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert exhaustive.price(found.stages) == pytest.approx(found.seconds, rel=1e-9)
    plan = resolve(found.plan(instance.network), instance.network, instance.cluster)
    check(Schedule(plan, instance.network), instance.cluster)  # no deadlock, and within memory


@settings(max_examples=60, deadline=None)
@given(instances(same_ratio=False))
def test_shares_are_the_best_of_all(instance: Instance) -> None:
    exhaustive, steps = Exhaustive(instance), instance.steps()
    found = Search(steps).best()
    if found is None:
        return
    for number, stage in enumerate(found.stages):
        ahead = instance.batch.ahead(len(found.stages) - number)
        best = exhaustive.shares(stage.first, stage.last, stage.devices, ahead)
        assert best is not None
        slowest = [
            max(sum(exhaustive.times(d, stage.first, stage.last, y)) for d, y in zip(stage.devices, share))
            for share in (best, stage.samples)
        ]
        assert slowest[0] == pytest.approx(slowest[1], rel=1e-12)
        assert sum(stage.samples) == instance.batch.samples


@settings(max_examples=40, deadline=None)
@given(instances())
def test_one_candidate_for_each_place_is_never_better(instance: Instance) -> None:
    steps = instance.steps()
    fronts, single = Search(steps).best(), Search(steps, keep_fronts=False).best()
    if single is not None:
        assert fronts is not None
        assert fronts.seconds <= single.seconds * (1 + 1e-12)

"""The pipeline planner: shares, plans and prices equal exhaustive search, written here without its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from exhaustive import Exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_made import chain, changed, cluster, even_profile
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import Device
from manyhands.facts.errors import OutOfMemory
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.network import Network
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing, estimate_cluster
from manyhands.planner.context import Batch, PlanningContext
from manyhands.planner.hybrid import Search, pipelines
from manyhands.planner.steps import Steps
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule


@dataclass
class Instance:
    network: Network
    cluster: Cluster
    profile: Profile
    batch: Batch

    def steps(self) -> Steps:
        context = PlanningContext(
            self.network, self.cluster, self.profile, self.batch.samples, self.batch.optimizer_slots
        )
        return Steps(context, self.batch)


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


def frozen_below(network: Network, layer: int) -> Network:
    """The chain with a backward pass from a layer on only: nothing that the layers below it read is trained."""
    below = [name for each in network.layers[:layer] for name in each.outputs]
    frozen = {name for each in network.layers[:layer] for name in each.weights}
    weights = {name: msgspec.structs.replace(w, trainable=name not in frozen) for name, w in network.weights.items()}
    tensors = {
        name: msgspec.structs.replace(tensor, differentiable=tensor.differentiable and name not in below)
        for name, tensor in network.tensors.items()
    }
    text = f"{network.fingerprint} frozen below {layer}"
    return msgspec.structs.replace(network, tensors=tensors, weights=weights, fingerprint=text)


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
    for reader in draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else ():
        again = draw(st.sampled_from([f"w{read}" for read in range(reader)]))
        network = changed(network, reader, weights=(again, *network.ops[reader].weights))
    network = frozen_below(network, draw(st.integers(0, layers - 1)))
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
    machines = Cluster("drawn", tuple(members), link, links)
    warm_up = draw(st.sampled_from(("2(P-p)-1", "P-p")))
    batch = Batch(samples, count, draw(st.integers(0, 2)), draw(st.booleans()), warm_up)
    return Instance(network, machines, Profile(profiles), batch)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_plan_equals_exhaustive_search(instance: Instance) -> None:
    exhaustive = Exhaustive(instance.network, instance.cluster, instance.profile, instance.batch)
    best = min((seconds for seconds, _ in exhaustive.all()), default=None)
    found = Search(instance.steps()).best()
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert exhaustive.price(found.stages) == pytest.approx(found.seconds, rel=1e-9)
    plan = resolve(found.plan(instance.network), instance.network, instance.cluster)
    check(Schedule(plan, instance.network), instance.cluster)  # no deadlock, and within memory


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(instances(same_ratio=False))
def test_shares_are_the_best_of_all(instance: Instance) -> None:
    exhaustive, steps = (
        Exhaustive(instance.network, instance.cluster, instance.profile, instance.batch),
        instance.steps(),
    )
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


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(instances())
def test_one_candidate_for_each_place_is_never_better(instance: Instance) -> None:
    steps = instance.steps()
    fronts, single = Search(steps).best(), Search(steps, keep_fronts=False).best()
    if single is not None:
        assert fronts is not None
        assert fronts.seconds <= single.seconds * (1 + 1e-12)


def test_pipelines_come_the_fastest_first_and_fit() -> None:
    network, machines = chain(6), preset("env-c")
    found = pipelines(network, machines, estimate_cluster(network, machines), 64)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        assert one.batch.samples * one.batch.count == 64
        assert all(sum(stage.samples) == one.batch.samples for stage in one.stages)


def test_what_nothing_holds_is_an_error_with_the_layer() -> None:
    network = chain(6)
    machines = cluster(("a", "b"), memory_bytes=2000)
    with pytest.raises(OutOfMemory, match=r"layer 0 \(layer0\) needs .*a has 2 kB: .* are missing"):
        pipelines(network, machines, even_profile(network, machines.names), 8)

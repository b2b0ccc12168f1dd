"""Plans for inference: prices are simulated, shares are exact, the fastest wins, one device alone where it should."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from hand_made import CHANNELS, chain, changed, even_profile
from hand_made import cluster as made_cluster
from manyhands.cli.main import whole_app
from manyhands.decoupling.decouple import decouple
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import Device
from manyhands.facts.errors import BadPlan, ManyhandsError, OutOfMemory, UnknownName
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import layer_range, resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.reads import Blocks, Read
from manyhands.graph.capture import capture
from manyhands.inference.replanning import replan_inference
from manyhands.models.registry import build
from manyhands.planner.channel_plans import channel_groups, channel_stage, compositions, dense_cuts
from manyhands.planner.incremental import IncrementalReplanner
from manyhands.planner.inference import INFERENCE_STRATEGIES, inference_task
from manyhands.planner.inference_stages import balanced_pipeline, fair_samples
from manyhands.planner.inference_tiles import tile_ends
from manyhands.planner.task import Task
from manyhands.plans.inference import inference_table, plan_for, sample_seconds, stream_seconds
from manyhands.plans.networks import load_network
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.simulating import simulate
from manyhands.schedule.synchronisation import sync_points

GROUPS = 4


class Decoupled(nn.Module):
    """A dense first layer, grouped ones with a shuffle between them, and two dense layers behind the maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.before = nn.Conv2d(16, 16, 3, padding=1, groups=GROUPS)
        self.after = nn.Conv2d(16, 32, 3, padding=1, groups=GROUPS)
        self.hidden = nn.Linear(32, 64)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.channel_shuffle(torch.relu(self.before(torch.relu(self.first(x)))), GROUPS)
        x = torch.relu(self.hidden(torch.relu(self.after(x)).mean((2, 3))))
        out: Tensor = self.classifier(x)
        return out


@cache
def made() -> Network:
    return capture(Decoupled(), torch.zeros(2, 3, 16, 16), granularity="operators", name="decoupled").network


@pytest.fixture(scope="module")
def decoupled() -> Network:
    return made()


@pytest.fixture(scope="module")
def tiny() -> Network:
    return load_network("tiny")


def machines(speeds: Sequence[float], link: Link, memory_bytes: int = 10**9) -> Cluster:
    devices = tuple(
        Device(
            name=f"d{n}", gflops=speed, memory_bytes=memory_bytes, memory_bytes_per_second=speed * 1e9,
            operator_seconds=0.0,
        )
        for n, speed in enumerate(speeds)
    )  # fmt: skip
    return Cluster("drawn", devices, link)


SPEEDS = st.sampled_from((0.05, 0.1, 0.2, 0.3))
LINKS = st.builds(Link, st.sampled_from((1e6, 1e7, 1e9)), st.sampled_from((0.0, 1e-5, 1e-3)))
CLUSTERS = st.builds(machines, st.lists(SPEEDS, min_size=2, max_size=3), LINKS)


def streaming(network: Network, stages: Sequence[Stage]) -> Plan:
    return Plan(network.name, 1, tuple(stages), 1, "stream", optimizer_slots=0)


def every_share(network: Network, cluster: Cluster) -> Iterator[Plan]:
    """All ways to give channel groups to devices, equal ones told apart, with every cut of the dense layers."""
    for counts in product(range(GROUPS + 1), repeat=len(cluster.names)):
        if sum(counts) == GROUPS and max(counts) < GROUPS:
            for cut in dense_cuts(network, 0, len(network.ops)):
                yield streaming(network, [channel_stage((0, len(network.layers)), cluster.names, counts, cut)])


# ---- Channels


def test_the_number_of_channel_groups(decoupled: Network, tiny: Network) -> None:
    assert channel_groups(decoupled) == GROUPS
    assert channel_groups(tiny) == 1
    assert channel_groups(_in_groups(chain(4), {1: 2, 2: 2, 3: 2})) == 2
    assert channel_groups(_in_groups(chain(4), {1: 2, 2: 4, 3: 2})) == 2  # the first stays dense, depthwise is no group
    assert channel_groups(_in_groups(chain(4), {1: 4, 2: 4, 3: 4})) == 1
    assert channel_groups(_in_groups(chain(4), {1: 2, 3: 2})) == 1


def _in_groups(network: Network, groups: dict[int, int]) -> Network:
    """A hand-made chain with some of its convolutions in groups."""
    for op, count in groups.items():
        (read,) = network.ops[op].reads
        rule = Blocks(1, CHANNELS // count, CHANNELS // count)
        rules = (read.rules[0], rule, *read.rules[2:])
        network = changed(network, op, channels="grouped", reads=(Read(read.tensor, rules),))
    return network


def test_compositions_tell_equal_devices_not_apart() -> None:
    assert list(compositions(3, [0, 0])) == [(3, 0), (2, 1)]
    assert list(compositions(2, [0, 1])) == [(2, 0), (1, 1), (0, 2)]
    assert len(list(compositions(4, [0, 1, 2]))) == 15
    assert list(compositions(4, [0, 1, 0])) == [(4, 0, 0), (3, 1, 0), (3, 0, 1), (2, 2, 0), (2, 1, 1), (2, 0, 2),
                                                (1, 3, 0), (1, 2, 1), (0, 4, 0)]  # fmt: skip


@settings(max_examples=8)
@given(cluster=CLUSTERS)
def test_channel_shares_equal_exhaustive_search(cluster: Cluster) -> None:
    decoupled = made()
    profile = estimate_cluster(decoupled, cluster)
    found = plan_for(decoupled, cluster, profile, strategy="channels")
    every = {sample_seconds(plan, decoupled, cluster, profile) for plan in every_share(decoupled, cluster)}
    assert found.candidates[0].seconds == pytest.approx(min(every), rel=1e-9)
    assert sample_seconds(found.plan, decoupled, cluster, profile) == found.candidates[0].seconds


def test_unequal_devices_get_unequal_numbers_of_groups(decoupled: Network) -> None:
    found = plan_for(decoupled, machines((0.3, 0.1), Link(1e9, 0.0)), strategy="channels").plan
    assert found.stages[0].share == ByChannels((3, 1), *_lists(found))
    alike = plan_for(decoupled, machines((0.1, 0.1, 0.1), Link(1e12, 0.0)), strategy="channels").plan
    assert sorted(_groups(alike)) in ([1, 1, 2], [2, 2])


def _groups(plan: Plan) -> tuple[int, ...]:
    share = plan.stages[0].share
    assert isinstance(share, ByChannels)
    return share.groups


def _lists(plan: Plan) -> tuple[tuple[int | str, ...] | None, tuple[int | str, ...]]:
    share = plan.stages[0].share
    assert isinstance(share, ByChannels)
    return share.input_based, share.everywhere


def test_more_devices_than_groups_leave_some_out(decoupled: Network) -> None:
    cluster = machines((0.1,) * 6, Link(1e9, 0.0))
    found = plan_for(decoupled, cluster, strategy="channels").plan
    assert _groups(found) == (1, 1, 1, 1)


def test_dense_layers_behind_each_other_are_had_by_all_where_that_saves_waiting(decoupled: Network) -> None:
    """Of two fully connected layers the second reads what everybody has: the shuffle and one sum are waited for."""
    cuts = {cut.name: cut for cut in dense_cuts(decoupled, 0, len(decoupled.ops))}
    assert set(cuts) == {"by bytes", "input-based", "output-based", "sums everywhere"}
    points = {}
    for name, cut in cuts.items():
        plan = streaming(decoupled, [channel_stage((0, len(decoupled.layers)), ("a", "b"), (2, 2), cut)])
        points[name] = sync_points(plan, decoupled).points
    assert points == {"by bytes": 3, "input-based": 3, "output-based": 3, "sums everywhere": 2}
    slow = machines((0.1, 0.1), Link(1e9, 0.05))
    assert "sums everywhere" in plan_for(decoupled, slow, strategy="channels").candidates[0].name


# ---- The fastest of all


@pytest.mark.slow
@settings(max_examples=6)
@given(cluster=CLUSTERS)
def test_auto_is_never_slower_than_what_it_looks_at(cluster: Cluster) -> None:
    decoupled = made()
    profile = estimate_cluster(decoupled, cluster)
    found = plan_for(decoupled, cluster, profile)
    layers = len(decoupled.layers)
    plans = [streaming(decoupled, [Stage((0, layers), (name,))]) for name in cluster.names]
    plans += every_share(decoupled, cluster)
    plans += [
        streaming(decoupled, [Stage((0, tile_ends(decoupled)[0]), cluster.names, ByTiles((1,) * len(cluster.names))),
                              Stage((tile_ends(decoupled)[0], layers), (name,))])
        for name in cluster.names if tile_ends(decoupled)[0] < layers and len(set(_speeds(cluster))) == 1
    ]  # fmt: skip
    least = min(sample_seconds(plan, decoupled, cluster, profile) for plan in plans)
    assert found.candidates[0].seconds <= least * (1 + 1e-9)
    assert sample_seconds(found.plan, decoupled, cluster, profile) == found.candidates[0].seconds
    known = [one.seconds for one in found.candidates]
    assert known == sorted(known)


def _speeds(cluster: Cluster) -> list[float]:
    return [device.gflops for device in cluster.devices]


@pytest.mark.slow
@settings(max_examples=3)
@given(cluster=CLUSTERS)
def test_auto_for_throughput_is_never_slower_than_what_it_looks_at(cluster: Cluster) -> None:
    decoupled = made()
    profile = estimate_cluster(decoupled, cluster)
    found = plan_for(decoupled, cluster, profile, objective="throughput")
    for name in ("single", "samples", "pipeline", "channels"):
        best = plan_for(decoupled, cluster, profile, objective="throughput", strategy=name).candidates[0]
        assert found.candidates[0].seconds <= best.seconds * (1 + 1e-9), best.name
    assert sample_seconds(found.plan, decoupled, cluster, profile, "throughput") == found.candidates[0].seconds


@pytest.mark.slow
def test_one_device_alone_wins_over_slow_links_and_loses_over_fast_ones(decoupled: Network) -> None:
    slow = plan_for(decoupled, machines((0.1, 0.1, 0.3), Link(1e5, 0.5)))
    assert slow.plan.devices == ("d2",)
    assert slow.candidates[0].name == "single on d2"
    fast = plan_for(decoupled, machines((0.1, 0.1, 0.1), Link(1e12, 0.0)))
    assert len(fast.plan.devices) > 1


def test_a_device_that_only_slows_it_is_left_out(decoupled: Network) -> None:
    found = plan_for(decoupled, machines((0.3, 0.3, 0.001), Link(1e9, 1e-5)))
    assert set(found.plan.devices) == {"d0", "d1"}


@pytest.mark.slow
def test_what_does_not_fit_in_memory_is_refused_with_the_reason(decoupled: Network) -> None:
    weights = sum(weight.bytes for weight in decoupled.weights.values())
    cluster = machines((0.1, 0.1, 0.1, 0.1), Link(1e7, 1e-4), memory_bytes=weights + 8 * 1024)
    for objective in ("latency", "throughput"):
        found = plan_for(decoupled, cluster, objective=objective)
        assert len(found.plan.devices) > 1
        result = simulate(found.plan, decoupled, cluster)
        assert all(device.peak_bytes <= device.memory_bytes for device in result.devices.values())
        single = next(one for one in found.candidates if one.name.startswith("single"))
        assert single.plan is None
        assert "would hold" in single.reason
    with pytest.raises(BadPlan, match="No plan for inference of decoupled fits"):
        plan_for(decoupled, machines((0.1, 0.1), Link(1e7, 0.0), memory_bytes=1024))
    with pytest.raises(OutOfMemory):
        plan_for(decoupled, machines((0.1, 0.1), Link(1e7, 0.0), memory_bytes=1024), strategy="single")


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("strategy", INFERENCE_STRATEGIES[1:])
def test_every_strategy_by_name_has_a_plan(tiny: Network, strategy: str, objective: str) -> None:
    cluster = Cluster("two", preset("decnn-240-5").devices[:2], Link(3e7, 2.5e-3))
    if (strategy, objective) == ("samples", "latency"):
        with pytest.raises(BadPlan, match="single sample"):
            plan_for(tiny, cluster, objective=objective, strategy=strategy)
        return
    found = make_plan(tiny, cluster, objective=objective, strategy=strategy)
    assert found.objective == objective
    assert not found.plan.is_training
    assert found.plan.optimizer_slots == 0
    if objective == "latency":
        assert (found.plan.order, found.plan.batch_size) == ("stream", 1)
    assert resolve(Plan.from_dict(found.plan.to_dict()), tiny, cluster) == found.plan


def test_names_that_are_wrong_are_said_to_be(tiny: Network) -> None:
    cluster = preset("home")
    with pytest.raises(UnknownName, match="strategy"):
        plan_for(tiny, cluster, strategy="tile")
    with pytest.raises(UnknownName, match="objective"):
        plan_for(tiny, cluster, objective="speed")
    with pytest.raises(UnknownName, match="device"):
        plan_for(tiny, cluster, home="phone")


def test_a_cluster_of_one_device_has_one_plan(tiny: Network) -> None:
    cluster = machines((1.0,), Link(1e6, 0.0))
    assert [one.name for one in plan_for(tiny, cluster).candidates] == ["single on d0"]
    for strategy in ("tiles", "modnn", "channels", "pipeline", "split"):
        with pytest.raises(BadPlan, match="at least two devices"):
            plan_for(tiny, cluster, strategy=strategy)


# ---- Stages: samples, pipelines, splits


@settings(max_examples=20)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), st.integers(2, 7))
def test_samples_make_the_slowest_device_fastest(speeds: list[float], size: int) -> None:
    network = chain(2)
    cluster = machines(speeds, Link(1e6, 0.0))
    task = inference_task(network, cluster, estimate_cluster(network, cluster))
    counts = fair_samples(task, size)

    def slowest(given: Sequence[int]) -> float:
        return max(task.step_seconds(name, own) if own else 0.0 for name, own in zip(cluster.names, given))

    ways = (way for way in product(range(size + 1), repeat=len(speeds)) if sum(way) == size)
    assert sum(counts.values()) == size
    assert slowest(list(counts.values())) == pytest.approx(min(map(slowest, ways)))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("strategy", ["single", "channels", "pipeline"])
def test_a_stream_goes_in_batches_where_they_pay(strategy: str) -> None:
    """Where an operator costs as much for eight samples as for one, and not where it costs eight times as much."""
    network = made()
    dear = replaced(machines((1.0, 1.0), Link(1e9, 1e-6)), operator_seconds=0.01)
    found = plan_for(network, dear, objective="throughput", strategy=strategy)
    assert found.plan.micro_batch_size == 8
    assert found.candidates[0].name.endswith("8 at a time")
    assert plan_for(network, dear, strategy=strategy).plan.micro_batch_size == 1  # one sample alone waits for nobody
    even = machines((1.0, 1.0), Link(1e9, 0.0))
    assert plan_for(network, even, objective="throughput", strategy=strategy).plan.micro_batch_size == 1
    most = max(one.peak_bytes for one in simulate(found.plan, network, dear).devices.values())
    less = replaced(dear, memory_bytes=int(most) - 1)
    assert plan_for(network, less, objective="throughput", strategy=strategy).plan.micro_batch_size in (2, 4)


def replaced(cluster: Cluster, **facts: float) -> Cluster:
    """The same with other facts of every device."""
    devices = tuple(msgspec.structs.replace(one, **facts) for one in cluster.devices)
    return msgspec.structs.replace(cluster, devices=devices)


def test_throughput_by_samples_is_what_the_slowest_share_takes() -> None:
    network = chain(3)
    cluster = machines((2.0, 1.0), Link(1e6, 0.0))
    found = plan_for(network, cluster, objective="throughput", strategy="samples")
    share = found.plan.stages[0].share
    assert isinstance(share, BySamples)
    task = inference_task(network, cluster, estimate_cluster(network, cluster))
    slowest = max(task.step_seconds(name, own) for name, own in zip(found.plan.devices, share.samples))
    assert found.candidates[0].seconds == pytest.approx(slowest / found.plan.batch_size)


def _slowest(task: Task, stages: Sequence[Stage]) -> float:
    times = []
    for before, stage in zip((None, *stages), stages):
        first, last = layer_range(stage)
        times.append(sum(task.layer_seconds(stage.devices[0], layer, 1) for layer in range(first, last)))
        if before is not None:
            rate = task.cluster.bytes_per_second_between(before.devices[0], stage.devices[0])
            times.append(task.network.cut_bytes(first) / rate)
    return max(times)


@settings(max_examples=20)
@given(st.data())
def test_pipelines_equal_exhaustive_search(data: st.DataObject) -> None:
    network = chain(data.draw(st.integers(3, 5)))
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
    cluster = machines(speeds, Link(1e6, 0.0))
    fast = data.draw(st.sampled_from(list(permutations(cluster.names, 2))))
    cluster = cluster.with_link(Link(1e9, 0.0), fast)
    task = inference_task(network, cluster, estimate_cluster(network, cluster))
    layers = len(network.layers)
    for count in (2, 3):
        best = min(
            _slowest(task, [Stage((a, b), (name,)) for a, b, name in zip((0, *cuts), (*cuts, layers), names)])
            for cuts in product(range(1, layers), repeat=count - 1)
            for names in permutations(cluster.names, count)
            if list(cuts) == sorted(set(cuts))
        )
        found = balanced_pipeline(task, count)
        assert found is not None
        assert _slowest(task, found) == pytest.approx(best)


def test_a_weight_that_two_layers_read_takes_memory_once_in_each_stage() -> None:
    def ends(network: Network, memory: int) -> list[object] | None:
        present = made_cluster(("d0", "d1"), Link(1e9, 0.0), memory_bytes=memory)
        stages = balanced_pipeline(inference_task(network, present, even_profile(network, ("d0", "d1"))), 2)
        return None if stages is None else [stage.layers[1] for stage in stages]

    plain = chain(4, weight_elements=1000)
    tied = changed(plain, 3, weights=("w0", "w3"))
    assert ends(plain, 8_000) == [2, 4]
    assert ends(tied, 12_000) == [2, 4]  # 8,000 bytes before the cut, 12,000 behind it
    assert ends(tied, 11_999) is None
    assert ends(changed(plain, 3, weights=("w2", "w3")), 8_000) == [2, 4]


def test_a_pipeline_answers_as_often_as_its_slowest_stage() -> None:
    network = chain(4)
    found = plan_for(network, machines((1.0, 1.0), Link(1e9, 0.01)), objective="throughput", strategy="pipeline")
    own = estimate_cluster(network, machines((1.0,), Link(1e9, 0.0))).of("d0")
    stage = sum(own.layer_seconds(layer, 1)[0] for layer in (0, 1))
    assert found.candidates[0].seconds == pytest.approx(stage, rel=1e-6)  # the delay is waited for once
    assert found.plan.batch_size == found.plan.micro_batches == 1


def test_few_samples_take_longer_each_than_those_of_a_long_stream(tiny: Network) -> None:
    cluster = preset("env-c")
    times = estimate_cluster(tiny, cluster)
    plan = plan_for(tiny, cluster, times, objective="throughput", strategy="pipeline").plan
    size, steady = plan.micro_batch_size, sample_seconds(plan, tiny, cluster, times, "throughput")
    taken = {count: stream_seconds(plan, tiny, cluster, times, count) for count in (1, size, 3 * size, 1000 * size)}
    assert taken[1] == taken[size] == pytest.approx(size * sample_seconds(plan, tiny, cluster, times))
    assert taken[3 * size] > 1.2 * 3 * size * steady
    assert taken[1000 * size] == pytest.approx(1000 * size * steady, rel=0.05)


def test_a_split_starts_where_the_input_is_and_is_cut_where_it_is_fastest() -> None:
    network, cluster = made(), preset("edge-cloud-pi").with_link(Link(1e7, 1e-4))
    profile = estimate_cluster(network, cluster)
    found = plan_for(network, cluster, profile, strategy="split", home="edge")
    layers = len(network.layers)
    split = [
        streaming(network, [Stage((0, cut), ("edge",)), Stage((cut, layers), ("cloud",))]) for cut in range(1, layers)
    ]
    alone = [streaming(network, [Stage((0, layers), (name,))]) for name in ("edge", "cloud")]
    homes = dict.fromkeys(network.inputs, "edge")
    every = [msgspec.structs.replace(plan, homes=homes) for plan in (*split, *alone)]
    seconds = [sample_seconds(plan, network, cluster, profile) for plan in every]
    assert found.candidates[0].seconds == pytest.approx(min(seconds))
    assert len(found.candidates) == len(every)
    at_cloud = next(one for one in found.candidates if one.name == "split: all on cloud")
    size = network.tensors[network.inputs[0]].bytes_per_sample
    link = cluster.link_between("edge", "cloud")
    assert at_cloud.seconds > size / link.bytes_per_second + link.delay_seconds
    assert all(one.plan is not None and one.plan.homes == homes for one in found.candidates)
    assert plan_for(network, cluster, profile, home="edge").candidates[0].seconds <= min(seconds)


# ---- Rivals, and how often devices wait


@pytest.fixture(scope="module")
def resnet50() -> Network:
    return load_network("resnet50")


@pytest.mark.slow
def test_what_really_travels_for_resnet50_by_tiles(resnet50: Network) -> None:
    """As a run does it: the input's border is at hand (one point less), max pooling exchanges (one more), a window that
    moves by two asks one side only, and where 7 or 14 rows do not divide evenly, a skip's 1x1 convolution that moves by
    two must ask too (once in 2-D, twice in 1-D)."""
    cluster = preset("decnn-240-20")
    end = tile_ends(resnet50)[0]
    tail = Stage((end, len(resnet50.layers)), cluster.names[:1])
    found = {}
    for name, share in (("2-D", ByTiles((1, 1), (1, 1))), ("1-D", ByTiles((1, 1, 1, 1)))):
        plan = streaming(resnet50, [Stage((0, end), cluster.names, share), tail])
        count = found[name] = sync_points(plan, resnet50)
        result = simulate(plan, resnet50, cluster, keep_spans=False)
        assert result.total_bytes == count.bytes + count.between_bytes
        assert count.between_messages == 3
    assert (found["2-D"].points, found["1-D"].points) == (17 - 1 + 1 + 1, 17 - 1 + 1 + 2)
    assert found["2-D"].messages == 13 * 12 + 5 * 5
    assert found["1-D"].messages == 13 * 6 + 4 * 3 + 2 * 2
    assert found["2-D"].bytes == pytest.approx(1.2e6, rel=0.05)
    assert found["1-D"].bytes == pytest.approx(1.8e6, rel=0.05)


@pytest.mark.slow
def test_baselines_cut_as_they_do_and_exchange_at_every_layer(resnet50: Network) -> None:
    cluster = preset("decnn-240-20")
    for name, rows, columns in (("modnn", 4, 1), ("coates", 2, 2)):
        found = plan_for(resnet50, cluster, strategy=name)
        share = found.plan.stages[0].share
        assert isinstance(share, ByTiles)
        assert (len(share.rows), len(share.columns)) == (rows, columns)
        assert share.forward_groups is None
        assert found.plan.devices == cluster.names
        tails = {type(one.plan.stages[-1].share) for one in found.candidates if one.plan is not None}
        assert ByChannels in tails  # the classifier, input-based, was looked at
    two = Cluster("two", cluster.devices[:2], cluster.link)
    share = plan_for(resnet50, two, strategy="coates").plan.stages[0].share
    assert isinstance(share, ByTiles)
    assert (len(share.rows), len(share.columns)) == (1, 2)


class Heavy(nn.Module):
    """Most of it lies behind the maps, as in VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(3, 8, 3, padding=1)
        self.hidden, self.last = nn.Linear(8 * 16 * 16, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.hidden(torch.relu(self.maps(x)).flatten(1))))
        return out


def test_fully_connected_layers_of_the_baselines_are_shared_by_channels() -> None:
    network = capture(Heavy(), torch.zeros(2, 3, 16, 16), granularity="operators", name="heavy").network
    cluster = machines((0.1, 0.1), Link(1e9, 1e-5))
    found = plan_for(network, cluster, strategy="modnn")
    assert isinstance(found.plan.stages[-1].share, ByChannels)
    assert "by channels" in found.candidates[0].name
    far = plan_for(network, machines((0.1, 0.1), Link(1e9, 1.0)), strategy="modnn")
    assert far.plan.stages[-1].devices == ("d0",)  # two delays of a second are not worth it


def test_channels_of_a_decoupled_network_wait_at_shuffles_and_at_dense_layers(decoupled: Network) -> None:
    stage = Stage((0, len(decoupled.layers)), ("a", "b", "c", "d"), ByChannels((1, 1, 1, 1)))
    count = sync_points(streaming(decoupled, [stage]), decoupled)
    shuffled = 16 * 16 * 16 * 4 * 3 // 4  # three quarters of a map of 16 channels
    assert count.points == 3
    assert count.messages == 36
    assert count.bytes == shuffled + 32 * 4 * 3 + 10 * 4 * 3  # and what two dense layers fetch or add up
    assert (count.between_messages, count.between_bytes) == (0, 0)


@pytest.mark.slow
def test_the_papers_table_3() -> None:
    """Three shuffles are three points of 12 messages among four devices; the classifier's sums are one more."""
    module = decouple(build("resnet50"), groups=4, shuffles=3, widen=1.5, inputs=(3, 224, 224))
    network = capture(module, torch.zeros(2, 3, 224, 224), name="decoupled").network
    assert channel_groups(network) == 4
    cluster = preset("decnn-240-20")
    plan = plan_for(network, cluster, strategy="channels").plan
    assert _groups(plan) == (1, 1, 1, 1)
    count = sync_points(plan, network)
    assert (count.points, count.messages) == (3 + 1, 36 + 12)
    assert count.bytes - 3 * 1000 * 4 <= 1.58e6
    found = plan_for(network, cluster)
    assert found.candidates[0].name.startswith("channels")
    baselines = [one for one in found.candidates if one.name.startswith(("modnn", "coates"))]
    assert all(sync_points(one.plan, network).points >= 17 for one in baselines if one.plan is not None)


# ---- When devices come and go


@pytest.mark.slow
def test_after_a_loss_the_same_strategy_or_any_that_can(decoupled: Network) -> None:
    cluster = machines((0.1,) * 4, Link(1e9, 1e-5))
    profile = estimate_cluster(decoupled, cluster)
    plan = plan_for(decoupled, cluster, profile, strategy="channels").plan
    assert _groups(plan) == (1, 1, 1, 1)
    three = cluster.without("d1")
    after = replan_inference(plan, decoupled, three, profile, strategy="channels")
    assert set(after.devices) <= {"d0", "d2", "d3"}
    assert sum(_groups(after)) == GROUPS
    one = three.without("d2").without("d3")
    assert replan_inference(after, decoupled, one, profile, strategy="channels").devices == ("d0",)
    by_samples = replan_inference(plan, decoupled, three, profile, objective="latency", strategy="samples")
    assert set(by_samples.devices) <= set(three.names)  # samples have no plan for latency: any other
    lost_home = replan_inference(plan, decoupled, three, profile, strategy="split", home="d1")
    assert set(lost_home.devices) <= set(three.names)
    with pytest.raises(ManyhandsError):
        replan_inference(plan, decoupled, machines((0.1,), Link(1e9, 0.0), memory_bytes=1024), profile)


def test_a_mended_plan_keeps_the_number_of_channel_groups(decoupled: Network) -> None:
    cluster = machines((0.3, 0.1, 0.1, 0.1), Link(1e9, 1e-5))
    profile = estimate_cluster(decoupled, cluster)
    linear = tuple(op.name for op in decoupled.ops if "linear" in op.target)
    share = ByChannels((1, 1, 1, 1), linear, linear[:1])
    plan = resolve(streaming(decoupled, [Stage((0, len(decoupled.layers)), cluster.names, share)]), decoupled)
    for gone, groups in ((("d3",), (2, 1, 1)), (("d2", "d3"), (3, 1)), (("d0",), (2, 1, 1))):
        left = cluster
        for name in gone:
            left = left.without(name)
        mending = IncrementalReplanner(plan, decoupled, left, Profile(profile.devices))
        drafts = next(iter(mending.shapes()))[0]
        found = mending.built(drafts, (len(decoupled.layers),)).stages[0]
        assert found.devices == left.names
        assert found.share == ByChannels(groups, *_lists(plan))


# ---- What is printed


@pytest.mark.slow
def test_the_table_says_what_each_plan_costs(decoupled: Network) -> None:
    cluster = machines((0.1,) * 4, Link(1e8, 1e-4))
    rows = inference_table(plan_for(decoupled, cluster), decoupled)
    assert rows[0]["seconds_per_sample"] == min(r["seconds_per_sample"] for r in rows if r["seconds_per_sample"])
    channels = next(row for row in rows if row["name"].startswith("channels"))
    assert channels["messages"] == 12 * channels["sync_points"]
    refused = next(row for row in rows if row["name"] == "samples")
    assert (refused["seconds_per_sample"], "single sample" in refused["reason"]) == (None, True)


@pytest.mark.slow
def test_the_command_plans_inference() -> None:
    runner = CliRunner()
    asked = ["plan", "--model", "tiny", "--cluster", "home", "--for"]
    found = json.loads(runner.invoke(whole_app(), [*asked, "throughput", "--share", "pipeline", "--json"]).output)
    assert found["objective"] == "throughput"
    seconds = [one["seconds_per_sample"] for one in found["candidates"] if one["seconds_per_sample"]]
    assert seconds == sorted(seconds)
    shown = runner.invoke(whole_app(), [*asked, "latency", "--share", "channels"])
    assert shown.exit_code == 0
    assert "of the channels" in shown.output
    assert "sync points" in shown.output
    refused = runner.invoke(whole_app(), [*asked, "latency", "--batch-size", "4"])
    assert refused.exit_code != 0
    assert isinstance(refused.exception, ManyhandsError | SystemExit)


def test_a_link_that_only_one_pair_has_is_seen(decoupled: Network) -> None:
    """Devices that look alike are told apart where their links are not alike."""
    slow = machines((0.1, 0.1, 0.1), Link(1e4, 0.5))
    pairs = (("d1", "d2"), ("d2", "d1"))
    cluster = Cluster("odd", slow.devices, slow.link, tuple(DirectedLink(*pair, Link(1e12, 0.0)) for pair in pairs))
    found = plan_for(decoupled, cluster, strategy="channels").plan
    assert found.stages[0].devices == ("d1", "d2")

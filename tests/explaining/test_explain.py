"""A plan explains itself: on clusters made so that one thing limits the step, that thing is named with its numbers."""

from __future__ import annotations

import math

import msgspec
import pytest

import hand_made
import manyhands as mh
from manyhands.explaining import what_if
from manyhands.explaining.critical_path import critical_path
from manyhands.explaining.explain import LONG_SECONDS, explain
from manyhands.explaining.explanation import Explanation
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.task import PlanCandidate
from manyhands.plans.networks import load_network
from manyhands.plans.planned import Planned

CHAIN = hand_made.chain(4)
BATCH = 8


@pytest.fixture(scope="module")
def tiny() -> Network:
    return load_network("tiny")


def pipeline(network: Network = CHAIN, micro_batches: int = 4) -> Plan:
    stages = (Stage((0, 2), ("a",)), Stage((2, 4), ("b",)))
    return Plan(network.name, BATCH, stages, micro_batches=micro_batches)


def shared(network: Network) -> Plan:
    stage = Stage((0, 4), ("a", "b"), BySamples((4, 4)))
    return Plan(network.name, BATCH, (stage,), batch_norm="local")


def even(network: Network = CHAIN, **slower: float) -> Profile:
    """10 ms forward and 20 ms backward a layer and sample, times what is said for a device."""
    times = {"a": 1.0, "b": 1.0, **slower}
    return hand_made.profile(
        network, {name: [(0.01 * own, 0.02 * own)] * len(network.layers) for name, own in times.items()}
    )


def explained(plan: Plan, cluster: Cluster, profile: Profile, network: Network = CHAIN) -> Explanation:
    return explain(Planned(plan, []), network, cluster, profile, with_what_if=False)


def test_the_slowest_stage_is_what_limits() -> None:
    found = explained(pipeline(), hand_made.cluster("ab"), even(b=5.0))
    binding = found.binding
    assert binding is not None
    assert (binding.kind, binding.stage, binding.devices) == ("compute", 1, ("b",))
    alone = BATCH * 2 * 0.03 * 5  # two layers of all samples
    ends = 2 * 2 * 0.03  # forward of the first micro-batch and backward of the last, on a
    assert binding.part == pytest.approx(alone / (alone + ends), rel=1e-3)
    assert binding.text == f"stage 1 on b computes {100 * binding.part:.0f} % of the step"
    assert sum(limit.part for limit in found.limits) == pytest.approx(1.0)
    assert binding.relaxed == "b twice as fast"
    faster = mh.simulate(pipeline(), CHAIN, hand_made.cluster("ab"), even(b=2.5))
    assert binding.relaxed_seconds == pytest.approx(faster.seconds, rel=1e-3)
    assert binding.speed_up == pytest.approx(found.seconds / faster.seconds, rel=1e-3)


def test_a_port_that_is_too_slow_is_named_with_its_bytes() -> None:
    made = hand_made.cluster("ab")
    devices = tuple(
        msgspec.structs.replace(one, up_bytes_per_second=2000.0) if one.name == "b" else one for one in made.devices
    )
    found = explained(pipeline(), Cluster("made", devices, made.link), even())
    assert found.binding is not None
    assert (found.binding.kind, found.binding.use) == ("transfer", "activations and their gradients")
    assert found.binding.bytes == BATCH * hand_made.MAP_BYTES
    assert "b's port out carries 6.14 kB at 16 kbit/s" in found.binding.text
    assert found.binding.relaxed == "links and ports twice as fast"


def test_a_slow_link_of_one_pair_is_named() -> None:
    made = hand_made.cluster("abc").with_link(Link(3000.0, 0.0), ("a", "b"))
    found = explained(pipeline(), made, even(c=1.0))
    assert found.binding is not None
    assert found.binding.devices == ("a", "b")
    assert "the link a to b carries 6.14 kB at 24 kbit/s" in found.binding.text
    step = BATCH * hand_made.MAP_BYTES / 3000.0
    assert found.binding.seconds == pytest.approx(step, rel=1e-6)  # all of it is waited for


def test_the_sum_of_gradients_is_named_by_its_weights() -> None:
    heavy = hand_made.chain(4, weight_elements=250_000)
    cluster = hand_made.cluster("ab", Link(1e6, 0.0))
    found = explained(shared(heavy), cluster, even(heavy), heavy)
    assert found.binding is not None
    assert (found.binding.use, found.binding.bytes, found.binding.stage) == ("weight gradients", 4_000_000, 0)
    assert found.binding.text.startswith("the sum of the 4 MB of weight gradients ends the step: ")
    computing = 4 * 4 * 0.03
    assert found.binding.seconds == pytest.approx(found.seconds - computing, rel=0.2)


def test_delays_are_named() -> None:
    found = explained(pipeline(micro_batches=1), hand_made.cluster("ab", Link(math.inf, 3.0)), even())
    assert found.binding is not None
    assert found.binding.kind == "delay"
    assert found.binding.seconds == pytest.approx(6.0)
    assert found.binding.relaxed_seconds == pytest.approx(found.seconds - 3.0)


def small(memory_bytes: int) -> Cluster:
    """A device for which starting an operator is dear: many small micro-batches take long."""
    device = Device(name="pi", gflops=5.0, memory_bytes=memory_bytes, operator_seconds=5e-3)
    return Cluster("small", (device,))


def test_full_memory_is_binding_where_more_of_it_is_faster(tiny: Network) -> None:
    asked = {"batch_size": 32, "strategy": "single"}
    whole = mh.plan(tiny, small(10**9), **asked)
    peak = mh.simulate(whole.plan, tiny, small(10**9)).devices["pi"].peak_bytes
    cluster = small(int(0.6 * peak))
    planned = mh.plan(tiny, cluster, **asked)
    budget = int(mh.simulate(planned.plan, tiny, cluster).devices["pi"].peak_bytes / 0.95)
    cluster = small(budget)
    found = explain(planned, tiny, cluster, **asked)
    assert found.binding is not None
    assert found.binding.kind == "memory"
    assert found.binding.text.startswith("pi is full: ")
    assert found.binding.part == pytest.approx(0.95, rel=1e-3)
    doubled = small(2 * budget)
    again = mh.plan(tiny, doubled, **asked)
    assert again.plan.micro_batches < planned.plan.micro_batches
    assert found.binding.relaxed_seconds == pytest.approx(mh.simulate(again.plan, tiny, doubled).seconds)
    assert found.binding.speed_up == pytest.approx(found.seconds / found.binding.relaxed_seconds)


def test_full_memory_that_costs_nothing_is_not_binding() -> None:
    plan = Plan(CHAIN.name, BATCH, (Stage((0, 4), ("a",), Single()),))
    roomy = hand_made.cluster("a")
    peak = mh.simulate(plan, CHAIN, roomy, even()).devices["a"].peak_bytes
    full = hand_made.cluster("a", memory_bytes=peak / 0.97)
    found = explain(Planned(plan, []), CHAIN, full, even(), strategy="single")
    assert [limit.kind for limit in found.full] == ["memory"]
    assert found.full[0].speed_up == pytest.approx(1.0)
    assert found.binding is not None
    assert found.binding.kind == "compute"


@pytest.mark.slow
def test_the_critical_path_is_the_whole_step_whatever_the_plan(tiny: Network) -> None:
    """Of every plan that was looked at: nothing is left out, nothing counts twice."""
    cluster = preset("env-d")
    planned = mh.plan(tiny, cluster, batch_size=16)
    ran = [one for one in planned.candidates if one.plan is not None]
    assert len({one.name.split()[0] for one in ran}) >= 4
    for one in ran:
        assert one.plan is not None
        result = mh.simulate(one.plan, tiny, cluster)
        legs = critical_path(result, cluster)
        assert sum(leg.seconds for leg in legs) == pytest.approx(result.seconds, rel=1e-9), one.name
        assert all(leg.seconds >= 0 for leg in legs)
        for name, own in result.devices.items():
            mine = sum(leg.seconds for leg in legs if leg.kind == "compute" and leg.source == name)
            assert mine <= own.busy_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_what_ifs_are_plans_for_the_changed_cluster(tiny: Network) -> None:
    cluster = preset("env-d")
    profile = estimate_cluster(tiny, cluster)
    planned = mh.plan(tiny, cluster, batch_size=16, strategy="pipeline", profile=profile)
    found = explain(planned, tiny, cluster, profile, with_what_if=True, strategy="pipeline")
    changed = {"links and ports ten times as fast": (what_if.with_network(cluster, rate=10.0), profile)}
    for kind, device in (("jetson-tx2", "tx2-1"), ("jetson-nano", "nano-1")):
        changed[f"one more {kind}"] = what_if.one_more(cluster, profile, cluster.device(device))
    assert {one.change for one in found.what_if} == set(changed)
    for one in found.what_if:
        other, known = changed[one.change]
        anew = mh.plan(tiny, other, batch_size=16, strategy="pipeline", profile=known).plan
        seconds = [mh.simulate(plan, tiny, other, known).seconds for plan in (anew, planned.plan)]
        assert one.seconds == pytest.approx(min(seconds))
        assert one.speed_up == pytest.approx(found.seconds / one.seconds)
    best = found.best_changes
    assert [one.is_device for one in best] == [True, False]
    assert best[0].seconds == min(one.seconds for one in found.what_if if one.is_device)


def test_one_more_device_is_a_twin() -> None:
    cluster = preset("home")
    profile = estimate_cluster(load_network("tiny"), cluster)
    grown, known = what_if.one_more(cluster, profile, cluster.device("nano"))
    twin = grown.device("nano-2")
    assert twin.gflops == cluster.device("nano").gflops
    assert grown.link_between("laptop", "nano-2") == cluster.link_between("laptop", "nano")
    assert grown.link_between("nano-2", "pi4-1") == cluster.link
    assert known.of("nano-2").layers == profile.of("nano").layers
    again, _ = what_if.one_more(grown, known, cluster.device("pi4-1"))
    assert again.names[-1] == "pi4-3"


def test_runners_up_say_where_they_lose() -> None:
    heavy = hand_made.chain(4, weight_elements=250_000)
    cluster, profile = hand_made.cluster("ab", Link(1e6, 0.0)), even(heavy)
    plans = {"pipeline": pipeline(heavy), "samples": shared(heavy)}
    seconds = {name: mh.simulate(plan, heavy, cluster, profile).seconds for name, plan in plans.items()}
    candidates = [
        *(PlanCandidate(name, plan, seconds[name]) for name, plan in plans.items()),
        PlanCandidate("tiles", None, math.inf, "a would hold 3 GB of 1 GB.\nAnd more."),
    ]
    found = explain(Planned(plans["pipeline"], candidates), heavy, cluster, profile, with_what_if=False)
    samples, tiles = found.runners_up
    assert samples.times == pytest.approx(seconds["samples"] / seconds["pipeline"])
    assert samples.times > 2
    assert samples.reason.startswith("the sum of the 4 MB of weight gradients (")
    assert (tiles.seconds, tiles.times, tiles.reason) == (None, None, "a would hold 3 GB of 1 GB.")
    text = msgspec.json.encode(found.to_dict()).decode()
    for words in ("runners_up", "what_if", "binding", "relaxed_seconds"):
        assert words in text


def test_nothing_is_planned_again_where_planning_takes_long(tiny: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = preset("env-d")
    planned = mh.plan(tiny, cluster, batch_size=16, strategy="samples")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr("manyhands.explaining.explain.plan", never)
    found = explain(planned, tiny, cluster, planning_seconds=LONG_SECONDS + 1, strategy="samples")
    assert not found.what_if
    assert "links and ports ten times as fast" in found.skipped
    assert not explain(planned, tiny, cluster, with_what_if=False, strategy="samples").skipped

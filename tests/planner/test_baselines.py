"""Rivals' plans: each is what its paper says, none is faster than ours, and what they do not see shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from exhaustive import Exhaustive

from hand_made import chain, cluster, even_profile
from manyhands.explaining.comparison import ALONE, HETPIPE, compare
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.planner import baselines
from manyhands.planner.task import Task
from manyhands.plans.networks import load_network
from manyhands.plans.simulating import simulate


@pytest.fixture(scope="module")
def tiny() -> Network:
    return load_network("tiny", None, "operators")


def task_on(network: Network, machines: Cluster, batch_size: int = 32, **facts: object) -> Task:
    return Task(network, machines, estimate_cluster(network, machines), batch_size, **facts)  # type: ignore[arg-type]


def price_of(task: Task) -> baselines.Price:
    def price(plan: Plan) -> float:
        return simulate(plan, task.network, task.cluster, task.profile, keep_spans=False, within_memory=True).seconds

    return price


@pytest.mark.slow
def test_every_baseline_plans_as_it_says(tiny: Network) -> None:
    task = task_on(tiny, preset("env-c"), 96, batch_norm="local")
    plans = {name: plan for name, plan in baselines.every_baseline(task, price_of(task)) if isinstance(plan, Plan)}
    assert set(plans) == set(baselines.SYNCHRONOUS)
    assert [len(stage.devices) for stage in plans["data parallel"].stages] == [6]
    assert plans["EDDL"].stages[0].reduce == "gateway"
    assert task.step_seconds(plans["EDDL"].stages[0].devices[0], 96) == task.step_seconds(task.fastest(), 96)
    for name, order in (("pipeline parallel", "1f1b"), ("GPipe", "gpipe")):
        assert [len(stage.devices) for stage in plans[name].stages] == [1] * 6
        assert plans[name].order == order
    for name in ("PipeDream", "DAPPLE", "DAPPLE, dropping"):
        for stage in plans[name].stages:
            if isinstance(stage.share, BySamples):  # they take devices as alike
                assert max(stage.share.samples) - min(stage.share.samples) <= 1
    assert plans["PipeDream"].warm_up == "P-p"
    assert set(plans["DAPPLE"].devices) == set(task.cluster.names), "as published it leaves no device out"


def test_pipedream_has_the_least_slowest_stage() -> None:
    """Against every cut and every number of replicas."""
    network, names = chain(5, weight_elements=4000), ("a", "b", "c")
    machines = cluster(names, Link(2e6, 0.0))
    task = Task(network, machines, even_profile(network, names), 12, 4)
    plan = resolve(baselines._least_slowest_stage(task), network, machines)
    size, rate = 3, 2e6

    def slowest(ends: tuple[int, ...], widths: tuple[int, ...]) -> float:
        found = [2 * network.cut_bytes(end, size) / rate for end in ends[:-1]]
        for (first, last), width in zip(pairwise((0, *ends)), widths):
            seconds = sum(0.03 * size for _ in range(first, last))
            weights = 4 * 4000 * (last - first)
            found.append(max(seconds, 2 * (width - 1) * weights / rate) / width)
        return max(found)

    every = [
        slowest((*inside, 5), tuple(b - a for a, b in pairwise((0, *split, 3))))
        for count in (1, 2, 3)
        for inside in combinations(range(1, 5), count - 1)
        for split in combinations(range(1, 3), count - 1)
    ]
    ends = tuple(int(stage.layers[1]) for stage in plan.stages)
    assert slowest(ends, tuple(len(stage.devices) for stage in plan.stages)) == pytest.approx(min(every))


@pytest.mark.parametrize("rate", [2e5, 2e6, 1e9])
def test_dapple_has_the_least_round_with_every_device(rate: float) -> None:
    """Against every cut and every number of replicas, by Eq. 4-6."""
    network, names = chain(5, weight_elements=4000), ("a", "b", "c")
    machines = cluster(names, Link(rate, 0.0))
    task = Task(network, machines, even_profile(network, names), 12, 4, batch_norm="local")
    plan = resolve(baselines._least_round(task), network, machines)
    alike, everywhere = baselines._alike(task)
    batch = replace(baselines._settings(task), samples=3, count=4)
    every = {
        tuple((stage.first, stage.last, len(stage.devices)) for stage in stages): seconds
        for seconds, stages in Exhaustive(network, alike, everywhere, batch).all()
        if sum(len(stage.devices) for stage in stages) == 3
    }
    found = tuple((*map(int, stage.layers), len(stage.devices)) for stage in plan.stages)
    assert len(every) == 1 + 2 * 4 + 6
    assert every[found] == pytest.approx(min(every.values()))


def test_volume_is_equation_2() -> None:
    network = chain(4, weight_elements=1000)
    machines = cluster(("a", "b", "c"), Link(1e9, 0.0))
    task = Task(network, machines, even_profile(network, machines.names), 8, 2)
    alone, shared, cut = 4 * 1000 * 4, 4 * 1000 * 2, network.cut_bytes(2, 8)
    plan = baselines.data_parallel(task, price_of(task))
    assert baselines.volume(plan, task) == 2 * 2 * alone
    from manyhands.plans.pipelines import pipeline_plan

    mixed = pipeline_plan(network, machines, [2], [["a", "b"], "c"], batch_size=8, micro_batches=2)
    assert baselines.volume(mixed, task) == 2 * 1 * shared + 2 * cut
    assert simulate(mixed, network, machines, task.profile).total_bytes == baselines.volume(mixed, task)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("environment", ["env-a", "env-c", "env-d"])
def test_ours_is_never_slower_than_a_baseline(tiny: Network, environment: str) -> None:
    table = compare(tiny, preset(environment), batch_size=256, batch_norm="local")
    ours, best = table.ours, table.best_baseline()
    assert ours.runs
    assert best is not None
    assert ours.seconds <= best.seconds * (1 + 1e-9)
    assert table.row(HETPIPE).is_synchronous is False
    assert table.why
    assert set(table.to_dict()) == {"rows", "why"}


def test_where_distributing_is_a_mistake_one_device_is_taken() -> None:
    network = chain(3)
    machines = cluster(("a", "b"), Link(10.0, 5.0))
    table = compare(network, machines, batch_size=4, profile=even_profile(network, machines.names))
    assert table.ours.plan is not None
    assert len(table.ours.plan.devices) == 1
    assert table.row(ALONE).seconds == table.ours.seconds


def test_who_runs_out_of_memory_is_named() -> None:
    """GPipe keeps every micro-batch; ours keeps few, and fits."""
    network = chain(6)
    roomy = cluster(("a", "b"), Link(1e6, 0.0))
    profile = even_profile(network, roomy.names)
    tight = cluster(("a", "b"), Link(1e6, 0.0), memory_bytes=120_000)
    table = compare(network, tight, batch_size=64, micro_batches=32, profile=profile)
    gpipe = table.row("GPipe")
    assert table.ours.runs
    assert not gpipe.runs
    assert "runs out of memory" in gpipe.problem
    assert gpipe.peak_bytes > 120_000

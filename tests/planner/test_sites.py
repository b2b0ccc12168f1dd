"""Sites as replicas, and the groups that sums go through, against every plan there is on small trees of links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest

from hand_made import chain, even_profile
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.planner.placing import best_placed, placed
from manyhands.planner.sites import ranked_sites, replicas, site_groups
from manyhands.planner.strategies import choose
from manyhands.planner.task import Task
from manyhands.plans.planning import Prices, plan
from manyhands.schedule.actions import Reduce
from manyhands.schedule.policy import Schedule
from manyhands.simulator.simulate import simulate

DEEP = chain(4, weight_elements=2_000, statistics=[1])


def cluster(sites: int = 2, each: int = 2, uplink: str = "100 kB/s", *, slots: int = 1, delay: str = "1 ms") -> Cluster:
    """Sites of equal devices, or of hosts with several workers each."""
    device = {"kind": "custom", "gflops": 1, "memory": "1 GB", "memory_rate": "1 GB/s", "port": "1 MB/s"}
    devices = [
        {**device, "name": f"s{site}.{number}.{slot}", "site": f"s{site}", "host": f"s{site}.{number}"}
        for site in range(sites)
        for number in range(each)
        for slot in range(slots)
    ]
    entry = {"rate": uplink, "delay": delay, "link": {"rate": "1 MB/s", "delay": "0.1 ms"}}
    return Cluster.from_dict(
        {
            "sites": [{"name": f"s{site}", **entry} for site in range(sites)],
            "devices": devices,
            "link": {"rate": "1 GB/s", "delay": "1 ms"},
        }
    )


def task_of(made: Cluster, batch_size: int = 8, **options: object) -> Task:
    return Task(DEEP, made, even_profile(DEEP, made.names, 0.002, 0.004), batch_size, **options)  # type: ignore[arg-type]


def every_plan(task: Task) -> Iterator[Plan]:
    """Every plan of one or two stages with a replica in each of two sites of two devices."""
    first, second = site_groups(task)
    for micro_batches in (1, 2, 4):
        size = task.batch_size // micro_batches
        for part in range(1, size):
            parts = part, size - part
            if min(parts) >= 2:
                counts = [counts for of in parts for counts in (of // 2, of - of // 2)]
                yield task.plan([Stage((0, 4), (*first, *second), BySamples(tuple(counts)))], micro_batches)
            for cut, one, other in product((1, 2, 3), permutations(first), permutations(second)):
                stages = [
                    Stage((0, cut), (one[0], other[0]), BySamples(parts)),
                    Stage((cut, 4), (one[1], other[1]), BySamples(parts)),
                ]
                yield task.plan(stages, micro_batches)


@pytest.mark.quick(every=99)
@pytest.mark.parametrize("uplink", ["20 kB/s", "2 MB/s"])
def test_no_plan_with_a_replica_in_each_site_is_much_better(uplink: str) -> None:
    task = task_of(cluster(uplink=uplink))
    prices = Prices(task)
    best = ranked_sites(task, prices)[0]
    least = min(prices(resolve(other, task.network, task.cluster)) for other in every_plan(task))
    assert best.seconds <= 1.02 * least


@pytest.mark.parametrize("uplink", ["5 kB/s", "100 kB/s", "1 GB/s"])
@pytest.mark.parametrize("delay", ["0 s", "50 ms"])
def test_the_groups_of_sums_are_the_best_of_all(uplink: str, delay: str) -> None:
    """Of none, hosts, sites and both, by their simulated seconds."""
    made = cluster(2, 2, uplink, slots=2, delay=delay)
    task = task_of(made, 16)
    shared = task.plan([Stage((0, 4), made.names, BySamples((2,) * 8))], 1)

    def price(other: Plan) -> float:
        return simulate(other, task.network, made, task.profile, keep_spans=False).seconds

    every = [placed(shared, made, hosts=hosts, sites=sites) for hosts in (True, False) for sites in (True, False)]
    assert len({str(sorted(other.places.items())) for other in every}) == 4
    assert price(best_placed(shared, made, price)) == min(map(price, every))


def test_sums_through_hosts_and_sites_are_faster_where_uplinks_are_slow() -> None:
    made = cluster(2, 2, "20 kB/s", slots=2)
    task = task_of(made, 16)
    shared = task.plan([Stage((0, 4), made.names, BySamples((2,) * 8))], 1)
    flat, grouped = (
        simulate(other, task.network, made, task.profile, keep_spans=False).seconds
        for other in (shared, placed(shared, made))
    )
    assert grouped < 0.4 * flat


def test_samples_stay_in_their_site() -> None:
    """From stage to stage nothing crosses an uplink: sums do."""
    made = cluster(2, 4)
    task = task_of(made, 16)
    made_plan = resolve(replicas(task, site_groups(task), 2, 2), task.network, made)
    schedule = Schedule(made_plan, task.network)
    site = {name: made.device(name).site for name in made.names}
    sums = 0
    for name in made.names:
        for action in schedule.every_action(name):
            sums += isinstance(action, Reduce)
            assert not hasattr(action, "to") or site[action.to] == site[name]
    assert sums


def test_a_site_takes_samples_by_its_speed() -> None:
    made = cluster(3, 2)
    seconds = {name: 0.001 if name.startswith("s0") else 0.002 for name in made.names}
    profile = even_profile(DEEP, made.names)
    profile.devices.update({n: even_profile(DEEP, [n], s, s).of(n) for n, s in seconds.items()})
    task = replace(task_of(made, 8), profile=profile)
    (stage,) = replicas(task, site_groups(task), 1, 1).stages
    assert isinstance(stage.share, BySamples)
    assert stage.share.samples == (2, 2, 1, 1, 1, 1)


def test_fewer_samples_than_devices_leave_the_slowest_out() -> None:
    made = cluster(2, 4)
    task = task_of(made, 2)
    (stage,) = replicas(task, site_groups(task), 1, 1).stages
    assert stage.share == BySamples((1, 1))
    with pytest.raises(BadPlan, match="cannot be shared by 2 sites"):
        replicas(task, site_groups(task), 1, 2)


def test_one_site_is_none() -> None:
    with pytest.raises(BadPlan, match=r"in 1 site\(s\)"):
        ranked_sites(task_of(cluster(1, 2)), lambda other: 1.0)


def test_auto_tries_sites_where_there_are_some() -> None:
    task = task_of(cluster(uplink="20 kB/s"))
    names = {candidate.name for candidate in choose(task, Prices(task))}
    assert {"sites", "samples", "pipeline"} <= names
    alone = plan(DEEP, task.cluster, batch_size=8, strategy="sites", profile=task.profile).plan
    assert all(isinstance(stage.share, (BySamples, Single)) for stage in alone.stages)
    assert alone.places

"""Sums that go through hosts and sites are those of one device, whatever is shared: to 1e-10 in float64."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from harness import assert_exact, plan_for, shared
from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Reduce
from manyhands.schedule.policy import Schedule
from small_networks import batches_of, captured
from tiled_cases import small_case
from tiled_networks import same

STEPS = 3


def placed(plan: Plan, places: dict[str, str]) -> Plan:
    return Plan.from_dict(plan.to_dict() | {"places": places})


@pytest.mark.parametrize("norm", [False, True], ids=["", "with the norm of all gradients"])
@pytest.mark.parametrize(
    "places",
    [{"s0-0": "a", "s0-1": "a", "s0-2": "b", "s0-3": "b"}, {"s0-0": "p/a", "s0-1": "q", "s0-2": "p/a", "s0-3": "p/b"}],
    ids=["2 hosts x 2 workers", "sites of different depths"],
)
def test_one_stage_by_samples(places: dict[str, str], norm: bool) -> None:
    graph = captured("small")
    stage = shared(0, len(graph.network.layers), 3, 2, 1, 2)
    plan = placed(
        plan_for(graph, [stage], batch_size=16, micro_batches=2, gradient_norm=norm, bucket_bytes=400), places
    )
    ran = assert_exact(graph, plan, batches_of("small", STEPS, 16))
    sums = [action for action in ran.schedule.every_action("s0-0") if isinstance(action, Reduce)]
    assert {action.what for action in sums} == {"gradients", "statistics", *(["norm"] if norm else [])}
    assert all(action.places for action in sums)


def test_a_pipeline_of_replicas_in_sites() -> None:
    graph = captured("small")
    count = len(graph.network.layers)
    stages = [
        Stage((0, count // 2), ("p1", "p2", "q1"), BySamples((2, 1, 3))),
        Stage((count // 2, count), ("p3", "q2"), BySamples((3, 3))),
    ]
    places = {"p1": "p/h", "p2": "p/h", "p3": "p", "q1": "q", "q2": "q"}
    plan = placed(plan_for(graph, stages, batch_size=12, micro_batches=2), places)
    assert_exact(graph, plan, batches_of("small", STEPS, 12))


@pytest.mark.parametrize("grid", [(2, 2), pytest.param((4, 4), marks=pytest.mark.slow)])
def test_tiles_on_hosts(grid: tuple[int, int]) -> None:
    """As many workers on a host as there are columns: a row of tiles each."""
    case = small_case(lambda: nn.Sequential(same(2, 3), nn.BatchNorm2d(3), nn.SiLU(), same(3, 2)), (2, 16, 12))
    plan = case.plan(case.tiled(ByTiles((1,) * grid[0], (1,) * grid[1])), bucket_bytes=100)
    places = {name: f"host-{number // grid[1]}" for number, name in enumerate(plan.devices)}
    case.check(placed(plan, places))


@pytest.mark.parametrize("place", ["a b", "/a", "a/", "a//b", "a/" * 20 + "a"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    graph = captured("small")
    plan = plan_for(graph, [shared(0, len(graph.network.layers), 1, 1)], batch_size=2)
    with pytest.raises(BadPlan, match=r"places\.s0-0 is .*(.|\n)*site/host"):
        resolve(placed(plan, {"s0-0": place}), graph.network)


def test_a_plan_with_places_is_written_and_read(tmp_path: Any) -> None:
    graph = captured("small")
    plan = plan_for(graph, [shared(0, len(graph.network.layers), 1, 1)], batch_size=2)
    assert "places" not in plan.to_dict()
    places = {"s0-0": "p/a", "s0-1": "p"}
    again = Plan.from_dict(placed(plan, places).to_dict())
    assert again.places == places
    actions = Schedule(resolve(again, graph.network), graph.network).actions["s0-0"]
    assert any("p/a/s0-0,p/s0-1" in str(action) for action in actions)

"""A plan that mixes tiles with other shares, with each of its devices lost in turn: adapted, it runs (simulated)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from hand_made import cluster
from manyhands.facts.cluster import Cluster
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Order, Plan, Share, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.graph.capture import capture
from manyhands.planner.replanning import Replanned, replanned
from manyhands.simulator.simulate import simulate
from tiled_networks import small_resnet

LINK = Link(1e7, 0.001)
FAST = ("a", "b", "c")


@cache
def small_network() -> Network:
    """Maps of 16 x 16 that shrink to 4 x 4 and 2 x 2."""
    return capture(small_resnet(), torch.zeros(2, 3, 16, 16), name="small").network


def part_of(names: Sequence[str]) -> Cluster:
    return cluster(names, LINK)


def after_loss(plan: Plan, lost: str, how: str = "light") -> Replanned:
    network, present = small_network(), part_of([name for name in plan.devices if name != lost])
    known = estimate_cluster(network, present)
    found = replanned(
        plan, network, present, known, how=how,
        price=lambda one: simulate(one, network, present, known, keep_spans=False).seconds,
    )  # fmt: skip
    assert resolve(found.plan, network, present) == found.plan
    assert found.seconds == pytest.approx(simulate(found.plan, network, present, known).seconds)
    assert (found.plan.batch_size, found.plan.micro_batches) == (plan.batch_size, plan.micro_batches)
    return found


def mixed(order: Order, *stages: tuple[int, tuple[str, ...], Share]) -> Plan:
    """Stages by where they end."""
    ends = [0, *(end for end, _, _ in stages)]
    made = tuple(Stage((first, end), names, share) for first, (end, names, share) in zip(ends, stages))
    return resolve(
        Plan("small", 12, made, 3, order), small_network(), part_of(sorted({n for s in made for n in s.devices}))
    )


def kinds(plan: Plan) -> list[str]:
    return ["one" if len(stage.devices) == 1 else type(stage.share).__name__ for stage in plan.stages]


@cache
def plans() -> dict[str, Plan]:
    last = len(small_network().layers)
    return {
        "of its own": mixed(
            "1f1b", (2, FAST, ByTiles((2, 1, 1), (1,), (0,), (0, 1))), (3, ("d", "e"), BySamples((3, 1))),
            (last, ("f",), Single()),
        ),
        "shared": mixed(
            "gpipe", (2, FAST, ByTiles((1, 1, 1))), (3, ("c", "a"), BySamples((2, 2))), (last, ("d",), Single())
        ),
        "samples first": mixed(
            "1f1b", (1, ("d", "e"), BySamples((2, 2))), (last - 2, FAST, ByTiles((1,), (1, 1, 1))),
            (last, ("f",), Single()),
        ),
    }  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ["of its own", "shared", "samples first"])
def test_any_device_may_be_lost(name: str) -> None:
    plan = plans()[name]
    for lost in plan.devices:
        found = after_loss(plan, lost).plan
        assert lost not in found.devices
        if lost in FAST:
            assert "ByTiles" in kinds(found), lost


@pytest.mark.slow
def test_a_mended_plan_may_give_way_to_a_new_one() -> None:
    plan = plans()["shared"]
    assert after_loss(plan, "a", "auto").seconds <= after_loss(plan, "a").seconds


def test_where_a_map_is_too_small_for_a_tile_each_the_slowest_is_left_out() -> None:
    """Six tiles of a map of 4 x 4: five devices make rows or columns only, one more than there is room for."""
    last = len(small_network().layers)
    six = ("a", "b", "c", "d", "e", "f")
    plan = mixed("1f1b", (last - 3, ("x", "y"), BySamples((2, 2))), (last - 2, six, ByTiles((1, 1), (1, 1, 1))),
                 (last, ("z",), Single()))  # fmt: skip
    (tiled,) = (stage for stage in after_loss(plan, "c").plan.stages if len(stage.devices) > 2)
    assert isinstance(tiled.share, ByTiles)
    assert tiled.devices == ("a", "b", "d", "e")
    assert (len(tiled.share.rows), len(tiled.share.columns)) == (2, 2)

"""Prices of tiles: the walk along each direction equals the boxes, and the optimum equals exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hand_made import chain as chain_of
from hand_made import changed
from hand_made import cluster as cluster_of
from manyhands.facts.boxes import cut_points
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.graph.capture import capture
from manyhands.planner.tile_plans import cuts_longer_sides, grids, tile_shares
from manyhands.planner.tiles import TilePrices, with_groups
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.simulating import simulate
from manyhands.schedule.tiles import TileGeometry

SLOW = Link(1e5, 1e-3)


def prices(network: Network, share: ByTiles, link: Link = SLOW) -> tuple[TilePrices, Plan]:
    devices = tuple(f"d{i}" for i in range(math.prod(share.grid)))
    machines = cluster_of(devices, link)
    stage = Stage((0, len(network.layers)), devices, share)
    plan = resolve(Plan(network.name, 1, (stage,)), network, machines)
    return TilePrices(plan, 0, network, machines, estimate_cluster(network, machines)), plan


weights = st.lists(st.sampled_from((2.0, 3.0)), min_size=1, max_size=3).map(tuple)  # no tile of 6 columns is empty


@settings(max_examples=25, deadline=None)
@given(weights, weights, st.integers(1, 4), st.sampled_from((1, 3, 5)), st.data())
def test_the_walk_along_the_axes_finds_the_boxes(
    rows: tuple[float, ...], columns: tuple[float, ...], layers: int, kernel: int, data: st.DataObject
) -> None:
    if len(rows) * len(columns) == 1:
        rows = (1.0, 1.0)
    network = chain_of(layers, kernel=kernel)
    starts = (0, *sorted(data.draw(st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set()))))
    priced, plan = prices(network, ByTiles(rows, columns, starts))
    geometry = TileGeometry(plan, 0, network)
    for group in geometry.groups:
        needs = {axis: priced._forward_needs(axis, group.first, group.last) for axis in (0, 1)}
        for index in range(group.first, group.last):
            name = network.ops[index].outputs[0]
            areas = priced._areas({axis: needs[axis].made[name] for axis in (0, 1)})
            volumes = [geometry.computed[device][name].volume for device in geometry.devices]
            assert list(areas) == [volume // geometry.shape(name)[1] for volume in volumes]


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 3, 3, 2, 1), nn.LayerNorm(3), nn.Conv2d(3, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return y


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 3, 3, (1, 2, 1), 1), nn.ReLU(), nn.MaxPool3d(3, 1, 1), nn.Conv3d(3, 2, 3))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("build", "shape", "share"),
    [
        (ChannelsLast, (2, 13, 11), ByTiles((1, 2), (2, 1))),
        (volumes, (2, 9, 12, 8), ByTiles((2, 1), (1,), depths=(1, 2))),
        (volumes, (2, 9, 12, 8), ByTiles((1,), (1, 1), ("conv3d", "max_pool3d"), depths=(1, 1, 1))),
    ],
    ids=["channels last", "volumes", "volumes in groups"],
)
def test_the_walk_finds_the_boxes_of_volumes_and_where_channels_come_last(
    build: Callable[[], nn.Module], shape: tuple[int, ...], share: ByTiles
) -> None:
    network = capture(build(), torch.randn(2, *shape), granularity="operators").network
    priced, plan = prices(network, share)
    geometry = TileGeometry(plan, 0, network)
    assert geometry.maps >= {name for op in network.ops for name in op.outputs}
    for group in geometry.groups:
        needs = {axis: priced._forward_needs(axis, group.first, group.last) for axis in priced.axes}
        for index in range(group.first, group.last):
            name = network.ops[index].outputs[0]
            areas = priced._areas({axis: needs[axis].made[name] for axis in priced.axes})
            elements = math.prod(geometry.shape(name)) // math.prod(network.extents(name))
            assert [area * elements for area in areas] == [geometry.computed[d][name].volume for d in geometry.devices]
    assert all(groups.seconds > 0 for groups in priced.groupings())


def test_the_planner_cuts_the_depth_of_a_long_clip_and_not_that_of_a_thin_one() -> None:
    def planned(shape: tuple[int, ...]) -> ByTiles:
        network = capture(volumes(), torch.randn(2, *shape)).network
        found = make_plan(network, cluster_of(("a", "b"), Link(1e7, 1e-4)), batch_size=2, strategy="tiles").plan
        share = found.stages[0].share
        assert isinstance(share, ByTiles)
        return share

    assert planned((2, 64, 12, 10)).grid == (2, 1, 1)
    assert planned((2, 4, 64, 10)).grid == (2, 1)


def test_grids_in_three_directions() -> None:
    assert grids(4) == [(4, 1), (2, 2), (1, 4)]
    assert grids(4, 3) == [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
    assert [grid for grid in grids(4, 3) if cuts_longer_sides(grid, (8, 30, 30))] == [(1, 4, 1), (1, 2, 2)]
    assert cuts_longer_sides((2, 2, 1), (9, 9, 9))
    assert not cuts_longer_sides((1, 2, 2), (9, 9, 9))


@pytest.mark.parametrize("link", [Link(1e4, 1e-3), SLOW, Link(1e9, 1e-5)], ids=["slow", "middling", "fast"])
def test_the_optimum_is_the_best_of_all_groupings(link: Link) -> None:
    network = chain_of(5)
    priced, _ = prices(network, ByTiles((2, 1), (1, 1)), link)
    last = len(network.ops)
    inside = range(1, len(priced.starts))
    groupings = [(0, *some) for some in chain.from_iterable(combinations(inside, n) for n in range(len(inside) + 1))]

    def total(starts: tuple[int, ...]) -> float:
        bounds = (*(priced.starts[i] for i in starts), last)
        return sum(priced.forward(a, b, both_ways=True) for a, b in pairwise(bounds))

    def backward(starts: tuple[int, ...]) -> float:
        return sum(priced.backward(a, b)[0] for a, b in pairwise((*(priced.starts[i] for i in starts), last)))

    def ahead(starts: tuple[int, ...]) -> float:
        bounds = (*(priced.starts[i] for i in starts), last)
        return sum(priced.forward(a, b, both_ways=False) for a, b in pairwise(bounds))

    found = {groups.name: groups for groups in priced.groupings()}
    assert found["optimal"].seconds == pytest.approx(min(map(total, groupings)))
    assert found["optimal, deltas"].seconds == pytest.approx(min(map(ahead, groupings)) + min(map(backward, groupings)))
    assert found["one group"].seconds == pytest.approx(total((0,)))
    assert found["every layer"].seconds == pytest.approx(total(tuple(range(len(priced.starts)))))


def test_fetched_activations_are_priced_and_the_interior_comes_first_on_slow_links() -> None:
    network = chain_of(4)
    for op in (1, 2):  # their derivatives read what they read, as an activation's do
        network = changed(network, op, derives_from=network.ops[op].inputs)
    slow, plan = prices(network, ByTiles((1, 1)), Link(1e4, 1e-3))
    fast, _ = prices(network, ByTiles((1, 1)), Link(1e12, 0.0))
    found = {groups.name: groups for groups in slow.groupings()}
    assert found["one group each way"].fetched_seconds > 0
    assert found["one group"].fetched_seconds == 0
    assert slow.interior_first() == (1, 2, 3)
    assert len(fast.interior_first()) <= len(slow.interior_first())
    machines = cluster_of(plan.devices, Link(1e4, 1e-3))
    grouped = with_groups(plan, 0, found["one group each way"])
    assert simulate(grouped, network, machines).seconds > 0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(0, 20))
def test_no_device_is_left_without_a_row_however_slow(speeds: list[float], spare: int) -> None:
    extent = len(speeds) + spare
    points = cut_points(extent, tile_shares(speeds, extent))
    assert all(a < b for a, b in pairwise(points))


def test_sizes_of_tiles_are_in_proportion_to_speed() -> None:
    assert tile_shares([1.0, 2.0], 100) == (0.5, 1)
    assert cut_points(8, tile_shares([0.25, 0.81, 1.0], 8)) == (0, 1, 4, 8)

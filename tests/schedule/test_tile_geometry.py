"""The boxes of a tiled stage, by hand: what is owned, computed, fetched, differentiated and replicated.

That they are enough to train with is tested with the executor itself (tests/exactness/test_tiled_training.py).
"""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from box_drawing import is_partition, volume
from torch import Tensor, nn
from torch.nn import functional

from hand_made import chain
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Move
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, Order, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.capture import capture
from manyhands.schedule.sharing import geometry_of
from manyhands.schedule.tiles import BackwardGroup, TileGeometry

SAMPLES = 2
ROW = SAMPLES * 4 * 6
"""Elements of one row of a hand-made map."""


def chain_geometry(share: ByTiles, network: Network | None = None, order: Order = "1f1b") -> TileGeometry:
    network = network or chain(4)
    devices = tuple(f"d{i}" for i in range(len(share.rows) * len(share.columns)))
    plan = Plan("chain", SAMPLES, (Stage((0, len(network.layers)), devices, share),), order=order)
    geometry = geometry_of(resolve(plan, network), 0, network)
    assert isinstance(geometry, TileGeometry)
    return geometry


def shown(moves: tuple[Move, ...]) -> list[tuple[str, str, str]]:
    return [(move.source, move.target, str(move.box)) for move in moves]


# Forward


def test_a_halo_by_hand() -> None:
    """Two tiles of a chain of 3x3 windows over 8 x 6 maps: a row of 4 x 6 elements each way, at every layer."""
    geometry = chain_geometry(ByTiles((1, 1)))
    assert [group.fetches.keys() for group in geometry.groups] == [set(), {"t0"}, {"t1"}, {"t2"}]
    for group in geometry.groups[1:]:
        (found,) = group.fetches.values()
        assert shown(found) == [("d1", "d0", "[0:2,0:4,4:5,0:6]"), ("d0", "d1", "[0:2,0:4,3:4,0:6]")]
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:5,0:6]"
    assert geometry.fractions("d0") == (0.5,) * 4  # a halo that was fetched is not computed


def test_one_group_computes_more_and_fetches_nothing() -> None:
    geometry = chain_geometry(ByTiles((1, 1), forward_groups=(0,)))
    assert [group.fetches for group in geometry.groups] == [{}]
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:8,0:6]"
    assert geometry.fractions("d0") == (7 / 8, 6 / 8, 5 / 8, 4 / 8)
    assert geometry.fractions("d1") == (7 / 8, 6 / 8, 5 / 8, 4 / 8)


def test_without_groups_only_operators_that_read_beyond_their_tile_start_one() -> None:
    """Of three operators a layer, one is a 3x3 window and two read the place they make."""
    network = chain(2, operators_per_layer=3)
    point = chain(1, kernel=1).ops[0].reads[0].rules
    ops = [
        op
        if index % 3 == 0
        else msgspec.structs.replace(op, reads=(msgspec.structs.replace(op.reads[0], rules=point),))
        for index, op in enumerate(network.ops)
    ]
    geometry = chain_geometry(ByTiles((1, 1)), msgspec.structs.replace(network, ops=tuple(ops)))
    assert [(group.first, group.last) for group in geometry.groups] == [(0, 3), (3, 6)]
    assert [group.fetches.keys() for group in geometry.groups] == [set(), {"t2"}]


def test_groups_start_at_operators_by_name() -> None:
    network = chain(2, operators_per_layer=3)
    geometry = chain_geometry(ByTiles((1, 1), (1,), ("conv0", "conv2", "conv4"), ("conv0", "conv5")), network)
    assert [(group.first, group.last) for group in geometry.groups] == [(0, 2), (2, 4), (4, 6)]
    assert [group.fetches.keys() for group in geometry.groups] == [set(), {"t1"}, {"t3"}]
    assert geometry.fractions("d0") == (5 / 8, 4 / 8) * 3
    assert geometry.backward_groups is not None
    assert [(group.first, group.last) for group in geometry.backward_groups] == [(5, 6), (0, 5)]


def test_what_a_device_has_it_does_not_fetch_again() -> None:
    """t0 is read by operators 1, 3 and 4, with the same windows: its rows travel once."""
    geometry = chain_geometry(ByTiles((1, 1)), chain(5, skips={3: 0, 4: 0}))
    assert [group.fetches.keys() for group in geometry.groups] == [set(), {"t0"}, {"t1"}, {"t2"}, {"t3"}]


def test_more_of_a_tensor_is_fetched_where_a_later_group_reads_more() -> None:
    """Group 1 reads one row of t0 beyond the tile; the group of operators 3 and 4 reads two: one of them is new."""
    geometry = chain_geometry(ByTiles((1, 1), (1,), (0, 1, 2, 3)), chain(5, skips={3: 0}))
    late = geometry.groups[3].fetches
    assert shown(late["t0"]) == [("d1", "d0", "[0:2,0:4,5:6,0:6]"), ("d0", "d1", "[0:2,0:4,2:3,0:6]")]
    assert volume(late["t2"]) == 4 * ROW


def test_corners_come_from_the_diagonal_neighbour() -> None:
    geometry = chain_geometry(ByTiles((1, 1), (1, 1)))
    to_first = {move.source: str(move.box) for move in geometry.groups[1].fetches["t0"] if move.target == "d0"}
    assert to_first == {"d1": "[0:2,0:4,0:4,3:4]", "d2": "[0:2,0:4,4:5,0:3]", "d3": "[0:2,0:4,4:5,3:4]"}


def test_a_halo_wider_than_the_neighbours_tile_comes_from_two() -> None:
    """Rows 4:1:3 of 8: the second tile has one row, and 5x5 windows read two."""
    geometry = chain_geometry(ByTiles((4, 1, 3)), chain(2, kernel=5))
    assert [str(geometry.own(d, "t0")) for d in geometry.devices] == [
        "[0:2,0:4,0:4,0:6]", "[0:2,0:4,4:5,0:6]", "[0:2,0:4,5:8,0:6]",
    ]  # fmt: skip
    found = [(m.source, m.target, m.box.intervals[2]) for m in geometry.groups[1].fetches["t0"]]
    assert {one for one in found if one[1] == "d0"} == {("d1", "d0", (4, 5)), ("d2", "d0", (5, 6))}
    assert {one for one in found if one[1] == "d2"} == {("d0", "d2", (3, 4)), ("d1", "d2", (4, 5))}


def test_outputs_beyond_the_first_count() -> None:
    """An operator with two outputs, of which only the second is read on: its input is needed all the same."""
    network = chain(3)
    ops = list(network.ops)
    ops[0] = msgspec.structs.replace(ops[0], outputs=("unread", "t0"))
    tensors = {**network.tensors, "unread": msgspec.structs.replace(network.tensors["t0"], name="unread")}
    geometry = chain_geometry(ByTiles((1, 1)), msgspec.structs.replace(network, ops=tuple(ops), tensors=tensors))
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:5,0:6]"
    assert geometry.fractions("d0")[0] == 0.5


def test_held_is_what_was_computed_and_what_was_fetched() -> None:
    geometry = chain_geometry(ByTiles((1, 1)))
    assert geometry.held("d0", "t0") == (Box.parse("[0:2,0:4,0:4,0:6]"), Box.parse("[0:2,0:4,0:5,0:6]"))
    assert geometry.held("d0", "t3") == (Box.parse("[0:2,0:4,0:4,0:6]"),)


def test_the_first_device_gathers_what_leaves() -> None:
    geometry = chain_geometry(ByTiles((1, 1), (1, 1)))
    assert geometry.loss_devices == ("d0",) == (geometry.gateway,)
    assert [device for device, _ in geometry.passing("t3").pieces()] == ["d0"]
    assert [device for device, _ in geometry.returning("t3").pieces()] == ["d0", "d1", "d2", "d3"]


# What cannot be tiled


@pytest.mark.parametrize("change", ["shape", "operator"])
def test_what_cannot_be_tiled_is_refused_by_layer_and_operator(change: str) -> None:
    network = chain(3)
    if change == "shape":
        tensors = {**network.tensors, "t1": msgspec.structs.replace(network.tensors["t1"], shape=(1, 4))}
        network = msgspec.structs.replace(network, tensors=tensors)
    else:
        ops = list(network.ops)
        ops[1] = msgspec.structs.replace(ops[1], tiling="", where="net.py:7")
        network = msgspec.structs.replace(network, ops=tuple(ops))
    with pytest.raises(
        BadPlan, match=r"stages\[0\] is shared by tiles, but layer layer1 has the operator conv1"
    ) as caught:
        assert chain_geometry(ByTiles((1, 1)), network).groups
    assert "which makes t1" in caught.value.message
    assert ("(net.py:7)" in caught.value.message) == (change == "operator")
    assert "before layer layer1" in caught.value.hint


def test_a_stage_without_a_map_cannot_be_tiled() -> None:
    network = chain(2)
    tensors = {name: msgspec.structs.replace(spec, shape=(1, 4, 1, 1)) for name, spec in network.tensors.items()}
    stage = Stage((0, 2), ("d0", "d1"), ByTiles((1,), (1, 1)))
    geometry = TileGeometry(Plan("chain", 2, (stage,)), 0, msgspec.structs.replace(network, tensors=tensors))
    with pytest.raises(BadPlan, match="layer layer0 has the operator conv0"):
        assert geometry.maps


# Replicated tensors, and sums over the map


class Squeezing(nn.Module):
    """A squeeze-excitation between two convolutions, then pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.group = nn.GroupNorm(3, 6)
        self.b, self.last = nn.Conv2d(6, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.a(x)))
        weight = torch.sigmoid(self.excite(torch.relu(self.squeeze(functional.adaptive_avg_pool2d(x, 1)))))
        x = self.b(self.group(x * weight))
        out: Tensor = self.last(x.mean((2, 3)))
        return out


@cache
def squeezing() -> Network:
    torch.manual_seed(0)
    return capture(Squeezing(), torch.randn(2, 2, 8, 6), granularity="operators", name="squeezing").network


def squeezed(order: Order = "1f1b") -> TileGeometry:
    network = squeezing()
    plan = Plan("squeezing", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1"), ByTiles((1, 1))),), order=order)
    geometry = geometry_of(resolve(plan, network), 0, network)
    assert isinstance(geometry, TileGeometry)
    return geometry


@pytest.mark.slow
def test_what_is_made_from_a_pooled_map_is_replicated() -> None:
    geometry, network = squeezed(), squeezing()
    whole = {n for n, spec in network.tensors.items() if n not in geometry.maps and spec.batch_axis == 0}
    assert {network.tensors[name].shape for name in whole} == {(1, 6, 1, 1), (1, 2, 1, 1), (1, 4), (1, 3)}
    assert all(len(network.tensors[name].shape) == 4 for name in geometry.maps)
    for name in whole:
        shape = geometry.shape(name)
        assert [(d, box) for d, box in geometry.owned(name).pieces()] == [(d, Box.whole(shape)) for d in ("d0", "d1")]
        assert [device for device, _ in geometry.returning(name).pieces()] == ["d0"]
        for device in geometry.devices:
            assert geometry.computed[device][name] == Box.whole(shape)
            assert geometry.gradient_box(device, name) == Box.whole(shape)
    assert not any(name in whole for group in geometry.groups for name in group.fetches)


@pytest.mark.parametrize(("order", "batch_norm"), [("1f1b", True), ("stream", False)])
def test_which_operators_add_up(order: Order, batch_norm: bool) -> None:
    """A batch norm has its own sums in a stream; pooling and group norm never."""
    geometry, network = squeezed(order), squeezing()
    kinds = [op.target.split(".")[1] for op in network.ops if geometry.adds_up(op)]
    pools = [op.target.split(".")[1] for op in network.ops if op.tiling == "pool"]
    assert len(pools) == 2
    assert sorted(kinds) == sorted([*(["batch_norm"] if batch_norm else []), *pools, "group_norm"])
    assert all(op.tile_sums == (6 if "group" in op.target else network.tensors[op.outputs[0]].elements)
               for op in network.ops if geometry.adds_up(op) and not op.statistics)  # fmt: skip


def test_a_pool_reads_what_is_owned() -> None:
    """Whatever overlap there is, every element of the map counts once."""
    geometry, network = squeezed(), squeezing()
    for op in network.ops:
        if op.tiling == "pool":
            name = op.inputs[0]
            for device in geometry.devices:
                assert geometry.computed[device][name].contains(geometry.own(device, name))
            assert is_partition(geometry.owned(name), geometry.shape(name))


def test_an_operator_that_adds_up_runs_on_all_it_owns_even_if_nobody_reads_it() -> None:
    """A stride leaves the last row unread; batch statistics are over all rows all the same."""
    network = capture(
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1, stride=3)),
        torch.randn(2, 1, 9, 4), granularity="operators", name="stride",
    ).network  # fmt: skip
    share = ByTiles((1, 1, 1), forward_groups=(0,))
    plan = Plan("stride", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1", "d2"), share),))
    geometry = geometry_of(resolve(plan, network), 0, network)
    assert isinstance(geometry, TileGeometry)
    norm = next(op for op in network.ops if op.statistics)
    for device in geometry.devices:
        assert geometry.computed[device][norm.inputs[0]].contains(geometry.own(device, norm.inputs[0]))


# Backward groups


def backward(groups: tuple[int, ...]) -> tuple[TileGeometry, tuple[BackwardGroup, ...]]:
    geometry = chain_geometry(ByTiles((1, 1), backward_groups=groups))
    assert geometry.backward_groups is not None
    return geometry, geometry.backward_groups


def delta_volume(groups: tuple[BackwardGroup, ...]) -> int:
    return sum(volume(found) for group in groups for found in group.deltas.values())


@pytest.mark.parametrize("starts", [(0,), (0, 1, 2, 3), (0, 2), (0, 3)])
def test_regions_contain_what_is_owned_and_deltas_are_what_they_lack(starts: tuple[int, ...]) -> None:
    geometry, groups = backward(starts)
    assert [group.first for group in groups] == sorted(starts, reverse=True)
    for group in groups:
        for tensor in (name for op in geometry.network.ops[group.first : group.last] for name in op.outputs):
            for device, region in geometry.regions[tensor].items():
                own = geometry.own(device, tensor)
                assert region.contains(own)
                assert geometry.gradient_box(device, tensor) == region
                got = [move.box for move in group.deltas.get(tensor, ()) if move.target == device]
                lacking = list(region.subtract(own)) if leaves(geometry, group, tensor) else []
                assert sum(box.volume for box in got) == sum(box.volume for box in lacking)
                assert all(any(piece.contains(box) for piece in lacking) for box in got)


def leaves(geometry: TileGeometry, group: BackwardGroup, tensor: str) -> bool:
    readers = geometry.network.readers.get(tensor, ())
    return tensor in geometry.network.outputs or any(not group.first <= reader < group.last for reader in readers)


def test_fewer_backward_groups_exchange_fewer_deltas_and_compute_more() -> None:
    """Four 3x3 windows: a row at each boundary, or three rows at once where one group does all (R of the input: none).

    One group per layer moves t3's, t2's and t1's delta, a row each way; t0's input has no gradient. Gradients of
    weights are computed over what is owned, whatever the groups: half the work of an operator that has both.
    """
    each, groups_each = backward((0, 1, 2, 3))
    one, groups_one = backward((0,))
    assert delta_volume(groups_each) == 3 * 2 * ROW
    assert delta_volume(groups_one) == 2 * 3 * ROW
    assert len([g for g in groups_each if g.deltas]) == 3
    assert len([g for g in groups_one if g.deltas]) == 1
    assert each.backward_fractions("d0") == (4 / 8, 4.5 / 8, 4.5 / 8, 4.5 / 8)
    assert one.backward_fractions("d0") == (4 / 8, 4.5 / 8, 5 / 8, 5.5 / 8)


def test_without_backward_groups_backward_costs_what_forward_computed() -> None:
    geometry = chain_geometry(ByTiles((1, 1), forward_groups=(0,)))
    assert geometry.backward_groups is None
    assert geometry.backward_fractions("d0") == geometry.fractions("d0")
    assert geometry.gradient_box("d0", "t0") == geometry.computed["d0"]["t0"]


def test_a_stream_has_no_backward_groups() -> None:
    assert chain_geometry(ByTiles((1, 1), backward_groups=(0,)), order="stream").backward_groups is None


def derivatives(*indices: int) -> Network:
    """A chain in which some operators' derivatives read their output, and no operator but the first has weights."""
    network = chain(4)
    ops = [
        msgspec.structs.replace(op, derives_from=op.outputs if index in indices else (), weights=())
        for index, op in enumerate(network.ops)
    ]
    return msgspec.structs.replace(network, ops=tuple(ops))


def test_values_are_fetched_where_a_derivative_reads_them() -> None:
    """One backward group: the region of t2 reaches two rows further than the tile; forward has computed none of them.

    Forward, operator 3 fetched one row of t2; the second is missing.
    """
    share = ByTiles((1, 1), backward_groups=(0,))
    (nothing,) = chain_geometry(share, derivatives()).backward_groups or ()
    assert nothing.values == {}
    (group,) = chain_geometry(share, derivatives(2)).backward_groups or ()
    assert shown(group.values["t2"]) == [("d1", "d0", "[0:2,0:4,5:6,0:6]"), ("d0", "d1", "[0:2,0:4,2:3,0:6]")]
    assert group.values.keys() == {"t2"}


def test_values_that_forward_computed_are_not_fetched() -> None:
    """One forward group computed t2 a row further on both: with the region two rows further, one is missing."""
    share = ByTiles((1, 1), forward_groups=(0,), backward_groups=(0,))
    (group,) = chain_geometry(share, derivatives(2)).backward_groups or ()
    assert volume(group.values["t2"]) == 2 * ROW
    (group,) = chain_geometry(share, derivatives(1)).backward_groups or ()
    assert group.values == {}  # t1 two rows further forward, one row further back


def test_an_input_is_fed_with_all_that_backward_reads_too() -> None:
    """Weight gradients read the input around what is owned of t0; forward computed less of it in a later group."""
    geometry = chain_geometry(ByTiles((1, 1), backward_groups=(0,)))
    for device in geometry.devices:
        box = geometry.entering("x").hull(device)
        assert box == geometry.buffer(device, "x")
        read = geometry.network.ops[0].reads[0]
        assert box.contains(read.demand(geometry.own(device, "t0"), geometry.shape("x")))
    assert all("x" not in group.values for group in geometry.backward_groups or ())


def test_a_device_may_own_nothing_of_a_small_map() -> None:
    """A map of one row on three tiles: one has it, two own empty boxes and compute nothing of it."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(2, 2, 3, padding=1))
    network = capture(module, torch.randn(2, 1, 6, 8), granularity="operators", name="small").network
    plan = Plan("small", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1", "d2"), ByTiles((1, 1, 1))),))
    geometry = geometry_of(resolve(plan, network), 0, network)
    assert isinstance(geometry, TileGeometry)
    name = network.outputs[0]
    assert geometry.shape(name)[2:] == (1, 2)
    owners = [device for device in geometry.devices if not geometry.own(device, name).is_empty]
    assert len(owners) == 1
    assert [device for device, _ in geometry.owned(name).pieces()] == owners
    for device in geometry.devices:
        fraction = geometry.fractions(device)[-1]
        assert fraction == (1.0 if device in owners else 0.0)


# Interior first


def test_the_interior_reads_nothing_that_must_be_fetched() -> None:
    """Two tiles of four rows: of what operator 1 makes, the row at the common border waits for the other tile."""
    geometry = chain_geometry(ByTiles((1, 1), interior_first=(0, 1, 3)))
    assert geometry.interior_first == {1, 3}  # operator 0 fetches nothing
    assert str(geometry.interior("d0", 1)) == "[0:2,0:4,0:3,0:6]"
    assert str(geometry.interior("d1", 1)) == "[0:2,0:4,5:8,0:6]"


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("share", [ByTiles((1, 2), (1, 1)), ByTiles((3, 1, 4)), ByTiles((1, 1), (1, 1), (0, 2))])
def test_an_interior_is_all_that_needs_no_fetch(share: ByTiles, kernel: int) -> None:
    early = msgspec.structs.replace(share, interior_first=(0, 1, 2, 3))
    geometry = chain_geometry(early, chain(4, kernel=kernel))
    starts = {group.first for group in geometry.groups if group.fetches}
    assert geometry.interior_first == starts
    for index in starts:
        read = geometry.network.ops[index].reads[0]
        for device in geometry.devices:
            inside, have = geometry.interior(device, index), geometry.computed[device][read.tensor]
            out = geometry.computed[device][f"t{index}"]
            assert out.contains(inside)
            if not inside.is_empty:
                assert have.contains(read.demand(inside, geometry.shape(read.tensor)))
            for axis in (2, 3):
                for low, high in {(out.intervals[axis][0], inside.intervals[axis][0]),
                                  (inside.intervals[axis][1], out.intervals[axis][1])}:  # fmt: skip
                    for place in range(low, high):
                        needed = read.rules[axis].demand((place, place + 1), geometry.shape(read.tensor)[axis])
                        assert needed[0] < have.intervals[axis][0] or needed[1] > have.intervals[axis][1]


def test_only_what_is_worth_it_is_split() -> None:
    """Norms add up first, and an operator without multiplications is done at once."""
    network = chain(4, statistics=[1])
    ops = list(network.ops)
    ops[2] = msgspec.structs.replace(ops[2], macs=0)
    network = msgspec.structs.replace(network, ops=tuple(ops))
    assert chain_geometry(ByTiles((1, 1), interior_first=(0, 1, 2, 3)), network).interior_first == {3}

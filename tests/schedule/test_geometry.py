"""The boxes of a stage, checked by computing with them: every device in NaN-filled buffers, against the whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from cropped import Mixed, Plain, Tiled, Whole, captured, part
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawn_plans import groups as drawn_groups
from hand_made import chain
from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadPlan
from manyhands.facts.moves import Move, volume
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Share, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.graph import Graph
from manyhands.schedule.geometry import BackwardGroup, StageGeometry

SAMPLES = 2
NETWORKS: dict[str, tuple[type, int, int]] = {
    "mixed 13x11": (Mixed, 13, 11),
    "mixed 16x9": (Mixed, 16, 9),
    "plain 23x14": (Plain, 23, 14),
}
check = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def graph_of(name: str) -> Graph:
    module, rows, columns = NETWORKS[name]
    return captured(module(), rows, columns)


@cache
def whole_of(name: str) -> Whole:
    _, rows, columns = NETWORKS[name]
    torch.manual_seed(1)
    return Whole.run(graph_of(name), torch.randn(SAMPLES, 2, rows, columns, dtype=torch.float64))


def geometry_of(graph: Graph, share: Share, count: int, first: int = 0) -> StageGeometry:
    """The stage of layers [first, end) with this share; layers before it on one more device."""
    network = graph.network
    last = len(network.layers)
    stage = Stage((first, last), tuple(f"d{i}" for i in range(count)), share)
    before = (Stage((0, first), ("before",)),) if first else ()
    plan = resolve(Plan(network.name, SAMPLES, (*before, stage)), network)
    return StageGeometry(plan, len(before), network)


@st.composite
def tiles(draw: st.DrawFn, name: str, first: int, backward: bool = False) -> tuple[ByTiles, int]:
    last = len(graph_of(name).network.layers)
    rows, columns = draw(st.sampled_from(((2, 1), (1, 2), (3, 1), (2, 2), (1, 3))))
    weights = st.sampled_from((1, 2, 1.5))
    heights = tuple(draw(weights) for _ in range(rows))
    widths = tuple(draw(weights) for _ in range(columns))
    back = draw(drawn_groups(first, last)) if backward else None
    if backward and back is None:
        back = tuple(range(first, last))
    return ByTiles(heights, widths, draw(drawn_groups(first, last)), back), rows * columns


def run(name: str, geometry: StageGeometry) -> Tiled:
    whole = whole_of(name)
    reads = {n for op in geometry.network.ops[geometry.first : geometry.last] for n in op.inputs}
    entering = {n: whole.values[n].detach() for n in reads if geometry.network.producer.get(n, -1) < geometry.first}
    tiled = Tiled(graph_of(name), geometry, entering)
    tiled.forward()
    return tiled


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    assert not got.isnan().any(), f"{what} has {int(got.isnan().sum())} NaN"
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def assert_forward_is_exact(name: str, tiled: Tiled) -> None:
    whole, geometry = whole_of(name), tiled.geometry
    for device in geometry.devices:
        for tensor, box in geometry.computed[device].items():
            expected = part(whole.values[tensor].detach(), box)
            assert_close(part(tiled.values[device][tensor], box), expected, f"{device} {tensor}{box}")
    for tensor in geometry.network.outputs:
        assert geometry.owned(tensor).is_partition(geometry.shape(tensor))
        for device, box in geometry.owned(tensor).pieces():
            assert_close(part(tiled.values[device][tensor], box), part(whole.values[tensor].detach(), box), tensor)


def leaving_of(name: str, geometry: StageGeometry) -> dict[str, Tensor]:
    """Gradients that come back to the stage: of the sum of squares of the network's outputs."""
    return {tensor: 2 * whole_of(name).values[tensor].detach() for tensor in geometry.network.outputs}


def assert_gradients_are_exact(name: str, tiled: Tiled, entering: dict[str, Tensor]) -> None:
    whole, geometry = whole_of(name), tiled.geometry
    for tensor, gradient in entering.items():
        expected = whole.values[tensor].grad
        assert expected is not None
        if tensor not in geometry.network.inputs or geometry.backward_groups is None:
            assert_close(gradient, expected, f"gradient of {tensor}")
    for weight in geometry.network.weights_of(geometry.first, geometry.last):
        expected = whole.weights[weight].grad
        if expected is not None:
            terms = [tiled.weights[device][weight].grad for device in geometry.devices]
            got = sum((term for term in terms if term is not None), torch.zeros_like(expected))
            assert_close(got, expected, f"gradient of {weight}")


@pytest.mark.parametrize("name", NETWORKS)
@check
@given(data=st.data())
def test_tiles_compute_the_whole_and_its_adjoint(name: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from((0, 3)))
    share, count = data.draw(tiles(name, first))
    geometry = geometry_of(graph_of(name), share, count, first)
    tiled = run(name, geometry)
    assert_forward_is_exact(name, tiled)
    entering = tiled.backward_by_adjoint(leaving_of(name, geometry))
    assert_gradients_are_exact(name, tiled, entering)


@pytest.mark.parametrize("name", NETWORKS)
@check
@given(data=st.data())
def test_backward_groups_are_exact(name: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from((0, 2, 3)))
    share, count = data.draw(tiles(name, first, backward=True))
    geometry = geometry_of(graph_of(name), share, count, first)
    tiled = run(name, geometry)
    assert_forward_is_exact(name, tiled)
    entering = tiled.backward_by_groups(leaving_of(name, geometry))
    assert_gradients_are_exact(name, tiled, entering)


def test_a_weight_gradient_fetches_what_forward_did_not_compute() -> None:
    """In one forward group a device may not compute all it owns of a map; its weight gradient needs those inputs."""
    name, share = "mixed 16x9", ByTiles((1,), (1, 1, 2), (0,), tuple(range(14)))
    geometry = geometry_of(graph_of(name), share, 3)
    assert any(
        not geometry.computed[device][tensor].contains(geometry.owned(tensor).hull(device))
        for device in geometry.devices
        for tensor in geometry.computed[device]
    )
    tiled = run(name, geometry)
    assert_gradients_are_exact(name, tiled, tiled.backward_by_groups(leaving_of(name, geometry)))


@pytest.mark.parametrize("name", ["mixed 13x11", "plain 23x14"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1), (1, 3)])
def test_channels_compute_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    geometry = geometry_of(graph_of(name), ByChannels(sizes), len(sizes))
    tiled = run(name, geometry)
    assert_forward_is_exact(name, tiled)
    entering = tiled.backward_by_adjoint(leaving_of(name, geometry))
    assert_gradients_are_exact(name, tiled, entering)


def test_the_checks_would_notice_a_box_that_is_too_small() -> None:
    """The interpreter's own proof: take one column off one halo, and a NaN is found."""
    geometry = geometry_of(graph_of("plain 23x14"), ByTiles((1, 1)), 2)
    group = next(group for group in geometry.groups if group.fetches)
    name, found = next(iter(group.fetches.items()))
    start, stop = found[0].box.intervals[3]
    less = Move(found[0].source, found[0].target, found[0].box.replace(3, (start, stop - 1)))
    group.fetches[name] = (less, *found[1:])
    with pytest.raises(AssertionError, match="lacks a part of"):
        run("plain 23x14", geometry)


# What moves, by count


def test_a_halo_by_hand() -> None:
    """Two tiles of a chain of 3x3 windows over 8 x 6 maps: a row of 4 x 6 elements each way, at every layer."""
    geometry = chain_geometry(ByTiles((1, 1)))
    assert [group.fetches.keys() for group in geometry.groups] == [set(), {"t0"}, {"t1"}, {"t2"}]
    for group in geometry.groups[1:]:
        (found,) = group.fetches.values()
        assert [(m.source, m.target, str(m.box)) for m in found] == [
            ("d1", "d0", "[0:2,0:4,4:5,0:6]"),
            ("d0", "d1", "[0:2,0:4,3:4,0:6]"),
        ]
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:5,0:6]"
    assert geometry.fractions("d0") == (0.5,) * 4  # a halo that was fetched is not computed


def test_one_group_computes_more_and_fetches_nothing() -> None:
    geometry = chain_geometry(ByTiles((1, 1), forward_groups=(0,)))
    assert [group.fetches for group in geometry.groups] == [{}]
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:8,0:6]"
    assert geometry.fractions("d0") == (7 / 8, 6 / 8, 5 / 8, 4 / 8)
    assert geometry.fractions("d1") == (7 / 8, 6 / 8, 5 / 8, 4 / 8)


def test_by_samples_nothing_is_exchanged_inside() -> None:
    geometry = chain_geometry(BySamples((1, 1)))
    assert [group.fetches for group in geometry.groups] == [{}]
    assert geometry.fractions("d0") == (0.5,) * 4
    assert str(geometry.entering("x").hull("d1")) == "[1:2,0:4,0:8,0:6]"


def test_by_channels_a_dense_operator_fetches_the_others() -> None:
    geometry = chain_geometry(ByChannels((3, 1)))
    assert [sum(map(volume, group.fetches.values())) for group in geometry.groups] == [0, 384, 384, 384]
    assert geometry.fractions("d0") == (0.75,) * 4


def test_outputs_beyond_the_first_count() -> None:
    """An operator with two outputs, of which only the second is read on: its input is needed all the same."""
    network = chain(3)

    ops = list(network.ops)
    ops[0] = msgspec.structs.replace(ops[0], outputs=("unread", "t0"))
    tensors = {**network.tensors, "unread": msgspec.structs.replace(network.tensors["t0"], name="unread")}
    network = msgspec.structs.replace(network, ops=tuple(ops), tensors=tensors)
    geometry = chain_geometry(ByTiles((1, 1)), network)
    assert str(geometry.entering("x").hull("d0")) == "[0:2,0:4,0:5,0:6]"
    assert geometry.fractions("d0")[0] == 0.5


def test_a_map_without_rows_cannot_be_tiled() -> None:

    network = chain(3)
    tensors = {**network.tensors, "t1": msgspec.structs.replace(network.tensors["t1"], shape=(1, 4))}
    network = msgspec.structs.replace(network, tensors=tensors)
    with pytest.raises(
        BadPlan, match=r"stages\[0\] is shared by tiles, but layer layer1 makes t1 .* \(1, 4\)"
    ) as caught:
        assert chain_geometry(ByTiles((1, 1)), network).groups
    assert "before layer layer1" in caught.value.hint


def chain_geometry(share: Share, network: Any = None) -> StageGeometry:
    network = network or chain(4)
    plan = Plan("chain", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1"), share),))
    return StageGeometry(resolve(plan, network), 0, network)


# Backward groups, by count


def backward(groups: tuple[int, ...]) -> tuple[StageGeometry, tuple[BackwardGroup, ...]]:
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
        for tensor, regions in group.regions.items():
            for device, region in regions.items():
                own = geometry.owned(tensor).hull(device)
                assert region.contains(own)
                got = [move.box for move in group.deltas.get(tensor, ()) if move.target == device]
                lacking = list(region.subtract(own)) if leaves(geometry, group, tensor) else []
                assert sum(box.volume for box in got) == sum(box.volume for box in lacking)
                assert all(any(piece.contains(box) for piece in lacking) for box in got)


def leaves(geometry: StageGeometry, group: BackwardGroup, tensor: str) -> bool:
    readers = geometry.network.readers.get(tensor, ())
    return tensor in geometry.network.outputs or any(not group.first <= reader < group.last for reader in readers)


def test_fewer_backward_groups_exchange_fewer_deltas_and_compute_more() -> None:
    """Four 3x3 windows: a row at each boundary, or three rows at once where one group does all (R of the input: none).

    One group per layer moves t3's, t2's and t1's delta, a row each way; t0's input has no gradient.
    """
    each, groups_each = backward((0, 1, 2, 3))
    one, groups_one = backward((0,))
    row = SAMPLES * 4 * 6
    assert delta_volume(groups_each) == 3 * 2 * row
    assert delta_volume(groups_one) == 2 * 3 * row
    assert len([g for g in groups_each if g.deltas]) == 3
    assert len([g for g in groups_one if g.deltas]) == 1
    assert sum(one.backward_fractions("d0")) > sum(each.backward_fractions("d0"))
    assert each.backward_fractions("d0") == (4 / 8, 5 / 8, 5 / 8, 5 / 8)
    assert one.backward_fractions("d0") == (4 / 8, 5 / 8, 6 / 8, 7 / 8)


def test_without_backward_groups_backward_costs_what_forward_computed() -> None:
    geometry = chain_geometry(ByTiles((1, 1), forward_groups=(0,)))
    assert geometry.backward_groups is None
    assert geometry.backward_fractions("d0") == geometry.fractions("d0")


def test_held_is_what_was_computed_and_what_was_fetched() -> None:
    geometry = chain_geometry(ByTiles((1, 1)))
    assert geometry.held("d0", "t0") == (Box.parse("[0:2,0:4,0:4,0:6]"), Box.parse("[0:2,0:4,0:5,0:6]"))
    assert geometry.held("d0", "t3") == (Box.parse("[0:2,0:4,0:4,0:6]"),)

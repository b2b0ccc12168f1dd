"""Moves against arrays: every claim of manyhands.facts.moves by brute force."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from box_drawing import (
    Point,
    few,
    grown,
    held_points,
    is_partition,
    layouts,
    more,
    points,
    shapes,
    volume,
    volume_between,
)
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.boxes import Box, Layout, cut_points
from manyhands.facts.errors import BadValue
from manyhands.facts.moves import Move, adjoint, moves

Buffers = dict[str, np.ndarray]


@st.composite
def exchanges(draw: st.DrawFn, source_partial: bool, target_partial: bool) -> tuple[tuple[int, ...], Layout, Layout]:
    """A shape and two layouts between which moves exist."""
    shape = draw(shapes)
    source = draw(layouts(shape, source_partial, covering=not source_partial))
    target = draw(layouts(shape, target_partial, covering=source_partial and target_partial))
    return shape, source, target


# Arrays


def random_buffers(layout: Layout, shape: Sequence[int], seed: int = 0) -> Buffers:
    """Whole-shaped buffers with small whole numbers where the device holds something: sums are exact."""
    random = np.random.default_rng(seed)
    buffers = {}
    for device in layout.devices:
        buffers[device] = np.zeros(shape)
        for box in layout.boxes(device):
            buffers[device][box.slices()] = random.integers(-99, 100, box.shape)
    return buffers


def replicas_of(tensor: np.ndarray, layout: Layout) -> Buffers:
    """Each device's part of one tensor."""
    buffers = {device: np.zeros(tensor.shape) for device in layout.devices}
    for device, box in layout.pieces():
        buffers[device][box.slices()] = tensor[box.slices()]
    return buffers


def total(buffers: Buffers, shape: Sequence[int]) -> np.ndarray:
    return sum(buffers.values(), np.zeros(shape))


def apply(plan: Sequence[Move], source: Buffers, devices: Sequence[str], shape: Sequence[int]) -> Buffers:
    """What an exchange does: every target starts at zero, then stores or adds."""
    target = {device: np.zeros(shape) for device in devices}
    for move in plan:
        where = move.box.slices()
        if move.adds:
            target[move.target][where] += source[move.source][where]
        else:
            target[move.target][where] = source[move.source][where]
    return target


def arrivals(plan: Sequence[Move]) -> Counter[tuple[str, Point]]:
    return Counter((move.target, point) for move in plan for point in points(move.box))


def assert_same(got: Buffers, expected: Buffers) -> None:
    assert got.keys() == expected.keys()
    for device in got:
        np.testing.assert_array_equal(got[device], expected[device], err_msg=device)


# Moves


def test_moves_errors() -> None:
    left = Layout.split((8, 2), 0, {"a": (0, 3), "b": (5, 8)})
    with pytest.raises(BadValue, match=r"Device 'c' needs \[3:5,0:2\], but no device of the source layout holds it"):
        moves(left, Layout.split((8, 2), 0, {"b": (6, 8), "c": (1, 7)}))
    with pytest.raises(BadValue, match=r"Device 'c' needs \[3:5,0:2\]"):
        moves(left, Layout.whole((8, 2), ["c"], partial=True))
    with pytest.raises(BadValue, match=r"'c' has a term of \[3:5,0:2\], but no device of the target layout takes it"):
        moves(Layout.whole((8, 2), ["c"], partial=True), msgspec.structs.replace(left, partial=True))
    with pytest.raises(BadValue, match="source layout has rank 2 and the target layout has rank 1"):
        moves(left, Layout.whole((8,), ["a"]))


@pytest.mark.slow
@more
@given(exchanges(source_partial=False, target_partial=False))
def test_a_value_arrives_once_wherever_it_is_wanted(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    shape, source, target = drawn
    tensor = np.random.default_rng(1).integers(1, 100, shape).astype(float)
    plan = moves(source, target)
    wanted = {(device, point) for device in target.devices for point in held_points(target, device)}
    assert arrivals(plan) == Counter(wanted)
    assert not any(move.adds for move in plan)
    assert_same(apply(plan, replicas_of(tensor, source), target.devices, shape), replicas_of(tensor, target))


@pytest.mark.slow
@more
@given(exchanges(source_partial=False, target_partial=False))
def test_only_what_a_device_lacks_travels(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    _, source, target = drawn
    plan = moves(source, target)
    lacking = {device: len(held_points(target, device) - held_points(source, device)) for device in target.devices}
    assert volume(plan) == sum(lacking.values()) == sum(volume_between(plan).values())
    for device in target.devices:
        assert sum(n for (_, to), n in volume_between(plan).items() if to == device) == lacking[device]
    assert all(points(move.box) <= held_points(source, move.source) for move in plan)
    for (sender, receiver), count in volume_between(plan).items():
        assert sender != receiver
        assert count == sum(move.box.volume for move in plan if (move.source, move.target) == (sender, receiver))


@pytest.mark.slow
@more
@given(exchanges(source_partial=True, target_partial=False))
def test_every_term_arrives_once_at_every_holder_of_the_sum(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    shape, source, target = drawn
    terms = random_buffers(source, shape)
    plan = moves(source, target)
    assert_same(apply(plan, terms, target.devices, shape), replicas_of(total(terms, shape), target))
    assert volume(plan) == sum(
        len(held_points(source, sender) & held_points(target, receiver))
        for sender in source.devices
        for receiver in target.devices
        if sender != receiver
    )
    orders: dict[tuple[str, Point], list[str]] = {}
    for move in plan:
        for point in points(move.box):
            orders.setdefault((move.target, point), []).append(move.source)
    assert all(order == [name for name in source.devices if name in order] for order in orders.values())


@pytest.mark.slow
@more
@given(exchanges(source_partial=True, target_partial=True))
def test_every_term_goes_to_one_holder_of_the_partial_sum(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    shape, source, target = drawn
    terms = random_buffers(source, shape)
    plan = moves(source, target)
    sent = Counter((move.source, point) for move in plan for point in points(move.box))
    assert sent == Counter((device, point) for device in source.devices for point in held_points(source, device))
    assert all(points(move.box) <= held_points(target, move.target) for move in plan)
    got = apply(plan, terms, target.devices, shape)
    np.testing.assert_array_equal(total(got, shape), total(terms, shape))
    kept = sum(len(held_points(source, device) & held_points(target, device)) for device in source.devices)
    assert volume(plan) == source.total_volume - kept


@pytest.mark.slow
@more
@given(exchanges(source_partial=False, target_partial=True))
def test_a_value_becomes_one_term_and_zeros(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    shape, source, target = drawn
    tensor = np.random.default_rng(1).integers(1, 100, shape).astype(float)
    plan = moves(source, target)
    got = total(apply(plan, replicas_of(tensor, source), target.devices, shape), shape)
    wanted = {point for device in target.devices for point in held_points(target, device)}
    assert Counter(point for _, point in arrivals(plan).elements()) == Counter(wanted)
    assert all(points(move.box) <= held_points(target, move.target) for move in plan)
    np.testing.assert_array_equal(
        got, np.where([p in wanted for p in np.ndindex(*shape)], tensor.ravel(), 0).reshape(shape)
    )
    local = {point for device in target.devices for point in held_points(target, device) & held_points(source, device)}
    assert volume(plan) == len(wanted - local)


@more
@given(st.booleans().flatmap(lambda one: st.booleans().flatmap(lambda two: exchanges(one, two))))
def test_the_adjoint_identity_holds_exactly(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    shape, source, target = drawn
    x, y = random_buffers(source, shape, seed=2), random_buffers(target, shape, seed=3)
    plan = moves(source, target)
    forward = apply(plan, x, target.devices, shape)
    backward = apply(adjoint(plan), y, source.devices, shape)
    there = sum(float((forward[device] * y[device]).sum()) for device in target.devices)
    back = sum(float((x[device] * backward[device]).sum()) for device in source.devices)
    assert there == back
    assert volume(adjoint(plan)) == volume(plan)
    assert [(move.source, move.target, move.box) for move in adjoint(adjoint(plan))] == [
        (move.source, move.target, move.box) for move in plan
    ]


@pytest.mark.slow
@few
@given(st.booleans().flatmap(lambda one: st.booleans().flatmap(lambda two: exchanges(one, two))))
def test_moves_are_never_empty_and_always_the_same(drawn: tuple[tuple[int, ...], Layout, Layout]) -> None:
    _, source, target = drawn
    plan = moves(source, target)
    assert not any(move.box.is_empty for move in plan)
    assert plan == moves(source, target)


@pytest.mark.slow
@few
@given(st.data())
def test_an_exchange_with_itself_is_local(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    layout = data.draw(layouts(shape, covering=False))
    assert moves(layout, layout) == tuple(Move(device, device, box) for device, box in layout.pieces())


# Named examples


def plain(plan: Sequence[Move]) -> list[str]:
    return [f"{move.source}->{move.target} {move.box}{' +' if move.adds else ''}" for move in plan]


def test_halo_exchange_of_two_by_two_tiles() -> None:
    """TILE: four tiles of an 8 x 8 image, each grown by a halo of one.

    0     4     8
    +-----+-----+
    |  a  |  b  |    a needs a column of b, a row of c and the corner of d
    +-----+-----+
    |  c  |  d  |
    +-----+-----+
    """
    shape = (8, 8)
    tiles = Layout.grid(shape, (0, 1), [[1, 1], [1, 1]], "abcd")
    halos = Layout.of({device: [grown(box, 1, shape, (0, 1))] for device, box in tiles.pieces()})
    plan = moves(tiles, halos)
    to_a = [move for move in plan if move.target == "a"]
    assert plain(to_a) == ["a->a [0:4,0:4]", "b->a [0:4,4:5]", "c->a [4:5,0:4]", "d->a [4:5,4:5]"]
    assert volume_between(plan)["d", "a"] == 1
    assert volume(plan) == 4 * (4 + 4 + 1)
    # Backward, each delta in a halo returns to its owner and adds up: an image of ones counts who held each pixel.
    ones = {device: np.ones(shape) for device in "abcd"}
    counts = total(apply(adjoint(plan), ones, "abcd", shape), shape)
    assert counts[0, 0] == 1
    assert counts[0, 3] == counts[4, 0] == 2
    assert counts[3, 3] == counts[4, 4] == 4


def test_a_halo_wider_than_a_tile_reaches_past_the_neighbour() -> None:
    tiles = Layout.split_counts((6,), 0, {"a": 2, "b": 1, "c": 3})
    halos = Layout.of({"a": [Box.of((0, 5))]})
    assert plain(moves(tiles, halos)) == ["a->a [0:2]", "b->a [2:3]", "c->a [3:5]"]


def test_a_neighbour_sends_one_rectangle() -> None:
    """Tall b lies along all of a's right-hand halo; the corners go with the column, in one piece."""
    source = Layout.of({"a": [Box.of((2, 4), (0, 4))], "b": [Box.of((0, 6), (4, 8))], "c": [Box.of((0, 2), (0, 4))]})
    target = Layout.of({"a": [Box.of((1, 4), (0, 5))]})
    assert plain(moves(source, target)) == ["a->a [2:4,0:4]", "b->a [1:4,4:5]", "c->a [1:2,0:4]"]


def test_asteroid_figure_10() -> None:
    """Six samples shared 1:1 by one stage go to a stage that shares them 1:1:1.

    d0  0 1 2 | 3 4 5  d1
        0 1 | 2 3 | 4 5
         d2    d3    d4
    """
    before = Layout.split_counts((6, 16), 0, {"d0": 3, "d1": 3})
    after = Layout.split_counts((6, 16), 0, {"d2": 2, "d3": 2, "d4": 2})
    assert plain(moves(before, after)) == [
        "d0->d2 [0:2,0:16]",
        "d0->d3 [2:3,0:16]",
        "d1->d3 [3:4,0:16]",
        "d1->d4 [4:6,0:16]",
    ]
    assert volume_between(moves(before, after)) == {
        ("d0", "d2"): 32,
        ("d0", "d3"): 16,
        ("d1", "d3"): 16,
        ("d1", "d4"): 32,
    }


def test_channel_shuffle() -> None:
    """DECNN: two groups of four channels; after the shuffle each device has half of either group."""
    before = Layout.channels((1, 8, 5), 1, {"a": [(0, 4)], "b": [(4, 8)]})
    after = Layout.channels((1, 8, 5), 1, {"a": [(0, 2), (4, 6)], "b": [(2, 4), (6, 8)]})
    assert plain(moves(before, after)) == [
        "a->a [0:1,0:2,0:5]",
        "b->a [0:1,4:6,0:5]",
        "a->b [0:1,2:4,0:5]",
        "b->b [0:1,6:8,0:5]",
    ]


def test_replicas_share_the_sending() -> None:
    plan = moves(Layout.whole((8,), "ab"), Layout.split_counts((8,), 0, {"c": 3, "d": 2, "e": 2, "f": 1}))
    assert plain(plan) == ["a->c [0:3]", "b->d [3:5]", "b->e [5:7]", "a->f [7:8]"]


def test_ties_between_replicas_go_by_device_order() -> None:
    source = Layout.split((8,), 0, {"a": (0, 4), "b": (0, 8), "c": (0, 4)})
    target = Layout.split_counts((8,), 0, {"u": 1, "v": 1, "w": 1, "x": 5})
    assert plain(moves(source, target)) == ["a->u [0:1]", "b->v [1:2]", "c->w [2:3]", "a->x [3:4]", "b->x [4:8]"]


def test_terms_come_in_device_order_and_a_long_one_is_not_overlooked() -> None:
    """Device order is not position: a starts first and reaches furthest, and is named last."""
    terms = Layout.split((9,), 0, {"d": (6, 9), "b": (1, 2), "c": (3, 7), "a": (0, 9)}, partial=True)
    assert plain(moves(terms, Layout.split((9,), 0, {"z": (5, 8)}))) == ["d->z [6:8] +", "c->z [5:7] +", "a->z [5:8] +"]
    assert plain(moves(terms, Layout.split((9,), 0, {"z": (2, 3)}))) == ["a->z [2:3] +"]
    assert plain(moves(terms, Layout.split((9,), 0, {"z": (4, 5)}))) == ["c->z [4:5] +", "a->z [4:5] +"]


def test_weight_gradients_add_up_on_every_replica() -> None:
    terms, sums = Layout.whole((4,), "ab", partial=True), Layout.whole((4,), "ab")
    assert plain(moves(terms, sums)) == ["a->a [0:4] +", "b->a [0:4] +", "a->b [0:4] +", "b->b [0:4] +"]
    assert plain(moves(sums, terms)) == ["a->a [0:4]"]  # b's term is zero


def test_a_sum_of_no_terms_is_zero() -> None:
    """The gradient of a row that a strided convolution never read: nobody has a term, and zero is right."""
    terms = Layout.split((5,), 0, {"a": (0, 2), "b": (2, 4)}, partial=True)
    assert plain(moves(terms, Layout.whole((5,), "c"))) == ["a->c [0:2] +", "b->c [2:4] +"]


def test_a_scalar_moves_too() -> None:
    loss = Layout.whole((), "ab", partial=True)
    assert plain(moves(loss, Layout.whole((), "c"))) == ["a->c [] +", "b->c [] +"]
    assert loss.covers(())
    assert not is_partition(loss, ())
    assert volume(moves(Layout.whole((), "a"), Layout.whole((), "abc"))) == 2


def test_layouts_without_boxes_move_nothing() -> None:
    nobody = Layout.of({"a": [], "b": []})
    assert moves(nobody, nobody) == moves(Layout.whole((4,), "a"), nobody) == ()


def test_a_thousand_devices_do_not_ask_each_other_one_by_one() -> None:
    count = 1000
    shape = (64, 8 * count, 7, 7)
    before = Layout.split_counts(shape, 1, {f"a{i}": 8 for i in range(count)})
    cuts = cut_points(shape[1], [1 + 37 * i % 11 for i in range(count)])
    after = Layout.split(shape, 1, {f"b{i}": interval for i, interval in enumerate(pairwise(cuts))})
    ring = Layout.of({device: [grown(box, 3, shape, [1])] for device, box in before.pieces()})
    begin = time.process_time()  # other processes may have the core meanwhile
    plan, halos = moves(before, after), moves(before, ring)
    seconds = time.process_time() - begin
    assert volume(plan) == Box.whole(shape).volume
    assert volume(halos) == 2 * 3 * (count - 1) * 64 * 7 * 7
    assert seconds < 3

"""Boxes and layouts against sets of points: every claim of manyhands.facts.boxes by brute force."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from box_drawing import few, held_points, is_partition, layouts, more, points, shapes
from hypothesis import given
from hypothesis import strategies as st

from manyhands.facts.boxes import Box, Layout, cut_points
from manyhands.facts.errors import BadValue


@st.composite
def boxes(draw: st.DrawFn, rank: int) -> Box:
    """Any box, now and then empty, inverted or negative."""
    return Box(tuple((start := draw(st.integers(-2, 4)), start + draw(st.integers(-1, 4))) for _ in range(rank)))


@st.composite
def box_lists(draw: st.DrawFn, count: int) -> list[Box]:
    rank = draw(st.integers(0, 4))
    return [draw(boxes(rank)) for _ in range(count)]


# Box


@pytest.mark.slow
@more
@given(box_lists(1))
def test_a_box_is_its_points(drawn: list[Box]) -> None:
    (box,) = drawn
    assert box.volume == len(points(box))
    assert box.is_empty == (not points(box))
    assert len(box.shape) == box.rank
    assert box.hull(box) == box.shift([0] * box.rank) == box


@more
@given(box_lists(2))
def test_box_algebra_against_sets(drawn: list[Box]) -> None:
    one, two = drawn
    assert points(one.intersect(two)) == points(one) & points(two)
    assert one.contains(two) == (points(one) >= points(two))
    pieces = one.subtract(two)
    assert not any(piece.is_empty for piece in pieces)
    assert sum(piece.volume for piece in pieces) == len(points(one) - points(two))
    assert set().union(*map(points, pieces)) == points(one) - points(two)


@pytest.mark.slow
@more
@given(box_lists(3))
def test_hull_is_the_smallest_box_around_both(drawn: list[Box]) -> None:
    one, two, three = drawn
    hull = one.hull(two)
    both = points(one) | points(two)
    if both:
        assert hull == Box(tuple((min(axis), max(axis) + 1) for axis in zip(*both)))
    assert points(hull) == points(two.hull(one))
    assert points(hull.hull(three)) == points(one.hull(two.hull(three)))


@more
@given(box_lists(1))
def test_print_and_parse_round_trip(drawn: list[Box]) -> None:
    assert Box.parse(str(drawn[0])) == drawn[0]


def test_box_prints_as_slices() -> None:
    assert str(Box.of((0, 4), (0, 64), (3, 7))) == "[0:4,0:64,3:7]"
    assert str(Box.of()) == "[]"
    assert Box.parse("[]") == Box.whole(()) == Box.of()
    assert Box.parse(" [0:4, -1:3] ") == Box.of((0, 4), (-1, 3))


@pytest.mark.parametrize("text", ["", "0:4", "[0:4", "[0-4]", "[0:4,]", "[a:b]", "[1:2:3]"])
def test_what_is_not_a_box(text: str) -> None:
    with pytest.raises(BadValue, match="is not a box") as error:
        Box.parse(text)
    assert "[0:4,0:64]" in error.value.hint


def test_a_scalar_is_one_element() -> None:
    scalar = Box.of()
    assert (scalar.rank, scalar.volume, scalar.is_empty, scalar.shape) == (0, 1, False, ())
    assert scalar.subtract(scalar) == ()
    assert np.array(5.0)[scalar.slices()] == 5.0


def test_a_box_inside_another_indexes_its_buffer() -> None:
    outer, inner = Box.of((2, 8), (4, 9)), Box.of((3, 5), (4, 6))
    tensor = np.arange(100).reshape(10, 10)
    buffer = tensor[outer.slices()]
    assert inner.relative_to(outer) == Box.of((1, 3), (0, 2))
    np.testing.assert_array_equal(buffer[inner.relative_to(outer).slices()], tensor[inner.slices()])
    assert inner.relative_to(outer).shift((2, 4)) == inner


def test_an_empty_box_indexes_nothing_anywhere() -> None:
    empty = Box.of((5, 5), (-3, 1))
    assert np.zeros((4, 4))[empty.slices()].shape == empty.shape == (0, 4)
    assert Box.of((2, 3), (2, 3)).contains(empty)
    assert empty.relative_to(Box.of((2, 3), (2, 3))).volume == 0


def test_replace_counts_axes_from_either_end() -> None:
    box = Box.whole((2, 3, 4))
    assert box.replace(1, (1, 2)) == box.replace(-2, (1, 2)) == Box.of((0, 2), (1, 2), (0, 4))


def test_values_are_hashable_and_frozen() -> None:
    assert len({Box.of((0, 4)), Box.whole((4,)), Box.parse("[0:4]")}) == 1
    assert len({Layout.whole((4,), ["a"]), Layout.split((4,), 0, {"a": (0, 4)})}) == 1
    with pytest.raises(AttributeError):
        Box.of((0, 4)).intervals = ()  # type: ignore[misc]


# Errors say what is wrong, and both values


def test_box_errors() -> None:
    flat, line = Box.whole((2, 3)), Box.whole((4,))
    for meet in (flat.intersect, flat.hull, flat.contains, flat.subtract, flat.relative_to):
        with pytest.raises(BadValue, match=r"\[0:2,0:3\] has rank 2 and \[0:4\] has rank 1|rank 1 and .* rank 2"):
            meet(line)
    with pytest.raises(BadValue, match=r"\[0:4\] of rank 1 by 2 offsets \(1, 2\)"):
        line.shift((1, 2))
    with pytest.raises(BadValue, match="no axis 2 in a box of rank 2"):
        flat.replace(2, (0, 1))
    with pytest.raises(BadValue, match=r"\[0:4\] does not lie inside \[1:9\]"):
        line.relative_to(Box.of((1, 9)))
    with pytest.raises(BadValue, match=r"\[-1:3\] starts before 0"):
        Box.of((-1, 3)).slices()


def test_layout_errors() -> None:
    with pytest.raises(BadValue, match=r"'b' holds \[2:3\] twice: in \[0:3\] and in \[2:5\]"):
        Layout.channels((9,), 0, {"a": [(0, 9)], "b": [(0, 3), (2, 5)]})
    with pytest.raises(BadValue, match="'a' appears twice"):
        Layout.whole((4,), ["a", "b", "a"])
    with pytest.raises(BadValue, match=r"\[0:4\] has rank 1 and \[0:4,0:4\] has rank 2"):
        Layout.of({"a": [Box.whole((4,))], "b": [Box.whole((4, 4))]})
    with pytest.raises(BadValue, match="add up to 5, but axis 0 of \\(4, 2\\) has 4"):
        Layout.split_counts((4, 2), 0, {"a": 2, "b": 3})
    with pytest.raises(BadValue, match="0 or more"):
        Layout.split_counts((4,), 0, {"a": -1, "b": 5})
    with pytest.raises(BadValue, match=r"'a' cannot hold \[2:6\]: the tensor is only \[0:4\]"):
        Layout.split((4,), 0, {"a": (2, 6)})
    with pytest.raises(BadValue, match="2 x 2 tiles cannot go to 3 devices"):
        Layout.grid((4, 4), (0, 1), [[1, 1], [1, 1]], "abc")
    with pytest.raises(BadValue, match=r"cut twice along one axis: \[1, 1\]"):
        Layout.grid((4, 4), (1, -1), [[1], [1]], "a")
    with pytest.raises(BadValue, match="holds no box"):
        Layout.of({"a": []}).hull("a")


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("inf")], [float("nan")]])
def test_weights_that_cannot_share(weights: list[float]) -> None:
    with pytest.raises(BadValue, match="Cannot share 10 by weights"):
        cut_points(10, weights)


# Layout


@pytest.mark.slow
@more
@given(st.integers(0, 40), st.lists(st.one_of(st.integers(0, 5), st.floats(0, 5)), min_size=1, max_size=6).filter(any))
def test_cut_points_always_partition(extent: int, weights: list[float]) -> None:
    cuts = cut_points(extent, weights)
    assert (len(cuts), cuts[0], cuts[-1]) == (len(weights) + 1, 0, extent)
    assert list(cuts) == sorted(cuts)


def test_cut_points_are_exact() -> None:
    assert cut_points(10, [1, 1, 1]) == (0, 3, 6, 10)
    assert cut_points(7, [0, 2, 1]) == (0, 0, 4, 7)
    assert cut_points(3 * 10**17, [1, 1, 1]) == (0, 10**17, 2 * 10**17, 3 * 10**17)


@pytest.mark.slow
@more
@given(st.data())
def test_layout_checks_against_points(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    layout = data.draw(layouts(shape, covering=False))
    count = Counter(point for device in layout.devices for point in held_points(layout, device))
    everything = points(Box.whole(shape))
    assert layout.covers(shape) == (count.keys() >= everything)
    assert is_partition(layout, shape) == (count == Counter(everything))
    assert layout.total_volume == sum(map(layout.volume, layout.devices)) == count.total()
    for device in layout.devices:
        if layout.rank is not None:
            assert all(layout.hull(device).contains(box) for box in layout.boxes(device))


@pytest.mark.slow
@few
@given(st.data())
def test_grid_is_always_a_partition(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(0, 9)] * 4))
    axes = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 3))]
    weights = [
        data.draw(st.lists(st.integers(0, 4) | st.floats(0.1, 3), min_size=1, max_size=3).filter(any)) for _ in axes
    ]
    devices = [f"device{i}" for i in range(math.prod(map(len, weights)))]
    assert is_partition(Layout.grid(shape, axes, weights, devices), shape)


def test_a_partition_is_not_undone_by_what_lies_outside() -> None:
    assert not is_partition(Layout.whole((5,), ["a"]), (4,))
    assert Layout.whole((5,), ["a"]).covers((4,))
    assert not is_partition(Layout.of({"a": [Box.of((0, 2))], "b": [Box.of((1, 3))]}), (4,))  # 4 elements, not these


def test_split_by_counts_keeps_device_order_and_empty_shares() -> None:
    layout = Layout.split_counts((2, 6), -1, {"c": 4, "a": 0, "b": 2})
    assert layout.devices == ("c", "a", "b")
    assert [str(layout.hull(device)) for device in layout.devices] == ["[0:2,0:4]", "[0:2,4:4]", "[0:2,4:6]"]
    assert [layout.volume(device) for device in "cabz"] == [8, 0, 4, 0]
    assert layout.boxes("z") == ()
    assert layout.hull("z").is_empty
    assert is_partition(layout, (2, 6))


def test_layouts_travel_as_json() -> None:
    layout = Layout.channels((2, 8), 1, {"a": [(0, 2), (4, 6)], "b": []}, partial=True)
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout
    assert layout.hull("a") == Box.of((0, 2), (0, 6))
    assert layout.hull("b").is_empty

"""Boxes and layouts: which part of a tensor lies on which device. moves.py computes what must travel between two
layouts.

  0     4     8
0 +-----+-----+
  |  a  |  b  |      Layout.grid((8, 8), (0, 1), [[1, 1], [1, 1]], "abcd")
4 +-----+-----+      c holds the box [4:8,0:4]
  |  c  |  d  |
8 +-----+-----+
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import floor, isfinite, prod

import msgspec

from manyhands.facts.errors import BadValue

Interval = tuple[int, int]
"""Start and stop, half-open: (3, 7) is 3, 4, 5, 6. A stop at or before the start is empty."""


class Box(msgspec.Struct, frozen=True, gc=False):
    """An interval for each axis. It prints as [0:4,0:64,3:7]; a box of no axes, [], has one element: a scalar."""

    intervals: tuple[Interval, ...]

    @classmethod
    def of(cls, *intervals: Interval) -> Box:
        return cls(intervals)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of all of a tensor of this shape."""
        return cls(tuple((0, extent) for extent in shape))

    @classmethod
    def parse(cls, text: str) -> Box:
        """Return the box that prints as `text`."""
        body = text.strip()
        try:
            if not (body.startswith("[") and body.endswith("]")):
                raise ValueError("no brackets")
            axes = body[1:-1].split(",") if body[1:-1].strip() else []
            pairs = [axis.split(":") for axis in axes]
            return cls(tuple((int(start), int(stop)) for start, stop in pairs))
        except ValueError:
            hint = "Write start:stop for each axis, as in [0:4,0:64]."
            raise BadValue(f"'{text}' is not a box.", hint=hint) from None

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{stop}" for start, stop in self.intervals) + "]"

    @property
    def rank(self) -> int:
        return len(self.intervals)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([stop - start if stop > start else 0 for start, stop in self.intervals])

    @property
    def volume(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        for start, stop in self.intervals:  # noqa: SIM110 (any() takes twice as long, and everything asks this)
            if stop <= start:
                return True
        return False

    def intersect(self, other: Box) -> Box:
        """Return the part that both boxes have; an empty axis comes out as start:start."""
        self._check_rank(other)
        common = []
        for (a, b), (c, d) in zip(self.intervals, other.intervals):
            start = a if a > c else c
            stop = b if b < d else d
            common.append((start, stop if stop > start else start))
        return Box(tuple(common))

    def hull(self, other: Box) -> Box:
        """Return the smallest box with both inside. An empty box adds nothing, wherever it lies."""
        self._check_rank(other)
        if self.is_empty:
            return other
        if other.is_empty:
            return self
        return Box(tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.intervals, other.intervals)))

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box. Every box contains an empty one."""
        self._check_rank(other)
        return other.is_empty or all(a <= c and d <= b for (a, b), (c, d) in zip(self.intervals, other.intervals))

    def shift(self, offsets: Sequence[int]) -> Box:
        if len(offsets) != self.rank:
            raise BadValue(f"Cannot shift {self} of rank {self.rank} by {len(offsets)} offsets {tuple(offsets)}.")
        return Box(tuple((start + by, stop + by) for (start, stop), by in zip(self.intervals, offsets)))

    def relative_to(self, outer: Box) -> Box:
        """Return this box as counted from the first element of `outer`, for indexing a buffer that stores `outer`."""
        if not outer.contains(self):
            raise BadValue(f"{self} does not lie inside {outer}.", hint="Intersect the two first.")
        return self.shift([-start for start, _ in outer.intervals])

    def slices(self) -> tuple[slice, ...]:
        """Return the index of this box in an array that starts at zero."""
        if self.is_empty:
            return tuple(slice(0, extent) for extent in self.shape)
        if any(start < 0 for start, _ in self.intervals):  # an array would count these from its end
            raise BadValue(f"{self} starts before 0 and cannot index an array.", hint="Use relative_to() first.")
        return tuple(slice(start, stop) for start, stop in self.intervals)

    def replace(self, axis: int, interval: Interval) -> Box:
        """Return the same box with another interval on one axis."""
        axis = _axis(axis, self.rank)
        return Box((*self.intervals[:axis], interval, *self.intervals[axis + 1 :]))

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Return what is in this box and not in `other`, as disjoint boxes: full slabs off the first axis, then the
        next within.

        +---------------+
        |     before    |
        +---+-------+---+
        | b | other | a |
        +---+-------+---+
        |     after     |
        +---------------+
        """
        common = self.intersect(other)
        if common.is_empty:
            return () if self.is_empty else (self,)
        pieces = []
        remainder = self
        for axis, (start, stop) in enumerate(common.intervals):
            first, last = self.intervals[axis]
            if first < start:
                pieces.append(remainder.replace(axis, (first, start)))
            if stop < last:
                pieces.append(remainder.replace(axis, (stop, last)))
            remainder = remainder.replace(axis, (start, stop))
        return tuple(pieces)

    def _check_rank(self, other: Box) -> None:
        if len(self.intervals) != len(other.intervals):
            raise BadValue(f"{self} has rank {self.rank} and {other} has rank {other.rank}: they cannot meet.")


class Layout(msgspec.Struct, frozen=True, dict=True):
    """The boxes of a tensor that each device holds, as the value or as a partial sum still to be added up.

    One device's boxes are disjoint. Boxes of different devices may overlap: replicas and halos of a value, or terms
    of a partial sum. A device may hold empty boxes, or none.
    """

    held: tuple[tuple[str, tuple[Box, ...]], ...]
    partial: bool = False

    def __post_init__(self) -> None:
        if len(self._by_device) != len(self.held):
            names = [device for device, _ in self.held]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadValue(f"Device '{twice}' appears twice in one layout.", hint="List all its boxes under one entry.")
        boxes = [box for _, held in self.held for box in held]
        for box in boxes:
            boxes[0]._check_rank(box)
        for device, held in self.held:
            _check_disjoint(device, held)

    @classmethod
    def of(cls, held: Mapping[str, Iterable[Box]], *, partial: bool = False) -> Layout:
        """Return a layout of any boxes for any device."""
        return cls(tuple((device, tuple(boxes)) for device, boxes in held.items()), partial)

    @classmethod
    def whole(cls, shape: Sequence[int], devices: Iterable[str], *, partial: bool = False) -> Layout:
        """Return a layout with everything on every device: replicas of a value, or as many terms of a sum."""
        return cls(tuple((device, (Box.whole(shape),)) for device in devices), partial)

    @classmethod
    def split(
        cls, shape: Sequence[int], axis: int, intervals: Mapping[str, Interval], *, partial: bool = False
    ) -> Layout:
        """Return a layout with one interval of one axis for each device, whole on the other axes. Intervals may
        overlap."""
        sets = {device: [interval] for device, interval in intervals.items()}
        return cls.channels(shape, axis, sets, partial=partial)

    @classmethod
    def split_counts(
        cls, shape: Sequence[int], axis: int, counts: Mapping[str, int], *, partial: bool = False
    ) -> Layout:
        """Return a layout of consecutive shares of one axis, by a count for each device; the counts add up to the axis
        and may be zero."""
        extent = shape[_axis(axis, len(shape))]
        total = sum(counts.values())
        if total != extent or min(counts.values(), default=0) < 0:
            raise BadValue(
                f"Counts {dict(counts)} add up to {total}, but axis {axis} of {tuple(shape)} has {extent}.",
                hint="Give each device a count of 0 or more, together all of the axis.",
            )
        cuts = accumulate(counts.values(), initial=0)
        return cls.split(shape, axis, dict(zip(counts, pairwise(cuts))), partial=partial)

    @classmethod
    def channels(
        cls, shape: Sequence[int], axis: int, intervals: Mapping[str, Iterable[Interval]], *, partial: bool = False
    ) -> Layout:
        """Return a layout with a set of intervals of one axis for each device, such as its channel groups; an empty set
        is an empty box."""
        whole = Box.whole(shape)
        held = {
            device: tuple(whole.replace(axis, interval) for interval in device_intervals)
            or (whole.replace(axis, (0, 0)),)
            for device, device_intervals in intervals.items()
        }
        for device, boxes in held.items():
            for box in boxes:
                if not whole.contains(box):
                    raise BadValue(f"Device '{device}' cannot hold {box}: the tensor is only {whole}.")
        return cls.of(held, partial=partial)

    @classmethod
    def grid(
        cls,
        shape: Sequence[int],
        axes: Sequence[int],
        weights: Sequence[Sequence[float]],
        devices: Sequence[str],
        *,
        partial: bool = False,
    ) -> Layout:
        """Return a layout of tiles: each of `axes` is cut by relative `weights`, and the devices fill the grid with the
        last axis first, so that rows and columns are filled row by row."""
        axes = [_axis(axis, len(shape)) for axis in axes]
        if len(set(axes)) < len(axes):
            raise BadValue(f"Tiles cannot be cut twice along one axis: {axes}.")
        if len(devices) != prod(map(len, weights)):
            counts = " x ".join(str(len(each)) for each in weights)
            raise BadValue(f"A grid of {counts} tiles cannot go to {len(devices)} devices.")
        tiles = [Box.whole(shape)]
        for axis, each in zip(axes, weights, strict=True):
            parts = list(pairwise(cut_points(shape[axis], each)))
            tiles = [tile.replace(axis, part) for tile in tiles for part in parts]
        return cls(tuple((device, (tile,)) for device, tile in zip(devices, tiles)), partial)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for device, _ in self.held)

    @property
    def rank(self) -> int | None:
        """The number of axes; None when no device holds a box."""
        return next((box.rank for _, boxes in self.held for box in boxes), None)

    def boxes(self, device: str) -> tuple[Box, ...]:
        """Return the boxes that one device holds; none for a device that the layout does not name."""
        return self._by_device.get(device, ())

    def pieces(self) -> Iterator[tuple[str, Box]]:
        """Yield every box with something in it, and its device, in order."""
        return ((device, box) for device, boxes in self.held for box in boxes if not box.is_empty)

    def hull(self, device: str) -> Box:
        """Return the smallest box around what one device holds: the shape of its buffer. Empty if it holds nothing."""
        if boxes := self.boxes(device):
            return reduce(Box.hull, boxes)
        if not self.rank:  # no box to take the rank from, or a scalar, of which no box is empty
            raise BadValue(f"Device '{device}' holds no box to put a hull around.")
        return Box.whole((0,) * self.rank)

    def volume(self, device: str) -> int:
        """Return the number of elements that one device holds."""
        return sum(box.volume for box in self.boxes(device))

    @property
    def total_volume(self) -> int:
        """The number of elements that all devices hold; replicas count each time."""
        return sum(box.volume for _, box in self.pieces())

    def covers(self, shape: Sequence[int]) -> bool:
        """Return whether every element of a tensor of this shape is held by some device."""
        whole = Box.whole(shape)
        inside = first_come((device, box.intersect(whole)) for device, box in self.pieces())
        return sum(box.volume for _, box in inside) == whole.volume

    @cached_property
    def _by_device(self) -> dict[str, tuple[Box, ...]]:
        return dict(self.held)


def cut_points(extent: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return 0, the floor of each running share of `extent`, and `extent`: 10 by 1:1:1 is 0, 3, 6, 10.

    They are computed in fractions, so that every machine cuts at the same place.
    """
    if not all(isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise BadValue(f"Cannot share {extent} by weights {list(weights)}.", hint="Give weights >= 0, one of them > 0.")
    running = list(accumulate(map(Fraction, weights), initial=Fraction(0)))
    return tuple(floor(extent * upto / running[-1]) for upto in running)


# Finding which boxes meet, among many


class BoxIndex:
    """An index that finds which of many boxes meet a given one, without testing each.

    Sorted by start along the axis where they differ most, the boxes that can meet [a:b) are neighbours: they start
    before b, and none before them reaches past a.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        starts_of = zip(*([start for start, _ in box.intervals] for box in boxes))
        variety = [len(set(starts)) for starts in starts_of]
        self.axis = variety.index(max(variety)) if variety else 0
        self.order = sorted(range(len(boxes)), key=lambda ordinal: self._span(boxes[ordinal])[0])
        self.starts = [self._span(boxes[ordinal])[0] for ordinal in self.order]
        self.reach = list(accumulate((self._span(boxes[ordinal])[1] for ordinal in self.order), max))

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """Return the position of each box that shares an element with this one, and what they share, in order."""
        start, stop = self._span(box)
        near = self.order[bisect_right(self.reach, start) : bisect_left(self.starts, stop)]
        shared = [(ordinal, box.intersect(self.boxes[ordinal])) for ordinal in sorted(near)]
        return [(ordinal, common) for ordinal, common in shared if not common.is_empty]

    def _span(self, box: Box) -> Interval:
        return box.intervals[self.axis] if box.intervals else (0, 1)


def first_come(claims: Iterable[tuple[str, Box]]) -> list[tuple[str, Box]]:
    """Return disjoint pieces with the same union: each element stays with the first device that claims it."""
    first: dict[Box, str] = {}
    for device, box in claims:
        first.setdefault(box, device)
    boxes = list(first)
    index = BoxIndex(boxes)
    pieces = []
    for ordinal, (box, device) in enumerate(first.items()):
        earlier = [common for other, common in index.overlapping(box) if other < ordinal]
        pieces += [(device, piece) for piece in without([box], *earlier) if not piece.is_empty]
    return pieces


def without(boxes: list[Box], *others: Box) -> list[Box]:
    """Return disjoint boxes less every one of the others."""
    for other in others:
        boxes = [piece for box in boxes for piece in box.subtract(other)]
    return boxes


def _check_disjoint(device: str, boxes: Sequence[Box]) -> None:
    if len(boxes) < 2:
        return
    index = BoxIndex(boxes)
    for ordinal, box in enumerate(boxes):
        for other, common in index.overlapping(box):
            if other > ordinal:
                raise BadValue(f"Device '{device}' holds {common} twice: in {box} and in {boxes[other]}.")


def _axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front; -1 is the last."""
    if not -rank <= axis < rank:
        raise BadValue(f"There is no axis {axis} in a box of rank {rank}.")
    return axis % rank

"""Moves: which device sends what to which, to get from one layout to another. A tile that grows by its halo, for
example:

        source: four tiles             target: tile a with its halo           moves to a

        0     4     8                  0     4 5                              a -> a  [0:4,0:4]  a copy
      0 +-----+-----+                0 +-----+-+                              b -> a  [0:4,4:5]
        |  a  |  b  |                  |  a  |b|                              c -> a  [4:5,0:4]
      4 +-----+-----+       =>       4 +-----+-+                              d -> a  [4:5,4:5]
        |  c  |  d  |                  |  c  |d|
      8 +-----+-----+                5 +-----+-+

Scatter, gather, halo exchange, channel shuffle, migration of weights and the adding up of gradients differ only in
their two layouts. The way back (`adjoint`) has the same boxes with the arrows turned round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from manyhands.facts.boxes import Box, BoxIndex, Layout, first_come, without
from manyhands.facts.errors import BadValue


class Move(msgspec.Struct, frozen=True, gc=False):
    """A rectangular piece that goes from one device to another, which stores it or adds it to what it has.

    Source and target may be the same device: a copy that never touches the network.
    """

    source: str
    target: str
    box: Box
    adds: bool = False

    @property
    def is_local(self) -> bool:
        return self.source == self.target


Moves = dict[str, tuple[Move, ...]]
"""Tensor -> the moves of its pieces between devices."""


def moves(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the moves after which what lies as `source` lies as `target` (in buffers that start at zero).

        value   -> value     each target's every element arrives once, from itself if it can, else from the holder
                             that has sent least so far: replicas share the work
        value   -> partial   each element arrives at one of its target's holders; to the others it is a zero term
        partial -> value     each target's every element is the sum of all terms, its own among them, always added in
                             the source's device order: replicas agree to the last bit. No term: the sum is zero
        partial -> partial   each term goes to one holder, itself if it can, else the one that has received least

    A value that is needed but held nowhere, or a term that no device takes, is an error.
    """
    if source.rank is not None and target.rank is not None and source.rank != target.rank:
        raise BadValue(f"The source layout has rank {source.rank} and the target layout has rank {target.rank}.")
    if source.partial and target.partial:
        return tuple(Move(giver, taker, box, adds=True) for giver, taker, box in _partners(source.pieces(), target))
    if source.partial:
        return tuple(_all_terms(source, target))
    wanting_boxes = first_come([*_shared(source, target), *target.pieces()]) if target.partial else target.pieces()
    return tuple(Move(giver, taker, box) for taker, giver, box in _partners(wanting_boxes, source))


def adjoint(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return the way back, for gradients: same boxes, arrows turned round, adding where they meet.

    With E the operator `target[box] += source[box]` over all moves, from the source's buffers to the target's, which
    start at zero: <E x, y> = <x, adjoint(E) y> for all x and y.
    """
    return tuple(Move(move.target, move.source, move.box, adds=True) for move in moves)


# Search for partners


def _partners(wanting: Iterable[tuple[str, Box]], holders: Layout) -> Iterator[tuple[str, str, Box]]:
    """Yield one holder for every element of every wanting box: (wanting device, holder, box).

    The device itself comes first, with its boxes as large as they are. Everything else is cut where the set of holders
    changes, and each piece goes to the holder with the least load so far, ties by device order.
    """
    cells = _cells(holders)
    index = BoxIndex([cell for cell, _ in cells])
    load = dict.fromkeys(holders.devices, 0)
    for device, box in wanting:
        partners = index.overlapping(box)
        if sum(common.volume for _, common in partners) < box.volume:  # cells are disjoint, so some is missing
            raise _nobody(device, without([box], *(common for _, common in partners))[0], holders)
        for held in holders.boxes(device):
            common = box.intersect(held)
            if not common.is_empty:
                yield device, device, common
        for ordinal, common in partners:
            candidates = cells[ordinal][1]
            if device not in candidates:
                holder = min(candidates, key=load.__getitem__)
                load[holder] += common.volume
                yield device, holder, common


def _nobody(device: str, missing: Box, holders: Layout) -> BadValue:
    if holders.partial:
        return BadValue(f"Device '{device}' has a term of {missing}, but no device of the target layout takes it.")
    return BadValue(f"Device '{device}' needs {missing}, but no device of the source layout holds it.")


def _all_terms(source: Layout, target: Layout) -> Iterator[Move]:
    """Yield, for every element of every target box, each device that has a term of it, in the source's order."""
    terms = list(source.pieces())
    index = BoxIndex([box for _, box in terms])
    for device, box in target.pieces():
        for ordinal, common in index.overlapping(box):
            yield Move(terms[ordinal][0], device, common, adds=True)


def _cells(layout: Layout) -> list[tuple[Box, list[str]]]:
    """Return what a layout holds, cut into disjoint cells, each with all its holders in device order.

    a holds ======            cells   ===|===|===
    b holds    =======                a   a,b  b
    """
    holders: dict[Box, list[str]] = {}
    for device, box in layout.pieces():
        holders.setdefault(box, []).append(device)
    order = {device: place for place, device in enumerate(layout.devices)}
    boxes = list(holders)
    index = BoxIndex(boxes)
    cells = []
    for ordinal, box in enumerate(boxes):
        fragments = [(box, holders[box])]
        for other, common in index.overlapping(box):
            if other == ordinal:
                continue
            outside = [(piece, by) for fragment, by in fragments for piece in fragment.subtract(common)]
            inside = []
            if other > ordinal:  # otherwise the other box has already made these cells
                inside = [(fragment.intersect(common), by + holders[boxes[other]]) for fragment, by in fragments]
            fragments = outside + [(piece, by) for piece, by in inside if not piece.is_empty]
        cells += [(fragment, sorted(by, key=order.__getitem__)) for fragment, by in fragments]
    return cells


def _shared(source: Layout, target: Layout) -> Iterator[tuple[str, Box]]:
    """Yield what each device holds in both layouts."""
    for device, box in target.pieces():
        for held in source.boxes(device):
            common = box.intersect(held)
            if not common.is_empty:
                yield device, common

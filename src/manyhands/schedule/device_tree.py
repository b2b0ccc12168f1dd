"""The tree that the devices of a sum form: workers in hosts, hosts in sites, and how the sum goes up and down in it.

    places      paris/a  paris/a  paris/b  rome/c        tree   (((0, 1), 2), 3)
    devices        0        1        2        3

Gradients: at every group, deepest first, each member's sum of a chunk goes to the member that owns it, which adds it to
its own; then the whole sums come back the same way. A group's owners share the chunks evenly, whatever lies below them:
with a devices in each of b groups a device sends (a-1)/a of the bytes inside its group and (b-1)/b of a part 1/a beyond
it, so what leaves a group is as little as if it were one device.

Rows (statistics, norms): everybody gets everybody's. Members of a group exchange theirs, then each group sends those of
all its members to each other group once, between two devices of their own for every pair of groups, and the one that
receives them hands them on inside.

Devices are numbers here, so that sums among as many devices, placed alike, have the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from math import ceil, lcm, log
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

MOST_DIRECT = 16
"""The most members of a group that exchange gradients directly: a larger one is summed in groups within it, since all
pairs of its members would be many connections."""
UNEVEN = 4
"""Groups of different sizes in one level cut a chunk into at most so many times the largest size: a fraction of that
evenness costs nothing, and far fewer chunks travel."""

Places = NDArray[numpy.int64]
Tree = Any
"""A device's number, or the tuple of a group's members, each of them a tree: mypy knows no recursive tuple."""


class TreeHop(NamedTuple):
    """Chunks, or rows, [first, last) go from one device to another."""

    source: int
    target: int
    first: int
    last: int


class Level(NamedTuple):
    """The hops of one level of the tree on the way up, as arrays; on the way down they go back."""

    sources: Places
    targets: Places
    firsts: Places
    lasts: Places


@lru_cache(maxsize=256)
def device_tree(count: int, places: tuple[str, ...]) -> Tree:
    """Return devices 0 to count - 1 in their groups; groups of one member are left out. Without places: one group."""
    root: dict[str | int, Any] = {}
    for device in range(count):
        group = root
        for name in places[device].split("/") if places and places[device] else ():
            group = group.setdefault(name, {})
        group[device] = device
    return _collapsed(root)


def _collapsed(group: dict[str | int, Any]) -> Tree:
    members = tuple(_collapsed(member) if isinstance(member, dict) else member for member in group.values())
    return members[0] if len(members) == 1 else members


def leaves(tree: Tree) -> Iterator[int]:
    """Yield the devices of a tree, group by group."""
    if isinstance(tree, int):
        yield tree
        return
    for member in tree:
        yield from leaves(member)


def _depth(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + max(map(_depth, tree))


# Gradients


@lru_cache(maxsize=256)
def sum_levels(count: int, places: tuple[str, ...]) -> tuple[int, tuple[Level, ...]]:
    """Return how many chunks a sum is cut into, and its levels, the deepest first."""
    tree = _narrowed(device_tree(count, places))
    depth = _depth(tree)
    tree = _padded(tree, depth)
    fans = [_cells(sizes) for sizes in _sizes(tree, depth)]
    cells = [1] * (depth + 1)
    for level in reversed(range(depth)):
        cells[level] = cells[level + 1] * fans[level]
    hops: list[list[Level]] = [[] for _ in range(depth)]

    def owners(group: Tree, level: int) -> Places:
        """Return the owner of each cell of a group: the deeper a level, the larger the runs of cells that it deals."""
        if level == depth:
            return numpy.array([group])
        members = numpy.stack([owners(member, level + 1) for member in group])
        place = numpy.arange(cells[level])
        chosen = place % fans[level] * len(members) // fans[level]
        beside = members[:, place // fans[level]]
        owner: Places = beside[chosen, place]
        width = cells[0] // cells[level]
        hops[level] += [_runs(beside[member], owner, chosen != member, width) for member in range(len(members))]
        return owner

    owners(tree, 0)
    return cells[0], tuple(Level(*map(numpy.concatenate, zip(*parts))) for parts in reversed(hops))


def _runs(sources: Places, targets: Places, travels: NDArray[numpy.bool_], width: int) -> Level:
    """Return the cells that travel, with neighbours between the same two devices as one hop."""
    changes = numpy.ones(len(sources), bool)
    for column in (sources, targets, travels):
        changes[1:] &= column[1:] == column[:-1]
    changes[1:] = ~changes[1:]
    starts = numpy.flatnonzero(changes)
    ends = numpy.append(starts[1:], len(sources))
    keep = travels[starts]
    starts, ends = starts[keep], ends[keep]
    return Level(sources[starts], targets[starts], starts * width, ends * width)


def _narrowed(tree: Tree) -> Tree:
    """Return the tree with groups within every group that has more than `MOST_DIRECT` members."""
    if isinstance(tree, int):
        return tree
    members = tuple(map(_narrowed, tree))
    if len(members) <= MOST_DIRECT:
        return members
    fan = _fan(len(members))
    bounds = [place * len(members) // fan for place in range(fan + 1)]
    return tuple(_narrowed_run(members[a:b]) for a, b in zip(bounds, bounds[1:]))


def _fan(count: int) -> int:
    """Return in how many groups so many members are summed: alike, if one level more than the fewest makes them so."""
    levels = ceil(log(count, MOST_DIRECT) - 1e-9)
    even, most = count ** (1 / levels), MOST_DIRECT**levels
    alike = [fan for fan in range(2, MOST_DIRECT + 1) if count % fan == 0 and count // fan <= most]
    return min(alike, key=lambda fan: abs(fan - even), default=ceil(even - 1e-9))


def _narrowed_run(members: tuple[Tree, ...]) -> Tree:
    return members[0] if len(members) == 1 else _narrowed(members)


def _padded(tree: Tree, depth: int) -> Tree:
    """Return the tree with every device at the same depth: one that lies higher is in groups of its own."""
    if not depth:
        return tree
    members = (tree,) if isinstance(tree, int) else tree
    return tuple(_padded(member, depth - 1) for member in members)


def _sizes(tree: Tree, depth: int) -> list[set[int]]:
    """Return the sizes of the groups of each level."""
    sizes: list[set[int]] = [set() for _ in range(depth)]
    groups = [tree]
    for level in range(depth):
        sizes[level] = {len(group) for group in groups}
        groups = [member for group in groups for member in group]
    return sizes


def _cells(sizes: set[int]) -> int:
    """Return into how many cells groups of these sizes are dealt: a multiple of all of them, if that is not large."""
    return min(lcm(*sizes), UNEVEN * max(sizes))


# Rows


@lru_cache(maxsize=256)
def row_rounds(count: int, places: tuple[str, ...]) -> tuple[tuple[TreeHop, ...], ...]:
    """Return the rounds in which every device gets everybody's rows. Rows are numbered by the devices of the tree,
    group by group."""
    tree = device_tree(count, places)
    number = {device: row for row, device in enumerate(leaves(tree))}
    return tuple(map(tuple, _gathered(tree, number))) or ((),)


def _gathered(tree: Tree, number: dict[int, int]) -> list[list[TreeHop]]:
    """Return the rounds after which every device of a tree has the rows of all of them."""
    if isinstance(tree, int):
        return []
    if all(isinstance(member, int) for member in tree):
        return [[TreeHop(a, b, number[a], number[a] + 1) for a in tree for b in tree if a != b]]
    members = [tuple(leaves(member)) for member in tree]
    inside = _together([_gathered(member, number) for member in tree])
    across: list[TreeHop] = []
    handed_on: list[list[list[TreeHop]]] = []
    for a, sent in enumerate(members):
        rows = number[sent[0]], number[sent[-1]] + 1
        for b, receivers in enumerate(members):
            if a != b:  # every pair of groups between devices of its own, as far as there are any
                source, target = sent[_turn(b, a) % len(sent)], receivers[_turn(a, b) % len(receivers)]
                across.append(TreeHop(source, target, *rows))
                handed_on.append(_spread(tree[b], target, rows))
    return [*inside, across, *_together(handed_on)]


def _turn(other: int, mine: int) -> int:
    """Return the number of another group among the others of a group."""
    return other - (other > mine)


def _spread(tree: Tree, source: int, rows: tuple[int, int]) -> list[list[TreeHop]]:
    """Return the rounds in which a device's rows reach all others of its tree."""
    if isinstance(tree, int):
        return []
    if all(isinstance(member, int) for member in tree):
        return [[TreeHop(source, member, *rows) for member in tree if member != source]]
    first: list[TreeHop] = []
    then = []
    for place, member in enumerate(tree):
        devices = tuple(leaves(member))
        start = source
        if source not in devices:
            start = devices[(rows[0] + place) % len(devices)]
            first.append(TreeHop(source, start, *rows))
        then.append(_spread(member, start, rows))
    return [first, *_together(then)]


def _together(sequences: list[list[list[TreeHop]]]) -> list[list[TreeHop]]:
    """Return rounds that go on side by side as one sequence."""
    return [[hop for hops in rounds for hop in hops] for rounds in zip_longest(*sequences, fillvalue=[])]

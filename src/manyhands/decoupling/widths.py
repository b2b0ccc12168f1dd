"""The number of channels of every tensor, before and after: classes of tensors that must be equally wide.

    same       tensors that are added or multiplied have one width           x + f(x)
    pinned     keeps its old width                                           the picture, the network's output
    multiple   a new width is a multiple of it                               groups; groups² where it is shuffled
    parts      as wide as its parts together                                 concatenation
    times      a fixed number of times as wide as another                    pixel_unshuffle

A class also has the old channel that each new one stands for (`origin`), for weights taken from the original.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from manyhands.facts.errors import CaptureFailed


@dataclass(frozen=True)
class ConcatenatedParts:
    """The widths of which a concatenation is made."""

    widths: tuple[int, ...]
    by_group: bool


@dataclass
class _Class:
    old: int
    parent: int
    pinned: str = ""
    is_picture: bool = False
    multiple: int = 1
    parts: list[ConcatenatedParts] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)


class Widths:
    """A union-find structure over widths. `solve` gives them numbers."""

    def __init__(self, groups: int, widen: float) -> None:
        self.groups = groups
        self.widen = widen
        self._classes: list[_Class] = []
        self._origins: dict[int, list[int]] = {}

    # Constraints

    def new(self, old: int) -> int:
        self._classes.append(_Class(old, len(self._classes)))
        return len(self._classes) - 1

    def find(self, width: int) -> int:
        while self._classes[width].parent != width:
            self._classes[width].parent = self._classes[self._classes[width].parent].parent
            width = self._classes[width].parent
        return width

    def _of(self, width: int) -> _Class:
        return self._classes[self.find(width)]

    def same(self, first: int, second: int) -> None:
        """Make both have one width from now on."""
        first, second = self.find(first), self.find(second)
        if first == second:
            return
        remaining, merged = self._classes[first], self._classes[second]
        if remaining.old != merged.old:
            raise CaptureFailed(
                f"A layer or a sum reads {remaining.old} channels at one place and {merged.old} at another.",
                hint="Give each place a layer of its own.",
            )
        merged.parent = first
        remaining.pinned = remaining.pinned or merged.pinned
        remaining.is_picture = remaining.is_picture or merged.is_picture
        remaining.multiple = math.lcm(remaining.multiple, merged.multiple)
        remaining.parts += merged.parts
        remaining.times += merged.times

    def pin(self, width: int, why: str, *, is_picture: bool = False) -> None:
        """Make a width keep its old value."""
        width_class = self._of(width)
        width_class.pinned = width_class.pinned or why
        width_class.is_picture = width_class.is_picture or is_picture

    def require(self, width: int, multiple: int) -> None:
        width_class = self._of(width)
        width_class.multiple = math.lcm(width_class.multiple, multiple)

    def joined(self, parts: tuple[int, ...], *, by_group: bool) -> int:
        """Return the width of some tensors one after the other: in every group, or as a whole."""
        made = self.new(sum(self.old(part) for part in parts))
        self._classes[made].parts.append(ConcatenatedParts(parts, by_group))
        return made

    def scaled(self, width: int, factor: int) -> int:
        """Return a width that is always `factor` times another."""
        made = self.new(self.old(width) * factor)
        self._classes[made].times.append((width, factor))
        return made

    # Results

    def old(self, width: int) -> int:
        return self._of(width).old

    def why_pinned(self, width: int) -> str:
        return self._of(width).pinned

    def spread(self) -> None:
        """Pass the constraints on widths on to those of which they are made."""
        changed = True
        while changed:
            before = [(width_class.pinned, width_class.multiple) for width_class in self._classes]
            for index, width_class in enumerate(self._classes):
                if self.find(index) != index:
                    continue
                for part in (part for parts in width_class.parts for part in parts.widths):
                    if width_class.pinned:
                        self.pin(part, width_class.pinned)
                    self.require(part, width_class.multiple)
                for base, factor in width_class.times:
                    if width_class.pinned:
                        self.pin(base, width_class.pinned)
                    self.require(base, width_class.multiple // math.gcd(width_class.multiple, factor))
            changed = before != [(width_class.pinned, width_class.multiple) for width_class in self._classes]
        self._origins.clear()

    def width(self, width: int) -> int:
        """Return the new width."""
        return len(self.origin(width))

    def is_grouped(self, width: int) -> bool:
        """Return whether a width's channels are divided among the groups, evenly and in order."""
        width_class = self._of(width)
        if width_class.parts or width_class.times:
            apart = all(
                parts.by_group and self.is_grouped(part) for parts in width_class.parts for part in parts.widths
            )
            return apart and all(self.is_grouped(base) for base, _ in width_class.times)
        return not width_class.is_picture and self.width(width) % self.groups == 0

    def can_shuffle(self, width: int) -> bool:
        """Return whether a width is, or may be made, a multiple of groups²."""
        width_class = self._of(width)
        if width_class.pinned:
            return self.is_grouped(width) and width_class.old % self.groups**2 == 0
        inner = [part for parts in width_class.parts for part in parts.widths] + [base for base, _ in width_class.times]
        return all(self.can_shuffle(part) for part in inner)

    def origin(self, width: int) -> list[int]:
        """Return, for every new channel, the old one it stands for: group by group the old groups' channels."""
        root = self.find(width)
        if root not in self._origins:
            self._origins[root] = self._origin(self._classes[root])
        return self._origins[root]

    def _origin(self, width_class: _Class) -> list[int]:
        origins = [self._joined(parts) for parts in width_class.parts]
        origins += [
            [old * factor + k for old in self.origin(base) for k in range(factor)] for base, factor in width_class.times
        ]
        if width_class.pinned:
            origins.append(list(range(width_class.old)))
        if not origins:
            count = math.ceil(width_class.old * self.widen - 1e-9)
            count = math.ceil(count / width_class.multiple) * width_class.multiple
            origins.append([channel * width_class.old // count for channel in range(count)])
        if any(other != origins[0] for other in origins[1:]):
            raise CaptureFailed(
                f"A tensor of {width_class.old} channels is added to one that is put together otherwise: their "
                "channels cannot be widened alike.",
                hint="Use widen=1, or give both a convolution of their own before they are added.",
            )
        return origins[0]

    def _joined(self, parts: ConcatenatedParts) -> list[int]:
        starts = [sum(self.old(part) for part in parts.widths[:number]) for number in range(len(parts.widths))]
        apart = parts.by_group and all(self.is_grouped(part) for part in parts.widths)
        groups = self.groups if apart else 1
        made: list[int] = []
        for group in range(groups):
            for start, part in zip(starts, parts.widths):
                origin = self.origin(part)
                size = len(origin) // groups
                made += [start + old for old in origin[group * size : (group + 1) * size]]
        return made

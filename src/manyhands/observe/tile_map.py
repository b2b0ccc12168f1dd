"""A picture of a tiled stage: for each group, the map it starts from, cut into tiles, and what each tile fetches.

+------+::     Tiles are drawn apart, each with the halo around it that its device fetches before the group starts, to
|  a   |:b     scale, in the colours of the devices that send it. The halo that a device receives with its part of the
+------+::     stage's input is grey.
:::c:::::d
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.boxes import Box
from manyhands.facts.units import format_bytes
from manyhands.observe.figures import MOST_DEVICES, need_plots, new_figure, short_name, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

MOST_PANELS = 12
HANDED = ""
"""The sender of a part of the halo that comes with the stage's input."""
_WIDTH_INCHES = 13.34  # 1600 pixels
_WIDEST_INCHES, _TALLEST_INCHES = 6.37, 6.0
_SIDE_INCHES, _GAP_INCHES = 0.15, 0.3
_LINE_INCHES = 0.155
_CAPTION_POINTS, _LARGEST_POINTS, _EASY_POINTS, _SMALLEST_POINTS = 8.0, 9.0, 6.0, 4.2
_HEADING_POINTS = 10.0
_HATCHED_POINTS = 5.0
"""A halo thinner than this has no room for hatching."""
_HANDED_COLOUR = "#B0B0B0"
_WAYS = ("forward", "backward")
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class GroupMap:
    """A group of layers and the map it starts from (a backward group: its gradients), as boxes of rows and columns."""

    way: str
    """'forward' or 'backward'."""
    number: int
    """Counted from 1."""
    layers: str
    size: tuple[int, ...]
    """Channels, rows and columns of the map, or channels, depth, rows and columns."""
    owned: Mapping[str, Box]
    """Device -> its tile; empty where a map has fewer rows than the grid."""
    halos: Mapping[str, Sequence[tuple[str, Box]]]
    """Device -> (sender, the box around the tile that it sends)."""
    exchanged_bytes: int
    """Bytes exchanged among the devices in a step, before this group."""
    notes: Sequence[str] = field(default_factory=tuple)
    axes: tuple[str, str] = ("row", "column")
    """The directions that are drawn, downwards and across."""


@dataclass(frozen=True)
class _Drawing:
    """The places of a panel's tiles when they are drawn apart."""

    offsets: Mapping[str, tuple[float, float]]
    """Device -> the offset added to its rows and columns."""
    height: float
    width: float


def draw_tiles(groups: Sequence[GroupMap], path: Path, *, title: str) -> Path:
    """Write a PNG. Where there are very many groups, only those that exchange most are drawn, and the title says so."""
    need_plots()
    shown = chosen(groups)
    devices = list(dict.fromkeys(device for group in groups for device in group.owned))
    colours = dict(zip(devices, _palette(len(devices))))
    columns = len(shown) if len(shown) <= 4 else 3 if len(shown) <= 6 else 4
    room = (_WIDTH_INCHES - 2 * _SIDE_INCHES - (columns - 1) * _GAP_INCHES) / columns
    width = min(room, _WIDEST_INCHES)
    full = 2 * _SIDE_INCHES + columns * (width + _GAP_INCHES) - _GAP_INCHES
    counts = {way: sum(group.way == way for group in groups) for way in _WAYS}
    panels = [_Panel(group, counts[group.way], width) for group in shown]
    legend = _legend(shown, {} if all(panel.names_all for panel in panels) else colours)
    legend_columns = min(len(legend), 10 if columns > 2 else 5 if columns > 1 else 3)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heading = _lines(title + _left_out(groups, shown), full, 1.15 * _HEADING_POINTS)
    heights = [
        0.1 + 0.18 * len(heading),
        *(max(p.caption_inches for p in row) + max(p.inches[0] for p in row) + _GAP_INCHES for row in rows),
        0.25 * math.ceil(len(legend) / legend_columns) + 0.1,
    ]
    total = sum(heights)
    figure = new_figure(full, total)
    figure.set_layout_engine("none")  # places are counted here: a text must fit its tile
    figure.text(_SIDE_INCHES / full, 1 - 0.08 / total, "\n".join(heading), fontsize=_HEADING_POINTS, va="top",
                parse_math=False)  # fmt: skip
    top = total - heights[0] - 0.1
    for row, height in zip(rows, heights[1:]):
        drawn_from = top - max(panel.caption_inches for panel in row)
        for place, panel in enumerate(row):
            left = (_SIDE_INCHES + place * (width + _GAP_INCHES)) / full
            _write_caption(figure, panel.caption, left, top, total)
            high, wide = panel.inches
            area = (left, (drawn_from - high) / total, wide / full, high / total)
            panel.draw(figure.add_axes(area), colours)
        top -= height
    figure.legend(handles=legend, loc="lower left", ncols=legend_columns, fontsize=8, frameon=False)
    return write_figure(figure, path)


def chosen(groups: Sequence[GroupMap]) -> list[GroupMap]:
    """Return the groups to draw, in their order: of each way as many as there is room for, those that exchange most."""
    groups_of_way = {way: [group for group in groups if group.way == way] for way in _WAYS}
    forward = min(len(groups_of_way["forward"]), max(MOST_PANELS // 2, MOST_PANELS - len(groups_of_way["backward"])))
    room = {"forward": forward, "backward": MOST_PANELS - forward}
    chosen_ids: set[int] = set()
    for way, groups_here in groups_of_way.items():
        most = sorted(groups_here, key=lambda group: -group.exchanged_bytes)[: room[way]]
        chosen_ids |= {id(group) for group in most}
    return [group for group in groups if id(group) in chosen_ids]


def _left_out(groups: Sequence[GroupMap], shown: Sequence[GroupMap]) -> str:
    """Return the note, for readers who count the panels, that some groups are not shown."""
    if len(shown) == len(groups):
        return ""
    parts = []
    for way in _WAYS:
        total, shown_count = (sum(group.way == way for group in counted) for counted in (groups, shown))
        if shown_count < total:
            parts.append(f"{shown_count} of {total} {way} groups")
    return f"\n({' and '.join(parts)} are shown, those that exchange most; {len(groups) - len(shown)} are left out)"


def _palette(count: int) -> list[str]:
    """Return colours by which neighbours can be told apart; they repeat after forty."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colours = [to_hex(colormaps[name](place)) for name in ("tab20", "tab20b") for first in (0, 1)
             for place in range(first, 20, 2)]  # fmt: skip
    colours = [colour for colour in colours if colour not in ("#7f7f7f", "#c7c7c7")]  # grey: comes with the input
    return [colours[place % len(colours)] for place in range(count)]


def _caption(group: GroupMap, count: int, width_inches: float) -> list[str]:
    """Return the group, its map and what it exchanges, as lines that fit the panel."""
    size = "x".join(map(str, group.size))
    up, across = (max((_reach(group, device, axis) for device in group.halos), default=0) for axis in (0, 1))
    reach = [_counted(length, noun) for length, noun in zip((up, across), group.axes) if length]
    halo = f"halo up to {', '.join(reach)}" if reach else "no halo"
    travels = f"{format_bytes(group.exchanged_bytes)} exchanged" if group.exchanged_bytes else "nothing exchanged"
    subject = "map" if group.way == "forward" else "gradients of"
    return [
        f"{group.way} {group.number} of {count}: {travels}",
        *_lines(group.layers, width_inches, _CAPTION_POINTS),
        *_lines(f"{subject} {size}, {halo}", width_inches, _CAPTION_POINTS),
        *_lines("; ".join(group.notes), width_inches, _CAPTION_POINTS),
    ]


def _lines(text: str, width_inches: float, points: float) -> list[str]:
    """Return a text wrapped into lines that fit."""
    letters = int(width_inches * 72 / (0.5 * points))
    return [line for part in text.splitlines() for line in textwrap.wrap(part, letters)]


def _write_caption(figure: Figure, lines: Sequence[str], left: float, top: float, total: float) -> None:
    """Write the lines, the first in bold. `left` is a fraction of the width; `top` and `total` are inches."""
    figure.text(left, top / total, lines[0], fontsize=_CAPTION_POINTS, va="top", weight="bold", parse_math=False)
    figure.text(left, (top - _LINE_INCHES) / total, "\n".join(lines[1:]), fontsize=_CAPTION_POINTS, va="top",
                color="#333333", linespacing=1.3, parse_math=False)  # fmt: skip


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _reach(group: GroupMap, device: str, axis: int) -> int:
    """Return how far a device's halo extends beyond its tile along an axis."""
    owned = group.owned.get(device)
    if owned is None or owned.is_empty:
        return 0
    low, high = owned.intervals[axis]
    boxes = [box.intervals[axis] for _, box in group.halos[device] if not box.is_empty]
    return max((max(low - start, stop - high, 0) for start, stop in boxes), default=0)


def _apart(group: GroupMap) -> _Drawing:
    """Return offsets that leave room for every halo between the tiles."""
    present = {device: box for device, box in group.owned.items() if not box.is_empty}
    places = [_bands(present, group.halos, axis, group.size[-2:]) for axis in (0, 1)]
    offsets = {
        device: (places[0][0][box.intervals[0]], places[1][0][box.intervals[1]]) for device, box in present.items()
    }
    return _Drawing(offsets, places[0][1], places[1][1])


def _bands(
    owned: Mapping[str, Box], halos: Mapping[str, Sequence[tuple[str, Box]]], axis: int, size: Sequence[int]
) -> tuple[dict[tuple[int, int], float], float]:
    """Return, along one axis, the offset of each row (or column) of tiles, and the room that all of them take."""
    before: dict[tuple[int, int], int] = {}
    after: dict[tuple[int, int], int] = {}
    for device, box in owned.items():
        low, high = band = box.intervals[axis]
        around = [low, high, *(edge for _, halo in halos.get(device, ()) for edge in halo.intervals[axis])]
        before[band] = max(before.get(band, 0), low - min(around))
        after[band] = max(after.get(band, 0), max(around) - high)
    gap = 0.03 * max(size)
    offsets: dict[tuple[int, int], float] = {}
    place = 0.0
    for number, band in enumerate(sorted(before)):
        place += before[band] + (gap if number else 0.0)
        offsets[band] = place - band[0]
        place += band[1] - band[0] + after[band]
    return offsets, max(place, 1.0)


class _Panel:
    """One group, ready to be drawn into a given width."""

    def __init__(self, group: GroupMap, count: int, width_inches: float) -> None:
        self.group, self.drawing = group, _apart(group)
        self.caption = _caption(group, count, width_inches)
        high, wide = self.drawing.height, self.drawing.width
        scale = min(width_inches / wide, _TALLEST_INCHES / high, 1.25 * width_inches / high)
        self.inches = (high * scale, wide * scale)
        self.scale = 72 * scale
        """Points for one row or column."""
        self.labels = {device: _label(device, group.owned[device], self.scale) for device in self.drawing.offsets}
        self.common_points = max(
            _EASY_POINTS, min((label.points for label in self.labels.values() if label), default=0.0)
        )
        """Labels of one size look calmer; only small tiles have smaller ones."""

    @property
    def caption_inches(self) -> float:
        return _LINE_INCHES * len(self.caption) + 0.1

    @property
    def names_all(self) -> bool:
        """Whether every tile has room for its device's name."""
        return all(label is not None and label.has_name for label in self.labels.values())

    def draw(self, axes: Axes, colours: Mapping[str, str]) -> None:
        for device in self.drawing.offsets:
            for source, box in self.group.halos.get(device, ()):
                colour = colours.get(source, _HANDED_COLOUR)
                is_thick = not box.is_empty and min(box.shape) * self.scale >= _HATCHED_POINTS
                pale = 0.8 if source == HANDED else 0.45
                self._add(axes, device, box, _pale(colour, pale), colour, "/////" if is_thick else None)
            owned = self.group.owned[device]
            self._add(axes, device, owned, _pale(colours[device], 0.65), "#222222")
            label = self.labels[device]
            if label is not None:
                down, across = self.drawing.offsets[device]
                (top, bottom), (left, right) = owned.intervals
                points = min(label.points, self.common_points)
                axes.text((left + right) / 2 + across, (top + bottom) / 2 + down, label.text, fontsize=points,
                          rotation=label.angle, ha="center", va="center", linespacing=1.15, color="#111111",
                          parse_math=False)  # fmt: skip
        axes.set_xlim(0, self.drawing.width)
        axes.set_ylim(self.drawing.height, 0)  # the first row on top
        axes.axis("off")

    def _add(self, axes: Axes, device: str, box: Box, fill: Colour, edge: str, hatch: str | None = None) -> None:
        from matplotlib.patches import Rectangle

        if not box.is_empty:
            (top, _), (left, _) = box.intervals
            down, across = self.drawing.offsets[device]
            high, wide = box.shape
            axes.add_patch(Rectangle((left + across, top + down), wide, high, facecolor=fill, edgecolor=edge,
                                     hatch=hatch, linewidth=0.6, clip_on=False))  # fmt: skip


@dataclass(frozen=True)
class _Label:
    text: str
    points: float
    angle: int
    has_name: bool


def _label(device: str, tile: Box, scale: float) -> _Label | None:
    """Return name and size, as large as the tile allows and rotated where it is narrow; only one of them, or None,
    where there is no room."""
    high, wide = (extent * scale for extent in tile.shape)
    name, size = short_name(device), "x".join(map(str, tile.shape))
    for ways in ([[name, size], [f"{name}  {size}"]], [[name]], [[size]]):
        labels = []
        for lines in ways:
            flat, steep = _points(lines, wide, high), _points(lines, high, wide)
            points, angle = (flat, 0) if flat >= min(steep, _EASY_POINTS) else (steep, 90)
            labels.append(_Label("\n".join(lines), points, angle, lines != [size]))
        best = max(labels, key=lambda label: min(label.points, _EASY_POINTS))  # the first of equals
        if best.points >= _SMALLEST_POINTS:
            return best
    return None


def _points(lines: Sequence[str], wide: float, high: float) -> float:
    """Return the largest font size with which the lines fit into so many points."""
    longest = max(map(len, lines))
    return min(_LARGEST_POINTS, 0.92 * wide / (0.65 * longest), 0.9 * high / (1.2 * len(lines)))


def _pale(colour: str, part: float) -> Colour:
    """Return a colour mixed with white; `part` is the share of white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (value + (1 - value) * part for value in to_rgb(colour))
    return (red, green, blue)


def _legend(shown: Sequence[GroupMap], named: Mapping[str, str]) -> list[Patch]:
    """Return the meaning of the patterns, and the devices' colours where not every tile bears its name."""
    from matplotlib.patches import Patch

    senders = {source for group in shown for halo in group.halos.values() for source, _ in halo}
    patches = [Patch(facecolor="#EDEDED", edgecolor="#222222", label="own tile")]
    if senders - {HANDED}:
        patches.append(
            Patch(facecolor="#FFFFFF", edgecolor="#555555", hatch="/////", label="halo, in the sender's colour")
        )
    if HANDED in senders:
        pale = _pale(_HANDED_COLOUR, 0.8)
        patches.append(
            Patch(facecolor=pale, edgecolor=_HANDED_COLOUR, hatch="/////", label="halo, comes with the input")
        )
    patches += [
        Patch(facecolor=_pale(colour, 0.65), edgecolor="#222222", label=short_name(device))
        for device, colour in list(named.items())[:MOST_DEVICES]
    ]
    return patches

"""A plan as lines of letters for a terminal: devices down, layers across. The kind of sharing shows without colour."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import layer_range
from manyhands.observe.plan_rows import By, PlanRow, layer_edges, plan_rows

FILLS: dict[By, str] = {"all": "█", "samples": "▒", "tiles": "▚", "channels": "░"}
PLAIN_FILLS: dict[By, str] = {"all": "#", "samples": "=", "tiles": "+", "channels": "~"}
MEANINGS: dict[By, str] = {
    "all": "all of it",
    "samples": "some samples",
    "tiles": "a tile",
    "channels": "some channels",
}
NOTHING, PLAIN_NOTHING = "·", "."
LEAST_WIDTH, MOST_WIDTH = 20, 120


def can_draw(encoding: str | None) -> bool:
    """Return whether an output can encode the blocks; letters serve where it cannot."""
    try:
        "".join([*FILLS.values(), NOTHING]).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plan_lines(plan: Plan, network: Network, names: Sequence[str], *, width: int, plain: bool = False) -> list[str]:
    """Return the picture, `width` letters wide. `names`: all devices of the cluster."""
    rows = plan_rows(plan, names)
    column = max(len("layer"), *(len(row.name) for row in rows)) + 2
    room = min(max(width - column, LEAST_WIDTH), MOST_WIDTH)
    edges = _letters(layer_edges(network), room)
    fills, nothing = (PLAIN_FILLS, PLAIN_NOTHING) if plain else (FILLS, NOTHING)
    starts = [layer_range(stage)[0] for stage in plan.stages]
    lines = []
    if len(starts) > 1:
        lines.append(" " * column + _ruler([(edges[start], f"stage {i}") for i, start in enumerate(starts)], room))
    numbers = [(edges[layer], str(layer)) for layer in range(len(network.layers))]
    first = {edges[start] for start in starts}
    lines.append("layer".ljust(column) + _ruler(numbers, room, first))
    lines += [row.name.ljust(column) + _drawn(row, edges, fills, nothing) for row in rows]
    used = list(dict.fromkeys(block.by for row in rows for block in row.blocks))
    legend = [f"{fills[by]} {MEANINGS[by]}" for by in used] + [f"{nothing} nothing"] * any(
        edges[-1] > sum(edges[b.last] - edges[b.first] for b in row.blocks) for row in rows
    )
    lines.append(" " * column + "   ".join([*legend, "(layers as wide as they have work)"]))
    return [line.rstrip() for line in lines]


def _letters(edges: Sequence[float], room: int) -> list[int]:
    """Return edges in whole letters: no layer without one while there are enough."""
    count = len(edges) - 1
    places = [round(edge * room) for edge in edges]
    if count <= room:
        for layer in range(1, count + 1):
            places[layer] = max(places[layer], places[layer - 1] + 1)
        places[count] = room
        for layer in range(count, 0, -1):
            places[layer - 1] = min(places[layer - 1], places[layer] - 1)
    return places


def _ruler(marks: Sequence[tuple[int, str]], room: int, first: set[int] | None = None) -> str:
    """Return words at their places: those at `first` places, then the others that fit."""
    line = [" "] * room
    for place, word in sorted(marks, key=lambda mark: (mark[0] not in (first or ()), mark[0])):
        before, after = max(0, place - 1), place + len(word) + 1
        if after <= room + 1 and not "".join(line[before:after]).strip():
            line[place : place + len(word)] = word
    return "".join(line)


def _drawn(row: PlanRow, edges: Sequence[int], fills: dict[By, str], nothing: str) -> str:
    line = [nothing] * edges[-1]
    for block in row.blocks:
        start, end = edges[block.first], edges[block.last]
        line[start:end] = fills[block.by] * (end - start)
        for text in (f" {block.label} ", f" {block.short} ", block.short):
            if len(text) + 2 <= end - start:
                middle = start + (end - start - len(text)) // 2
                line[middle : middle + len(text)] = text
                break
    return "".join(line)

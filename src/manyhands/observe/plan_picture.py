"""A picture of a plan: devices down, layers across, each block a device's part of a stage. Beside it, what each device
computes and holds; above it, what layers hand on and the size of their weights, which is why some are best shared by
tiles and some by samples."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import layer_range
from manyhands.facts.units import format_bytes
from manyhands.observe.figures import MOST_DEVICES, new_figure, write_figure
from manyhands.observe.plan_rows import Block, PlanRow, layer_edges, plan_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGE_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#E45756", "#2F8F8B", "#9D755D", "#C9A20B")
_HANDED_ON, _WEIGHTS = "#72B7B2", "#D67195"
_INK, _GREY, _PALE_GREY = "#222222", "#666666", "#EFEFEF"
_NEARLY_FULL = 0.9
_WIDTH, _NAMES, _BARS, _SIDE = 13.34, 1.45, 1.62, 0.2
_ROW, _STRIP, _HEAD, _FOOT = 0.42, 0.85, 0.62, 0.62
_PAD = 0.12
"""The margin above and below a block, as a fraction of a row's height."""
_MOST_BARS = 60
_TITLE_LETTERS, _NOTE_LETTERS = 135, 180


@dataclass(frozen=True)
class DeviceLoad:
    """The load of a device in a step."""

    busy_part: float
    peak_bytes: float
    memory_bytes: float


def draw_plan(
    plan: Plan, network: Network, names: Sequence[str], loads: Mapping[str, DeviceLoad], path: Path, *, title: str,
    notes: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write a PNG. Where there are many devices, those that do the same share a row; `notes` go below."""
    rows = plan_rows(plan, names)[:MOST_DEVICES]
    left_out = len(plan_rows(plan, names)) - len(rows)
    remarks = [*notes, *([f"{left_out} more rows of devices are not drawn."] if left_out > 0 else [])]
    heading = textwrap.wrap(title, _TITLE_LETTERS)
    below = [line for note in remarks for line in textwrap.wrap(note, _NOTE_LETTERS)]
    head, foot = _HEAD + 0.2 * (len(heading) - 1), _FOOT + 0.2 * len(below)
    height = head + _STRIP + 0.45 + _ROW * len(rows) + foot
    figure = new_figure(_WIDTH, height)
    figure.set_layout_engine("none")
    figure.text(_SIDE / _WIDTH, 1 - 0.14 / height, "\n".join(heading), fontsize=11.5, weight="bold", va="top",
                color=_INK, parse_math=False)  # fmt: skip
    wide = _WIDTH - 2 * _SIDE - _NAMES - 2 * (_BARS + 0.2)
    across, bottom = (_SIDE + _NAMES) / _WIDTH, foot / height
    strip = figure.add_axes((across, bottom + (_ROW * len(rows) + 0.45) / height, wide / _WIDTH, _STRIP / height))
    main = figure.add_axes((across, bottom, wide / _WIDTH, _ROW * len(rows) / height))
    edges = layer_edges(network)
    _draw_strip(strip, network, plan, edges)
    _draw_rows(main, rows, plan, edges, wide)
    for number, quantity in enumerate(("computing", "memory")):
        left = (_SIDE + _NAMES + wide + 0.2 + number * (_BARS + 0.2)) / _WIDTH
        bars = figure.add_axes((left, bottom, _BARS / _WIDTH, _ROW * len(rows) / height))
        _draw_bars(bars, rows, loads, quantity)
    _draw_legend(figure, rows, foot, height)
    if below:
        figure.text(_SIDE / _WIDTH, 0.12 / height, "\n".join(below), fontsize=9.5, va="bottom", color=_INK,
                    linespacing=1.35, parse_math=False)  # fmt: skip
    return write_figure(figure, path)


def _colour(stage: int) -> str:
    return STAGE_COLOURS[stage % len(STAGE_COLOURS)]


def _pale(colour: str, part: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (value + (1 - value) * part for value in to_rgb(colour))
    return (red, green, blue)


def _draw_strip(axes: Axes, network: Network, plan: Plan, edges: Sequence[float]) -> None:
    """Draw what each layer hands on for a batch, and the size of its weights, to one scale."""
    handed = [float(layer.output_bytes * plan.step_size) for layer in network.layers]
    weights = [float(layer.parameter_bytes) for layer in network.layers]
    most = max([*handed, *weights, 1.0])
    if len(edges) > _MOST_BARS:  # too thin for two bars each
        for values, colour in ((handed, _HANDED_ON), (weights, _WEIGHTS)):
            axes.stairs([value / most for value in values], edges, fill=True, color=colour, alpha=0.75, linewidth=0)
    else:
        widths, gap = [after - before for before, after in zip(edges, edges[1:])], 0.12
        for values, offset, colour in ((handed, gap, _HANDED_ON), (weights, 0.5, _WEIGHTS)):
            places = [edge + offset * width for edge, width in zip(edges, widths)]
            bars = [(0.5 - gap) * width for width in widths]
            axes.bar(places, [value / most for value in values], bars, align="edge", color=colour, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xticks([])
    axes.set_yticks([0, 1], ["0", format_bytes(most)], fontsize=7.5, color=_GREY)
    axes.tick_params(length=2, color=_GREY)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")
    axes.text(0.0, 1.1, f"handed on for {plan.step_size} sample{'s' * (plan.step_size != 1)}", color="#3E8A85",
              fontsize=8.5, va="bottom", transform=axes.transAxes)  # fmt: skip
    axes.text(0.26, 1.1, "weights", color="#B5476F", fontsize=8.5, va="bottom", transform=axes.transAxes)
    axes.text(1.0, 1.1, "layers, as wide as they have work", color=_GREY, fontsize=8, ha="right", va="bottom",
              transform=axes.transAxes)  # fmt: skip


def _draw_rows(axes: Axes, rows: Sequence[PlanRow], plan: Plan, edges: Sequence[float], wide: float) -> None:
    from matplotlib.patches import Rectangle

    count = len(rows)
    for number, row in enumerate(rows):
        top = count - 1 - number
        axes.add_patch(Rectangle((0, top + _PAD), 1, 1 - 2 * _PAD, facecolor=_PALE_GREY, linewidth=0))
        for block in row.blocks:
            _draw_block(axes, block, edges[block.first], edges[block.last], top, wide)
        ink = _INK if row.blocks else _GREY
        axes.text(-0.012, top + 0.5, row.name, ha="right", va="center", fontsize=9.5, color=ink, parse_math=False)
        if not row.blocks:
            axes.text(0.5, top + 0.5, "not used", ha="center", va="center", fontsize=8.5, color=_GREY)
    for number, stage in enumerate(plan.stages):
        first, last = layer_range(stage)
        if first:
            axes.plot([edges[first]] * 2, [0, count + 0.55], color="#999999", linewidth=0.9, linestyle=(0, (3, 2)),
                      clip_on=False, zorder=0.5)  # fmt: skip
        names = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
        room = (edges[last] - edges[first]) * wide * 72 / (0.6 * 9) - 1
        for text in (f"stage {number}: {names}", f"stage {number}", str(number)):
            if len(text) <= room:
                middle = (edges[first] + edges[last]) / 2
                axes.text(middle, count + 0.18, text, ha="center", va="bottom", fontsize=9, weight="bold",
                          color=_colour(number))  # fmt: skip
                break
    axes.set_xlim(0, 1)
    axes.set_ylim(0, count)
    axes.axis("off")


def _draw_block(axes: Axes, block: Block, left: float, right: float, top: float, wide: float) -> None:
    """Fill the block if the device computes the whole stage; else draw a sign that shows which part."""
    from matplotlib.patches import Rectangle

    colour, low, high = _colour(block.stage), top + _PAD, 1 - 2 * _PAD
    is_all = block.by == "all"
    hatch = {"tiles": "....", "samples": "---", "channels": "|||"}.get(block.by)
    face, lines = (colour, colour) if is_all else (_pale(colour, 0.75), _pale(colour, 0.55))
    axes.add_patch(
        Rectangle((left, low), right - left, high, facecolor=face, edgecolor=lines, hatch=hatch, linewidth=0)
    )
    axes.add_patch(Rectangle((left, low), right - left, high, facecolor="none", edgecolor=colour, linewidth=1.1))
    room = (right - left) * wide * 72
    sign = 0.0
    if not is_all and not block.is_each and room > 34:
        side = high * _ROW * 0.72 / wide  # as wide as it is high
        sign = side * wide * 72 + 6
        _draw_sign(axes, block, left + 4 / (wide * 72), low + high * 0.14, side, high * 0.72)
    for text in (block.label, block.short):
        if len(text) * 0.53 * 8.5 + sign + 8 <= room:
            middle = left + (right - left) / 2 + sign / (2 * wide * 72)
            box = None if is_all else {"facecolor": "white", "edgecolor": "none", "pad": 1.6, "alpha": 0.9}
            axes.text(middle, top + 0.49, text, ha="center", va="center", fontsize=8.5,
                      color="white" if is_all else _INK, weight="bold" if is_all else "normal", bbox=box)  # fmt: skip
            break


def _draw_sign(axes: Axes, block: Block, left: float, low: float, wide: float, high: float) -> None:
    """Draw a small map: the device's tile of the grid, or its samples of the micro-batch."""
    from matplotlib.patches import Rectangle

    colour = _colour(block.stage)
    axes.add_patch(Rectangle((left, low), wide, high, facecolor="white", edgecolor=colour, linewidth=0.8, zorder=3))
    rows, columns = sum(block.rows), sum(block.columns)
    row, column = block.cell
    if block.by == "tiles":
        y = low + high * (1 - sum(block.rows[: row + 1]) / rows)
        x = left + wide * sum(block.columns[:column]) / columns
        size = (wide * block.columns[column] / columns, high * block.rows[row] / rows)
    elif block.by == "samples":
        x, y, size = left, low + high * (1 - block.begin - block.part), (wide, high * block.part)
    else:
        x, y, size = left + wide * block.begin, low, (wide * block.part, high)
    axes.add_patch(Rectangle((x, y), *size, facecolor=colour, linewidth=0, zorder=4))
    if block.by == "tiles":
        for inner in range(1, len(block.rows)):
            at = low + high * (1 - sum(block.rows[:inner]) / rows)
            axes.plot([left, left + wide], [at, at], color=colour, linewidth=0.5, zorder=5)
        for inner in range(1, len(block.columns)):
            at = left + wide * sum(block.columns[:inner]) / columns
            axes.plot([at, at], [low, low + high], color=colour, linewidth=0.5, zorder=5)


def _draw_bars(axes: Axes, rows: Sequence[PlanRow], loads: Mapping[str, DeviceLoad], quantity: str) -> None:
    """Draw the part of the step in which devices compute, or the part of their memory that they need."""
    from matplotlib.patches import Rectangle

    count = len(rows)
    axes.text(0, count + 0.18, "computes" if quantity == "computing" else "holds at most", fontsize=9, weight="bold",
              color=_INK, va="bottom")  # fmt: skip
    for number, row in enumerate(rows):
        row_loads = [loads[name] for name in row.devices if name in loads]
        if not row_loads or not row.blocks:
            continue
        low, high = count - 1 - number + 0.2, 0.6
        if quantity == "computing":
            part = max(load.busy_part for load in row_loads)
            text, colour = f"{part:.0%} of the step", "#9FB8D3"
        else:
            fullest = max(row_loads, key=lambda load: load.peak_bytes / load.memory_bytes)
            part = fullest.peak_bytes / fullest.memory_bytes
            text = f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)}"
            colour = "#E9A79F" if part >= _NEARLY_FULL else "#B7D3B0"
        axes.add_patch(Rectangle((0, low), 1, high, facecolor=_PALE_GREY, linewidth=0))
        axes.add_patch(Rectangle((0, low), min(part, 1.0), high, facecolor=colour, linewidth=0))
        axes.text(0.5, low + high / 2 - 0.01, text, ha="center", va="center", fontsize=8.5, color=_INK)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, count)
    axes.axis("off")


def _draw_legend(figure: Figure, rows: Sequence[PlanRow], foot: float, height: float) -> None:
    from matplotlib.patches import Patch

    kinds = {block.by for row in rows for block in row.blocks}
    meanings = {
        "all": Patch(facecolor="#888888", label="all of the stage"),
        "tiles": Patch(facecolor="#DDDDDD", edgecolor="#AAAAAA", hatch="....", label="a tile of every feature map"),
        "samples": Patch(facecolor="#DDDDDD", edgecolor="#AAAAAA", hatch="---", label="some samples"),
        "channels": Patch(facecolor="#DDDDDD", edgecolor="#AAAAAA", hatch="|||", label="some channels"),
    }
    handles = [patch for by, patch in meanings.items() if by in kinds]
    figure.legend(handles=handles, loc="upper left", ncols=len(handles), fontsize=8.5, frameon=False,
                  bbox_to_anchor=((_SIDE + _NAMES) / _WIDTH - 0.006, (foot - 0.02) / height))  # fmt: skip

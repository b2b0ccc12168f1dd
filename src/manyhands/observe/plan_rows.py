"""A plan as rows of blocks, which device holds which part of which layers: the data that a plan's pictures are drawn
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import layer_range
from manyhands.observe.figures import short_name

By = Literal["all", "samples", "tiles", "channels"]
MOST_ROWS = 16
"""The most rows with a device each: where there are more devices, those that do the same share a row."""
_THINNEST = 0.3
"""The width of a layer with next to no work, as a fraction of the average."""


@dataclass(frozen=True)
class Block:
    """A device's part of a stage."""

    stage: int
    first: int
    last: int
    """Layers [first, last)."""
    by: By
    begin: float
    """For samples and channels, the total part of the devices before it in the stage."""
    part: float
    label: str
    short: str
    cell: tuple[int, int] = (0, 0)
    rows: tuple[float, ...] = (1.0,)
    columns: tuple[float, ...] = (1.0,)
    """For tiles, the grid's relative heights and widths; `cell` is the device's place in it. A depth is in `grid` only,
    the number of tiles in each direction."""
    grid: str = ""
    is_each: bool = False
    """Whether it stands for several devices that are alike."""


@dataclass(frozen=True)
class PlanRow:
    """One device, or several that do the same."""

    devices: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        if len(self.devices) == 1:
            return short_name(self.devices[0])
        if not self.blocks:
            return f"{len(self.devices)} not used"
        return f"{short_name(self.devices[0])} and {len(self.devices) - 1} more"


def plan_rows(plan: Plan, names: Sequence[str], most: int = MOST_ROWS) -> list[PlanRow]:
    """Return the plan's devices in its order, then those that it leaves out."""
    blocks: dict[str, list[Block]] = {name: [] for name in plan.devices}
    for number, stage in enumerate(plan.stages):
        for place, device in enumerate(stage.devices):
            blocks[device].append(_block(number, stage, place))
    rows = [PlanRow((name,), tuple(row_blocks)) for name, row_blocks in blocks.items()]
    unused = tuple(name for name in names if name not in blocks)
    together = [PlanRow((name,), ()) for name in unused] if len(unused) <= 3 else [PlanRow(unused, ())]
    if len(rows) + len(together) > most:
        rows = [_merged(list(group)) for _, group in groupby(rows, key=_alike)]
    return [*rows, *together]


def _alike(row: PlanRow) -> object:
    """Return the key that devices of one row have in common: the stages, and how much of them."""
    return [(block.stage, block.by, round(block.part, 2)) for block in row.blocks]


def _merged(rows: Sequence[PlanRow]) -> PlanRow:
    if len(rows) == 1:
        return rows[0]
    blocks = tuple(
        replace(block, label=_each(block), short=f"{block.part:.0%}", is_each=True) for block in rows[0].blocks
    )
    return PlanRow(tuple(name for row in rows for name in row.devices), blocks)


def _each(block: Block) -> str:
    if block.by == "tiles":
        return f"a tile of {block.grid} each, {block.part:.0%}"
    return f"{block.label} each"


def _block(number: int, stage: Stage, place: int) -> Block:
    first, last = layer_range(stage)
    share = stage.share
    if isinstance(share, ByTiles):
        cell, part = share.cell(place), share.part(place)
        where = ",".join(map(str, cell))
        return Block(
            number, first, last, "tiles", 0.0, part, f"tile {where} of {share.grid_text}, {part:.0%}", where,
            (cell[-2], cell[-1]), tuple(share.rows), tuple(share.columns), share.grid_text,
        )  # fmt: skip
    if isinstance(share, (BySamples, ByChannels)):
        counts = share.samples if isinstance(share, BySamples) else share.groups
        total, device_count = sum(counts), counts[place]
        begin, part = sum(counts[:place]) / total, device_count / total
        by: By = "samples" if isinstance(share, BySamples) else "channels"
        label = f"{device_count} of {total} samples" if by == "samples" else f"{part:.0%} of the channels"
        return Block(
            number, first, last, by, begin, part, label, f"{device_count}/{total}" if total < 100 else f"{part:.0%}"
        )
    if len(stage.devices) > 1:  # a way of sharing of others, drawn as equal parts
        part = 1 / len(stage.devices)
        return Block(number, first, last, "samples", place * part, part, share.text(place), f"{part:.0%}")
    return Block(number, first, last, "all", 0.0, 1.0, "all", "all")


def layer_edges(network: Network) -> list[float]:
    """Return where layers begin, and where the last ends, from 0 to 1: as wide as their work, none invisibly thin."""
    work = [float(layer.macs) for layer in network.layers]
    total, thinnest = sum(work), _THINNEST / len(work)
    widths = [max(layer_work / total, thinnest) if total else 1.0 for layer_work in work]
    edges = [0.0]
    for width in widths:
        edges.append(edges[-1] + width)
    return [edge / edges[-1] for edge in edges]

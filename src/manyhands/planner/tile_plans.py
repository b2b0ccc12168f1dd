"""Plans of tiles: grids in proportion to speed, groups by their prices, the best few simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import msgspec

from manyhands.facts.boxes import cut_points
from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.planner.task import Grid, Price, Task, Weights
from manyhands.planner.tiles import ExchangeGroups, TilePrices, with_groups
from manyhands.schedule.tileable import tileable_layers

SIMULATED_UP_TO = 1.3
"""Groupings whose price is within this of the least are simulated."""
MANY_TILES = 12
MOST_OF_MANY = 2
"""With more tiles than this a simulation takes long: fewer groupings are simulated, and no interior first."""


def tile_stages(task: Task, grid: Grid, sizes: Sequence[Weights] = (None, None, None)) -> Plan:
    """Return a grid of tiles over every device, up to global pooling; the tail, if there is one, on the fastest of
    them.

    Their `sizes` along depth, rows and columns are in proportion to speed, unless given; boundary data is exchanged at
    every layer.
    """
    network, names = task.network, task.cluster.names
    if prod(grid) != len(names):
        raise BadPlan(
            f"A grid of {'x'.join(map(str, grid))} has {prod(grid)} tiles; cluster {task.cluster.name} has "
            f"{len(names)} tile slots.",
            hint="Give as many tiles as there are devices (times their slots).",
        )
    if len(names) < 2:
        raise BadPlan(f"Tiles need at least two devices; cluster {task.cluster.name} has {len(names)}.")
    last, obstacle = tileable_layers(network)
    if not last:
        why = f" (operator {obstacle.name}, {obstacle.target})" if obstacle is not None else ""
        raise BadPlan(
            f"{network.name} cannot be tiled: layer {network.layers[0].name} does not make maps with rows and "
            f"columns{why}.",
            hint="Share it by samples, or as a pipeline: strategy 'samples' (--share samples), or 'pipeline'.",
        )
    speeds = [1.0 / task.step_seconds(name, task.batch_size) for name in names]
    extents = image_extents(network)
    if len(grid) > len(extents):
        raise BadPlan(
            f"A grid of {'x'.join(map(str, grid))} cuts the depth of maps; those of {network.name} have rows and "
            "columns only.",
            hint="Give rows x columns, like 2x2.",
        )
    made = zip(tile_sizes(grid, speeds, extents[-len(grid) :]), sizes[-len(grid) :], strict=True)
    stages = [Stage((0, last), names, share_of([even if given is None else given for even, given in made]))]
    if last < len(network.layers):
        stages.append(Stage((last, len(network.layers)), (task.fastest(),)))
    plan = task.plan(stages, task.micro_batches or 1)
    return plan if plan.may_repeat_devices or len(stages) == 1 else msgspec.structs.replace(plan, order="sequential")


def image_extents(network: Network) -> tuple[int, ...]:
    """Return the extents of the first map that is read: rows and columns, or depth, rows and columns."""
    image = network.first_map(0)
    return () if image is None else network.extents(image.name)


def tile_sizes(grid: Grid, speeds: Sequence[float], extents: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the relative sizes of a grid's tiles in each direction, in proportion to the speeds of their devices."""
    cells = list(product(*map(range, grid)))
    return [
        tile_shares(
            [sum(speed for speed, cell in zip(speeds, cells) if cell[axis] == line) for line in range(count)], extent
        )
        for axis, (count, extent) in enumerate(zip(grid, extents, strict=True))
    ]


def share_of(sizes: Sequence[tuple[float, ...]]) -> ByTiles:
    """Return the share with tiles of these relative sizes: of rows and columns, or of depths, rows and columns."""
    *depths, rows, columns = sizes
    return ByTiles(rows, columns, depths=depths[0] if depths and len(depths[0]) > 1 else ())


def tile_shares(speeds: list[float], extent: int) -> tuple[float, ...]:
    """Return relative sizes; devices that differ by noise only are equal, and every tile gets a row."""
    shares = tuple(1 if max(speeds) < 1.02 * speed else round(speed / max(speeds), 3) for speed in speeds)
    least = max(shares) / extent
    if min(shares) < 2 * least:
        shares = tuple(max(share, 2 * least) for share in shares)
    spare = extent - len(shares)
    if spare >= 0 and any(a == b for a, b in pairwise(cut_points(extent, shares))):  # a row each, the rest shared out
        shares = tuple(1 + spare * share / sum(shares) for share in shares)
    return shares


def grids(count: int, directions: int = 2) -> list[Grid]:
    """Return the grids of so many tiles in two or three directions, those first that cut the first direction most: what
    lies along the others is contiguous in memory."""
    if directions == 1:
        return [(count,)]
    return [
        (first, *others)
        for first in range(count, 0, -1) if count % first == 0
        for others in grids(count // first, directions - 1)
    ]  # fmt: skip


def cuts_longer_sides(grid: Grid, extents: Sequence[int]) -> bool:
    """Return whether a grid may be the best of its number of tiles: it cuts no side of a map more often than a longer
    one."""
    sides = list(zip(grid, extents, strict=True))
    return all(
        (count - other_count) * (extent - other) >= 0 and (extent != other or count >= other_count)
        for place, (count, extent) in enumerate(sides)
        for other_count, other in sides[place + 1 :]
    )


def gridded(task: Task) -> Plan:
    """Return tiles over all devices, in the cheapest grid by the tiles' own prices, unless the task fixes it."""
    options = task.tiles
    if options.grid is not None:
        return resolve(tile_stages(task, options.grid, options.sizes), task.network, task.cluster)
    ranked = []
    refusal: BadPlan | None = None
    for grid in grids(len(task.cluster.names), max(2, len(image_extents(task.network)))):
        try:
            plan = resolve(tile_stages(task, grid), task.network, task.cluster)
        except BadPlan as error:  # too many rows, or columns, for the map
            refusal = error
            continue
        ranked.append((TilePrices(plan, 0, task.network, task.cluster, task.profile).every_layer().seconds, plan))
    if not ranked:
        assert refusal is not None
        raise refusal
    return min(ranked, key=lambda entry: entry[0])[1]


def tiles(task: Task, price: Price) -> Plan:
    """Return the fastest grid and groups: searched by the tiles' own prices, then simulated."""
    plan = gridded(task)
    if task.tiles.is_grouped:
        groups = ExchangeGroups("given", task.tiles.forward_groups, task.tiles.backward_groups)
        return resolve(with_groups(plan, 0, groups), task.network, task.cluster)
    return with_best_groups(plan, 0, task, price)[0]


def with_best_groups(plan: Plan, stage: int, task: Task, price: Price) -> tuple[Plan, float]:
    """Return a plan and its price: its tiled stage exchanges boundary data where that is fastest, and computes inside
    its tiles first where that pays."""
    _, best, seconds = fastest_groups(plan, task, price, stage)[0]
    if len(plan.stages[stage].devices) > MANY_TILES:
        return best, seconds
    early = TilePrices(best, stage, task.network, task.cluster, task.profile).interior_first()
    if not early:
        return best, seconds
    share = best.stages[stage].share
    assert isinstance(share, ByTiles)
    changed = msgspec.structs.replace(best.stages[stage], share=msgspec.structs.replace(share, interior_first=early))
    stages = (*best.stages[:stage], changed, *best.stages[stage + 1 :])
    hidden = resolve(msgspec.structs.replace(best, stages=stages), task.network, task.cluster)
    hidden_seconds = price(hidden)
    return (hidden, hidden_seconds) if hidden_seconds < seconds else (best, seconds)


def fastest_groups(plan: Plan, task: Task, price: Price, stage: int = 0) -> list[tuple[ExchangeGroups, Plan, float]]:
    """Return a plan with each grouping of a tiled stage that is worth a simulation, the fastest first; ties go to fewer
    groups."""
    groupings = TilePrices(plan, stage, task.network, task.cluster, task.profile).groupings()
    least = min(groups.seconds for groups in groupings)
    tried: dict[tuple[object, object], tuple[ExchangeGroups, Plan, float]] = {}
    refusal: OutOfMemory | None = None
    for groups in sorted(groupings, key=lambda grouping: (grouping.seconds, grouping.count)):
        key = (groups.forward, groups.backward)
        if key in tried or (groups.seconds > SIMULATED_UP_TO * least and tried):
            continue
        if len(tried) == MOST_OF_MANY and len(plan.stages[stage].devices) > MANY_TILES:
            break
        grouped = with_groups(plan, stage, groups)
        try:
            tried[key] = (groups, grouped, price(grouped))
        except OutOfMemory as error:
            refusal = error
    if not tried:
        assert refusal is not None
        raise refusal
    return sorted(tried.values(), key=lambda entry: (entry[2], entry[0].count))

"""Tiles as a user writes them: grids, groups and costs, and `mh.tile_plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from manyhands.facts.boxes import cut_points
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, BadValue, OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.grouping import Costs, TileGroups, group_tiles, kernel_layers, plan_groups
from manyhands.planner.task import TileOptions
from manyhands.planner.tiles import TilePrices, with_groups
from manyhands.plans.planning import plan
from manyhands.plans.simulating import cluster_of, network_of, simulate

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph


def tile_plan(
    graph: Graph | Network | str,
    cluster: Cluster | str | Path,
    grid: tuple[int, ...],
    rows: Sequence[float] | None = None,
    columns: Sequence[float] | None = None,
    forward_groups: Sequence[LayerName] | None = None,
    backward_groups: Sequence[LayerName] | None = None,
    *,
    depths: Sequence[float] | None = None,
    batch_size: int = 1,
    reduce: Literal["allreduce", "gateway"] = "allreduce",
) -> Plan:
    """Return a plan of `grid` = (rows, columns) tiles over all devices of a cluster, row by row. For volumes and video,
    maps of (sample, channel, depth, row, column), `grid` may be (depths, rows, columns).

    What cannot be tiled follows on the fastest of them. A plan of tiles fits any batch size.

    rows, columns     relative heights and widths; None: in proportion to the devices' speed; `depths` likewise
    forward_groups    layers, by number or name, or operators by name, at which boundary data is exchanged; the first
                      must be the first layer. None: before every operator that reads beyond its own tile
    backward_groups   the same for gradients; None: the adjoint of forward
    reduce            how weight gradients are added up: by all, or by a gateway, the first device
    """
    network = network_of(graph)
    machines = cluster_of(cluster)
    options = TileOptions(
        _grid(grid), _weights("rows", rows, grid[-2]), _weights("columns", columns, grid[-1]),
        None if forward_groups is None else tuple(forward_groups),
        None if backward_groups is None else tuple(backward_groups), is_grouped=True,
        depths=_weights("depths", depths, grid[0] if len(grid) == 3 else 1),
    )  # fmt: skip
    made = plan(network, machines, batch_size=batch_size, strategy="tiles", tiles=options).plan
    stages = (msgspec.structs.replace(made.stages[0], reduce=reduce), *made.stages[1:])
    return resolve(msgspec.structs.replace(made, stages=stages), network, machines)


def _grid(grid: tuple[int, ...]) -> tuple[int, ...]:
    if len(grid) not in (2, 3) or not all(isinstance(n, int) and n >= 1 for n in grid):
        raise BadValue(
            f"grid is {grid!r}; it must be two whole numbers of at least 1: (rows, columns), or three: (depths, rows, "
            "columns)."
        )
    return tuple(grid)


def _weights(name: str, weights: Sequence[float] | None, count: int) -> tuple[float, ...] | None:
    if weights is not None and len(weights) != count:
        numbers = "1 number" if len(weights) == 1 else f"{len(weights)} numbers"
        raise BadPlan(f"{name} has {numbers}; the grid has {count} {name.removeprefix('--')}.")
    return None if weights is None else tuple(weights)


def parse_grid(text: str) -> tuple[int, ...]:
    """Parse a grid: '3x2' -> (3, 2), three rows of two tiles; '2x3x2' -> two such layers, one behind the other."""
    match = re.fullmatch(r"[0-9]{1,6}([xX][0-9]{1,6}){1,2}", text.strip())
    grid = tuple(int(part) for part in re.split("[xX]", text.strip())) if match else (0, 0)
    if min(grid) < 1:
        raise BadValue(
            f"--grid '{text}' is not a grid of tiles.",
            hint="Write it like 3x2 (rows x columns), both at least 1; of volumes and video also like 2x3x2 (depths x "
            "rows x columns).",
        )
    return grid


def parse_costs(text: str) -> Costs:
    """Parse costs: '0,1,0' -> what a multiply-accumulate, a boundary element and an exchange cost."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(number >= 0 for number in numbers):
        raise BadValue(
            f"--costs '{text}' is not three numbers, each at least 0.",
            hint="Write the costs of a multiply-accumulate, a boundary element and an exchange, like 0.1,2,0.",
        )
    return Costs(*numbers)


def parse_tile_costs(
    strategy: str, grid: str | None, costs: str, beside: Mapping[str, object]
) -> tuple[tuple[int, int], Costs]:
    """Return the grid and the costs that a user typed; `beside` holds options that make a plan, which is not done
    here."""
    prices = parse_costs(costs)
    if strategy != "tiles" or grid is None:
        options = f"--share {strategy} and " + ("no --grid" if grid is None else f"--grid {grid}")
        raise BadValue(
            f"--costs {costs} prices the tiles of a grid, but was given with {options}.",
            hint="Write it like --share tiles --grid 3x3 --costs 0,1,0.",
        )
    conflicting = [option for option, value in beside.items() if value]
    if conflicting:
        raise BadValue(
            f"{' and '.join(conflicting)} cannot be given beside --costs, which makes no plan: it prices one interior "
            "tile."
        )
    shape = parse_grid(grid)
    if len(shape) != 2:
        raise BadValue(
            f"--costs {costs} prices tiles of rows and columns, as the paper does; --grid {grid} cuts a depth too.",
            hint="Leave --costs out: real plans are priced for volumes, too.",
        )
    return (shape[0], shape[1]), prices


def tile_groups(network: Network | str, grid: tuple[int, int], costs: Costs) -> TileGroups:
    """Return where an interior tile best exchanges boundary data, by the paper's model (TILE, Algorithm 2)."""
    return group_tiles(kernel_layers(network_of(network)), grid, costs)


def tile_groups_document(network: Network, groups: TileGroups) -> dict[str, Any]:
    """Return groups as a document. Starts are numbers of its `layers`; `..._plan_groups` are the same places as a plan
    names them: layers of the network at its granularity or, inside one, operators."""
    document: dict[str, Any] = {
        "model": network.name,
        "input": network.input_text,
        "granularity": network.granularity,
        "grid": list(groups.grid),
        "costs": asdict(groups.costs),
        "layers": [
            {
                "name": layer.name,
                "kind": "pooling" if layer.is_pool else "convolution",
                "kernel": list(layer.kernel),
                "stride": list(layer.stride),
                "input": [layer.channels_in, *layer.input_size],
                "output": [layer.channels_out, *layer.output_size],
                "tile": list(tile),
                "operators": [op.name for op in network.ops[slice(*layer.operators)]],
            }
            for layer, tile in zip(groups.layers, groups.tiles)
        ],
    }
    for direction, compared in (("forward", groups.forward), ("backward", groups.backward)):
        document |= {
            f"{direction}_groups": list(compared.best.starts),
            f"{direction}_group_names": [groups.layers[start].name for start in compared.best.starts],
            f"{direction}_plan_groups": list(plan_groups(network, groups.layers, compared.best.starts)),
            f"{direction}_exchanges": list(compared.exchanges),
            f"{direction}_cost": compared.best.cost,
            f"{direction}_cost_one_group": compared.one_group,
            f"{direction}_cost_every_layer": compared.every_layer,
        }
    return document


def parse_weights(option: str, text: str) -> tuple[float, ...]:
    """Parse weights: '2,1' -> (2, 1), relative heights of rows or widths of columns."""
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = (0.0,)
    if not all(0 < number < float("inf") for number in weights):
        raise BadValue(f"{option} '{text}' is not a list of numbers > 0.", hint="Write it like 2,1,1.")
    return weights


def tile_options(grid: str | None, rows: str | None, columns: str | None, depths: str | None = None) -> TileOptions:
    """Return the tile options that a user typed. Rows, columns or depths alone determine the grid."""
    heights = parse_weights("--rows", rows) if rows else None
    widths = parse_weights("--columns", columns) if columns else None
    layers = parse_weights("--depths", depths) if depths else None
    if grid is None and heights is None and widths is None and layers is None:
        return TileOptions()
    given = [each for each in (layers, heights or (1.0,), widths or (1.0,)) if each is not None]
    shape = parse_grid(grid) if grid is not None else tuple(len(each) for each in given)
    return TileOptions(
        shape, _weights("--rows", heights, shape[-2]), _weights("--columns", widths, shape[-1]),
        depths=_weights("--depths", layers, shape[0] if len(shape) == 3 else 1),
    )  # fmt: skip


def check_tiles(network: Network, options: TileOptions | None) -> None:
    """Check, before anything starts, that every tile has some part of the image."""
    image = network.tensors[network.inputs[0]]
    if options is None or options.grid is None:
        return
    names, extents = ("columns", "rows", "depths"), network.extents(image.name)[::-1]
    if len(extents) == 2 and len(options.grid) == 3:
        depths, rows, columns = options.grid
        raise BadPlan(
            f"The grid {depths}x{rows}x{columns} cuts depths; '{image.name}' holds pictures of {extents[1]} rows and "
            f"{extents[0]} columns.",
            hint=f"Write the grid with two numbers, like {rows}x{columns}; three are for volumes and video.",
        )
    cuts = [*zip(names, options.grid[::-1], options.sizes[::-1], extents)]
    for axis, count, weights, extent in reversed(cuts):
        if any(a == b for a, b in pairwise(cut_points(extent, weights or (1.0,) * count))):
            cut = f" as {','.join(f'{weight:g}' for weight in weights)}" if weights else ""
            raise BadPlan(
                f"{count} {axis} of tiles cannot be cut out of the {extent} {axis} of '{image.name}'{cut}: a tile "
                f"would have 0 {axis}.",
                hint="Give a smaller grid, or tiles that differ less.",
            )


def priced_groups(made: Plan, network: Network, cluster: Cluster, profile: Profile | None) -> list[dict[str, Any]]:
    """Return the groupings of a plan's tiles as the planner prices them, and simulated: corner cases and optima.

    `fetched_seconds`: for activations that a larger backward group fetches to stay exact; the paper leaves them out.
    """
    stage = next((i for i, stage in enumerate(made.stages) if isinstance(stage.share, ByTiles)), None)
    if stage is None:
        return []
    times = profile or estimate_cluster(network, cluster)
    rows = []
    for groups in TilePrices(made, stage, network, cluster, times).groupings():
        grouped = with_groups(made, stage, groups)
        try:
            seconds = simulate(grouped, network, cluster, times, keep_spans=False, within_memory=True).seconds
        except OutOfMemory:
            seconds = None
        rows.append({**asdict(groups), "simulated_seconds": seconds, "chosen": grouped == made})
    return rows

"""Plans of tiles for inference: our own and the baselines'.

tiles       grid, devices, places of exchange, depth: chosen by the tiles' prices, then simulated
deepthings  the same with one group: nothing is exchanged, tiles overlap as much as that requires (DeepThings)
modnn       rows over all devices, exchanged at every layer that reads beyond its tile (MoDNN)
coates      the same with rows and columns (Coates et al.)

Fully connected layers behind the maps are shared by channels, input-based (DECNN section 4.1), or left to one device,
whichever is faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isqrt

import msgspec

from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.plan import ByTiles, LayerName, Plan, Stage
from manyhands.facts.plan_check import layer_range, resolve
from manyhands.planner.channel_plans import UNDIVIDED, channel_groups, channel_stage, dense_cuts
from manyhands.planner.hybrid import coarse_cuts
from manyhands.planner.pricing import Named, Pricer, subcluster
from manyhands.planner.simple import proportional
from manyhands.planner.task import Grid, PlanCandidate, Task
from manyhands.planner.tile_plans import cuts_longer_sides, grids, image_extents, tile_stages
from manyhands.planner.tiles import TilePrices
from manyhands.schedule.tileable import maps_of, tileable_layers

MOST_GRIDS = 3
"""Grids, over any number of devices, whose groups are searched."""
MOST_TILES = 16
"""The most devices that tiles use: the fastest ones."""
MOST_COUNTS = 8
"""With up to this many devices, any number of them is tried; with more, only all."""
MOST_DEPTHS = 8
"""Places besides the end of the maps at which tiles may end."""
WORSE_IN_A_ROW = 6
MOST_OF_GRID = 3
"""Groupings of a grid that are simulated beside an exchange at every layer."""


_Way = tuple[float, tuple[int, ...]]
"""Seconds, and where groups start."""


def tile_ends(network: Network) -> list[int]:
    """Return the layers before which a tiled stage may end: where the maps end, and after layers that every tile can
    hold whole."""
    end, _ = tileable_layers(network)
    ends = [end] if end else []
    for layer in range(end + 1, len(network.layers) + 1):
        if not end or maps_of(network, 0, network.layers[layer - 1].last)[1] is not None:
            break
        ends.append(layer)
    return ends


def tails(task: Task, names: Sequence[str], end: int, *, channels: bool = True) -> Iterator[tuple[str, list[Stage]]]:
    """Yield what may follow a tiled stage: nothing, one device, or the dense layers by channels over the same
    devices."""
    network, layers = task.network, len(task.network.layers)
    if end == layers:
        yield "", []
        return
    fastest = min(names, key=lambda name: task.step_seconds(name, 1))
    rest_text = f"{network.layers[end].name} .." if layers - end > 1 else network.layers[end].name
    yield f"{rest_text} on {fastest}", [Stage((end, layers), (fastest,))]
    first = network.layers[end].first
    if not channels or not any(op.channels == "dense" for op in network.ops[first:]):
        return
    is_grouped = any(op.channels == "grouped" for op in network.ops[first:])
    total = channel_groups(network) if is_grouped else UNDIVIDED * len(names)
    if total < len(names):
        return
    more = proportional(total - len(names), [1.0 / task.step_seconds(name, 1) for name in names])
    counts = [1 + extra for extra in more]
    for cut in dense_cuts(network, first, len(network.ops)):
        if cut.name != "output-based":
            yield f"{rest_text} by channels {cut.name}", [channel_stage((end, layers), names, counts, cut)]


# ---- Baselines


def modnn(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return MoDNN's plans: rows over all devices."""
    count = len(task.cluster.names)
    return _baseline(task, pricer, (count, 1), f"modnn {count}x1")


def coates(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return Coates' plans: rows and columns over all devices, as nearly square as possible; a prime number has columns
    only."""
    count = len(task.cluster.names)
    rows = next(n for n in range(isqrt(count), 0, -1) if count % n == 0)
    return _baseline(task, pricer, (rows, count // rows), f"coates {rows}x{count // rows}")


def _baseline(task: Task, pricer: Pricer, grid: Grid, name: str) -> list[PlanCandidate]:
    base = tile_stages(task, grid)
    return pricer.rank(_with_tails(task, base, name), may_interleave=False)


def _with_tails(task: Task, base: Plan, name: str) -> Iterator[Named]:
    """Yield a plan of tiles with every end and every tail that its groups allow."""
    tiled = base.stages[0]
    for end in tile_ends(task.network):
        for words, tail in tails(task, tiled.devices, end):
            stage = msgspec.structs.replace(tiled, layers=(0, end))
            yield ", ".join(filter(None, (name, words))), msgspec.structs.replace(base, stages=(stage, *tail))


# ---- Ours


def tiles(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return plans of the fastest two devices, three and so on, in every grid, with the best exchanges and depth."""
    candidates: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    for _, plan, prices in _promising_grids(task)[:MOST_GRIDS]:
        every = _every_layer(task, plan)
        try:  # larger groups compute more, so a plan that cannot win without them cannot win with them
            candidates += pricer.rank(_grouped(task, plan, prices) if pricer.may_win(every[1]) else [every])
        except ManyhandsError as error:
            refusal = refusal or error
    if not candidates:
        assert refusal is not None
        raise refusal
    for further in (_other_tails, _hiding):
        best = min(candidates, key=lambda candidate: candidate.seconds)
        if best.plan is None or not pricer.may_win(best.plan):
            break
        with contextlib.suppress(ManyhandsError):  # a plan that cannot run is no candidate
            candidates += pricer.rank(further(task, best))
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def deepthings(task: Task, pricer: Pricer) -> list[PlanCandidate]:
    """Return DeepThings' plans: tiles that exchange nothing, up to the depth at which that pays; the rest on one
    device."""
    plans: list[Named] = []
    for _, plan, prices in _promising_grids(task)[:MOST_GRIDS]:
        plans += [(f"deepthings {words}", fused) for words, fused in _fused(task, plan, prices)]
    return pricer.rank(plans)


def _promising_grids(task: Task) -> list[tuple[float, Plan, TilePrices]]:
    """Return grids over the fastest devices with their price if every layer exchanges, the cheapest first."""
    names = sorted(task.cluster.names, key=lambda name: task.step_seconds(name, 1))[:MOST_TILES]
    ranked: list[tuple[float, Plan, TilePrices]] = []
    refusal: ManyhandsError | None = None
    if len(names) < 2:
        raise BadPlan(f"Tiles need at least two devices; cluster {task.cluster.name} has {len(names)}.")
    for count in sorted({len(names), *range(2, min(len(names), MOST_COUNTS + 1))}, reverse=True):
        subtask = replace(task, cluster=subcluster(task.cluster, names[:count]))
        for grid in grids(count, max(2, len(image_extents(task.network)))):
            if not is_worth(task.network, grid):
                continue
            try:
                plan = resolve(tile_stages(subtask, grid), task.network, task.cluster)
            except ManyhandsError as error:
                refusal = refusal or error
                continue
            prices = TilePrices(plan, 0, task.network, task.cluster, task.profile)
            bounds = (*prices.starts, prices.geometry.last)
            seconds = sum(prices.forward(a, b, both_ways=False) for a, b in pairwise(bounds))
            ranked.append((seconds, plan, prices))
    if not ranked:
        assert refusal is not None
        raise refusal
    return sorted(ranked, key=lambda entry: entry[0])


def is_worth(network: Network, grid: Grid) -> bool:
    """Return whether a grid may be the best of its number of tiles: it cuts the longer side of the maps more often, of
    two sides."""
    extents = image_extents(network)
    if len(extents) != len(grid):
        return True
    return cuts_longer_sides(grid, extents) and (len(grid) > 2 or grid[0] != grid[1] or extents[0] == extents[1])


def _grouped(task: Task, plan: Plan, prices: TilePrices) -> Iterator[Named]:
    """Yield a grid that exchanges at every layer, and the same grid with the most promising groups and depths."""
    share = plan.stages[0].share
    assert isinstance(share, ByTiles)
    name = f"tiles {share.grid_text}"
    layers, end = task.network.layers, tile_ends(task.network)[0]
    yield _every_layer(task, plan)
    for depth, groups in _cheapest(task, plan, prices)[:MOST_OF_GRID]:
        where = f" up to {layers[depth].name}" if depth < end else ""
        yield f"{name} in {len(groups)} group(s){where}", _ended(task, _regrouped(plan, depth, groups), depth)
    for words, fused in list(_fused(task, plan, prices))[:2]:
        yield f"tiles {words}", fused


def _every_layer(task: Task, plan: Plan) -> Named:
    share = plan.stages[0].share
    assert isinstance(share, ByTiles)
    name = f"tiles {share.grid_text}, every layer"
    return name, _ended(task, plan, tile_ends(task.network)[0])


def _other_tails(task: Task, best: PlanCandidate) -> Iterator[Named]:
    """Yield the best plan with another end of its tiles, or another tail, where it goes as deep as the maps do."""
    plan = best.plan
    assert plan is not None
    if layer_range(plan.stages[0])[1] == tile_ends(task.network)[0]:
        once = msgspec.structs.replace(plan, order="stream", micro_batches=1, batch_size=plan.micro_batch_size)
        yield from _with_tails(task, once, best.name.removesuffix(", interleaved"))


def _regrouped(plan: Plan, depth: int, groups: tuple[LayerName, ...] | None) -> Plan:
    stage = plan.stages[0]
    assert isinstance(stage.share, ByTiles)
    share = msgspec.structs.replace(stage.share, forward_groups=groups)
    first = msgspec.structs.replace(stage, layers=(0, depth), share=share)
    return msgspec.structs.replace(plan, stages=(first, *plan.stages[1:]))


def _ended(task: Task, plan: Plan, depth: int) -> Plan:
    """Return the plan with everything after the tiles on the fastest of their devices."""
    _, tail = next(tails(task, plan.stages[0].devices, depth))
    return msgspec.structs.replace(plan, stages=(plan.stages[0], *tail))


def _tail_seconds(task: Task, plan: Plan, depth: int) -> float:
    """Return about the seconds that the rest takes on the fastest device, and the transfer there."""
    names, layers = plan.stages[0].devices, len(task.network.layers)
    if depth == layers:
        return 0.0
    fastest = min(names, key=lambda name: task.step_seconds(name, 1))
    others = [name for name in names if name != fastest]
    size = task.network.cut_bytes(depth) * len(others) / len(names)
    rate = min(task.cluster.bytes_per_second_between(name, fastest) for name in others)
    delay = max(task.cluster.link_between(name, fastest).delay_seconds for name in others)
    return size / rate + delay + sum(task.layer_seconds(fastest, layer, 1) for layer in range(depth, layers))


def _depths(task: Task) -> list[int]:
    """Return the layers before which tiles may end: the end of the maps, and cuts before it that carry little."""
    end = tile_ends(task.network)[0]
    return [end, *(cut for cut in coarse_cuts(task.network, MOST_DEPTHS) if cut < end)]


def _cheapest(task: Task, plan: Plan, prices: TilePrices) -> list[tuple[int, tuple[LayerName, ...]]]:
    """Return depths with their best groups (TILE Algorithm 2, forward only), the cheapest first."""
    starts, layers = prices.starts, task.network.layers
    best: list[_Way] = [(0.0, ())]

    def until(op: int) -> _Way:
        """Return the cheapest grouping up to an operator. The earlier its last group starts, the more tiles overlap, so
        the search ends once the price keeps rising."""
        cheapest: _Way = (inf, ())
        worse = 0
        for start, (so_far, groups) in reversed([entry for entry in zip(starts, best) if entry[0] < op]):
            way: _Way = (so_far + prices.forward(start, op, both_ways=False), (*groups, start))
            worse = worse + 1 if way[0] > cheapest[0] else 0
            cheapest = min(cheapest, way, key=lambda entry: (entry[0], len(entry[1])))
            if worse == WORSE_IN_A_ROW:
                break
        return cheapest

    for start in starts[1:]:
        best.append(until(start))
    ranked = []
    for depth in _depths(task):
        seconds, groups = until(layers[depth - 1].last)
        ranked.append((seconds + _tail_seconds(task, plan, depth), depth, prices.geometry.start_names(groups)))
    return [(depth, groups) for _, depth, groups in sorted(ranked, key=lambda entry: entry[0])]


def _fused(task: Task, plan: Plan, prices: TilePrices) -> Iterator[Named]:
    """Yield one group up to some depth, the cheapest depths first."""
    share = plan.stages[0].share
    assert isinstance(share, ByTiles)
    layers, end = task.network.layers, tile_ends(task.network)[0]
    priced = [
        (prices.forward(0, layers[depth - 1].last, both_ways=False) + _tail_seconds(task, plan, depth), depth)
        for depth in range(1, end + 1)
    ]
    for _, depth in sorted(priced)[:MOST_OF_GRID]:
        where = f" up to {layers[depth].name}" if depth < len(layers) else ""
        words = f"{share.grid_text} fused{where}"
        yield words, _ended(task, _regrouped(plan, depth, (0,)), depth)


def _hiding(task: Task, best: PlanCandidate) -> Iterator[Named]:
    """Yield the best plan computing inside the tiles while boundary data travels, which helps where links are slow."""
    plan = best.plan
    assert plan is not None
    share = plan.stages[0].share
    assert isinstance(share, ByTiles)
    once = msgspec.structs.replace(plan, order="stream", micro_batches=1, batch_size=plan.micro_batch_size)
    early = TilePrices(once, 0, task.network, task.cluster, task.profile).interior_first()
    if early:
        stage = msgspec.structs.replace(plan.stages[0], share=msgspec.structs.replace(share, interior_first=early))
        hidden = msgspec.structs.replace(once, stages=(stage, *plan.stages[1:]))
        yield f"{best.name.removesuffix(', interleaved')}, inside first", hidden

"""Plans by name: each strategy uses every device of the cluster; only `auto` may leave devices out.

single     the fastest device alone
samples    one stage, each device takes samples in proportion to its speed
pipeline   one device per stage, cuts placed so that the slowest stage is as fast as can be
tiles      the maps cut into a grid in proportion to speed, up to global pooling; the tail on the fastest device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError, OutOfMemory, unknown
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, LayerName, Order, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.planner.tiles import Groups, TilePrices, with_groups
from manyhands.schedule.tiles import tileable_layers

STRATEGIES = ("auto", "single", "samples", "pipeline", "tiles")
SIMULATED_UP_TO = 1.3
"""Groupings whose price is within this of the least are simulated."""

Grid = tuple[int, int]
Weights = tuple[float, ...] | None


@dataclass(frozen=True)
class TileWish:
    """What is asked of tiles; the rest is chosen."""

    grid: Grid | None = None
    rows: Weights = None
    columns: Weights = None
    forward_groups: tuple[LayerName, ...] | None = None
    backward_groups: tuple[LayerName, ...] | None = None
    is_grouped: bool = False
    """The groups are as given, not chosen."""


@dataclass(frozen=True)
class Task:
    """What is to be planned."""

    network: Network
    cluster: Cluster
    profile: Profile
    batch_size: int
    micro_batches: int | None = None
    """None: chosen by the strategy."""
    order: Order = "1f1b"
    optimizer_slots: int = 1
    tiles: TileWish = TileWish()

    def step_seconds(self, device: str, samples: int) -> float:
        """Forward and backward of the whole network on one device."""
        profile = self.profile.of(device)
        return sum(sum(profile.layer_seconds(layer, samples)) for layer in range(len(self.network.layers)))

    def fastest(self) -> str:
        return min(self.cluster.names, key=lambda name: self.step_seconds(name, self.batch_size))

    def plan(self, stages: list[Stage], micro_batches: int) -> Plan:
        return Plan(
            network=self.network.name,
            batch_size=self.batch_size,
            stages=tuple(stages),
            micro_batches=micro_batches,
            order=self.order,
            optimizer_slots=self.optimizer_slots,
        )


def plan_by_name(strategy: str, task: Task, price: Callable[[Plan], float]) -> Candidate:
    """The plan of a named strategy (all but `auto`, which chooses), within every device's memory."""
    makers: dict[str, Callable[[Task], Plan]] = {
        "single": single, "samples": samples, "pipeline": pipeline, "tiles": partial(tiles, price=price),
    }  # fmt: skip
    if strategy not in makers:
        raise unknown("strategy", strategy, STRATEGIES)
    return fitting(strategy, makers[strategy], task, price)


def single(task: Task, device: str = "") -> Plan:
    """One device alone."""
    stage = Stage((0, len(task.network.layers)), (device or task.fastest(),))
    return task.plan([stage], task.micro_batches or 1)


def proportional(total: int, weights: list[float]) -> list[int]:
    """Whole numbers in proportion to weights that add up to `total` (largest remainders)."""
    scale = total / sum(weights)
    exact = [weight * scale for weight in weights]
    counts = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: exact[i] - counts[i], reverse=True)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def samples(task: Task) -> Plan:
    """Data parallel with shares by speed: at least one sample of every micro-batch for each device."""
    micro_batches = task.micro_batches or 1
    size = task.batch_size // micro_batches
    names = task.cluster.names
    if size < len(names):
        raise BadPlan(
            f"A micro-batch of {size} sample(s) cannot be shared by {len(names)} devices: each takes at least one.",
            hint="Use a larger batch, fewer micro-batches or fewer devices, or let --share auto leave some out.",
        )
    speeds = [1.0 / task.step_seconds(name, max(1, size // len(names))) for name in names]
    counts = proportional(size, speeds)
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    stage = Stage((0, len(task.network.layers)), names, BySamples(tuple(counts)))
    return task.plan([stage], micro_batches)


def divisor_near(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def balanced_cuts(costs: list[list[float]]) -> list[int]:
    """Stage ends that make the slowest stage fastest, by dynamic programming. costs[p][l]: layer l on stage p."""
    stages, layers = len(costs), len(costs[0])
    sums = [[0.0] for _ in range(stages)]
    for p in range(stages):
        for cost in costs[p]:
            sums[p].append(sums[p][-1] + cost)
    best = [[float("inf")] * (layers + 1) for _ in range(stages + 1)]
    back = [[0] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for p in range(1, stages + 1):
        for end in range(p, layers - (stages - p) + 1):
            for start in range(p - 1, end):
                slowest = max(best[p - 1][start], sums[p - 1][end] - sums[p - 1][start])
                if slowest < best[p][end]:
                    best[p][end], back[p][end] = slowest, start
    ends = [layers]
    for p in range(stages, 1, -1):
        ends.append(back[p][ends[-1]])
    return ends[::-1]


def pipeline(task: Task) -> Plan:
    """One device per stage in order of memory (ASTEROID §3.3), the slowest stage as fast as can be."""
    layers = len(task.network.layers)
    by_memory = sorted(task.cluster.devices, key=lambda device: -device.memory_bytes)
    names = [device.name for device in by_memory][:layers]
    most = task.batch_size
    if any(op.statistics for op in task.network.ops):  # statistics of one sample are none
        most = max(1, task.batch_size // 2)
    micro_batches = task.micro_batches or divisor_near(task.batch_size, min(4 * len(names), most))
    if not task.micro_batches and micro_batches > most:
        micro_batches = 1
    size = task.batch_size // micro_batches
    costs = [[sum(task.profile.of(name).layer_seconds(layer, size)) for layer in range(layers)] for name in names]
    ends = balanced_cuts(costs)
    starts = [0, *ends[:-1]]
    stages = [Stage((start, end), (name,)) for name, start, end in zip(names, starts, ends)]
    return task.plan(stages, micro_batches)


def tile_stages(task: Task, grid: Grid, rows: Weights = None, columns: Weights = None) -> Plan:
    """A grid of tiles over every device, up to global pooling; the tail, if there is one, on the fastest of them.

    Heights and widths in proportion to speed, unless given; boundary data is exchanged at every layer.
    """
    network, names = task.network, task.cluster.names
    if grid[0] * grid[1] != len(names):
        raise BadPlan(
            f"A grid of {grid[0]}x{grid[1]} has {grid[0] * grid[1]} tiles; cluster {task.cluster.name} has "
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
            hint="Share it by samples, or as a pipeline: --share samples, --share pipeline.",
        )
    speeds = [1.0 / task.step_seconds(name, task.batch_size) for name in names]
    by_row = [sum(speeds[r * grid[1] : (r + 1) * grid[1]]) for r in range(grid[0])]
    by_column = [sum(speeds[c :: grid[1]]) for c in range(grid[1])]
    _, _, height, width = network.tensors[network.ops[0].inputs[0]].shape
    share = ByTiles(
        _shares(by_row, height) if rows is None else rows, _shares(by_column, width) if columns is None else columns
    )
    stages = [Stage((0, last), names, share)]
    if last < len(network.layers):
        stages.append(Stage((last, len(network.layers)), (task.fastest(),)))
    plan = task.plan(stages, task.micro_batches or 1)
    return plan if plan.may_repeat_devices or len(stages) == 1 else msgspec.structs.replace(plan, order="sequential")


def _shares(speeds: list[float], extent: int) -> tuple[float, ...]:
    """Relative sizes; devices that differ by noise only are alike, and none is left without a row."""
    found = tuple(1 if max(speeds) < 1.02 * speed else round(speed / max(speeds), 3) for speed in speeds)
    least = max(found) / extent
    return tuple(max(share, 2 * least) for share in found) if min(found) < 2 * least else found


def grids(count: int) -> list[Grid]:
    """Rows x columns of so many tiles, rows first: rows of a map are contiguous in memory."""
    return [(rows, count // rows) for rows in range(count, 0, -1) if count % rows == 0]


def tiles(task: Task, price: Callable[[Plan], float]) -> Plan:
    """The grid, unless given, and the groups that are fastest: looked for by the tiles' own prices, then simulated."""
    asked = task.tiles
    if asked.grid is None:
        ranked = []
        for grid in grids(len(task.cluster.names)):
            plan = resolve(tile_stages(task, grid), task.network, task.cluster)
            ranked.append((TilePrices(plan, 0, task.network, task.cluster, task.profile).every_layer().seconds, plan))
        plan = min(ranked, key=lambda one: one[0])[1]
    else:
        plan = resolve(tile_stages(task, asked.grid, asked.rows, asked.columns), task.network, task.cluster)
    if asked.is_grouped:
        groups = Groups("given", asked.forward_groups, asked.backward_groups)
        return resolve(with_groups(plan, 0, groups), task.network, task.cluster)
    _, best, seconds = fastest_groups(plan, task, price)[0]
    early = TilePrices(best, 0, task.network, task.cluster, task.profile).interior_first()
    if not early:
        return best
    share = best.stages[0].share
    assert isinstance(share, ByTiles)
    stage = msgspec.structs.replace(best.stages[0], share=msgspec.structs.replace(share, interior_first=early))
    hidden = resolve(msgspec.structs.replace(best, stages=(stage, *best.stages[1:])), task.network, task.cluster)
    return hidden if price(hidden) < seconds else best


def fastest_groups(plan: Plan, task: Task, price: Callable[[Plan], float]) -> list[tuple[Groups, Plan, float]]:
    """A tile plan with each grouping that is worth a simulation, the fastest first; ties go to fewer groups."""
    known = TilePrices(plan, 0, task.network, task.cluster, task.profile).groupings()
    least = min(groups.seconds for groups in known)
    tried: dict[tuple[object, object], tuple[Groups, Plan, float]] = {}
    refusal: OutOfMemory | None = None
    for groups in sorted(known, key=lambda one: (one.seconds, one.count)):
        key = (groups.forward, groups.backward)
        if key in tried or (groups.seconds > SIMULATED_UP_TO * least and tried):
            continue
        grouped = with_groups(plan, 0, groups)
        try:
            tried[key] = (groups, grouped, price(grouped))
        except OutOfMemory as error:
            refusal = error
    if not tried:
        assert refusal is not None
        raise refusal
    return sorted(tried.values(), key=lambda one: (one[2], one[0].count))


@dataclass(frozen=True)
class Candidate:
    """A plan with its price, or why it has none."""

    name: str
    plan: Plan | None
    seconds: float
    reason: str = ""


def candidates(task: Task, price: Callable[[Plan], float]) -> Iterator[tuple[str, Callable[[Task], Plan]]]:
    """Everything `auto` looks at: devices alone (the fastest of each kind), and every strategy over all of them."""
    kinds: dict[str, str] = {}
    for device in sorted(task.cluster.devices, key=lambda one: task.step_seconds(one.name, task.batch_size)):
        kinds.setdefault(f"{device.kind} {device.gflops} {device.memory_bytes}", device.name)
    for name in list(kinds.values())[:8]:
        yield f"single on {name}", partial(single, device=name)
    if len(task.cluster.devices) > 1:
        yield "samples", samples
        yield "pipeline", pipeline
        yield "tiles", partial(tiles, price=price)


def choose(task: Task, price: Callable[[Plan], float]) -> list[Candidate]:
    """Price every candidate; the fastest first, those that cannot run last with the reason."""
    found = []
    for name, make in candidates(task, price):
        try:
            found.append(fitting(name, make, task, price))
        except ManyhandsError as error:
            found.append(Candidate(name, None, float("inf"), error.message))
    return sorted(found, key=lambda candidate: candidate.seconds)


def fitting(name: str, make: Callable[[Task], Plan], task: Task, price: Callable[[Plan], float]) -> Candidate:
    """The strategy's plan with its price; one that does not fit in memory is tried with more, smaller micro-batches."""
    plan = resolve(make(task), task.network, task.cluster)
    try:
        return Candidate(name, plan, price(plan))
    except OutOfMemory:
        if task.micro_batches is not None:
            raise
    for count in range(plan.micro_batches + 1, task.batch_size + 1):
        if task.batch_size % count == 0:
            try:
                finer = resolve(make(replace(task, micro_batches=count)), task.network, task.cluster)
                return Candidate(name, finer, price(finer))
            except OutOfMemory:
                continue
    price(plan)  # nothing fits: the first refusal says by how much
    raise AssertionError("a plan that was refused once is refused again")

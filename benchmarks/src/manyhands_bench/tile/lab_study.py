"""TILE's chapter 6 by the clock: Raspberry Pis played by the lab, every tile on a core of its own.

speedups    Fig. 6.1  one sample on 1 to 6 devices of 1 to 4 tiles: computing, boundary data, sums of the weights
batches     Fig. 6.3  1 to 8 samples on 24 tiles, by grouping
baselines   Fig. 6.6  1 to 16 samples on 2 devices of 4 cores: tiles, data parallel, a partition by layers
memory      Fig. 6.2  resident bytes of the fullest tile's process, 1 to 24 tiles; in plain processes, not in the lab
costs       Fig. 5.2  what one sample costs an interior tile, by the paper's cost model: counted

A device's link and memory are its own; each of its cores may use a quarter of its speed and no more. Every run is
stored as it ends, and the same folder goes on where it was interrupted.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from manyhands.executor.log import MeasuredSpan
from manyhands.facts.cluster import Cluster, LabCluster, preset
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile
from manyhands.facts.plan import Plan
from manyhands.files.documents import read_document, write_document
from manyhands.lab.lab import Lab
from manyhands.lab.removal import missing
from manyhands.planner.grouping import Costs
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.tile.groups import Priced
from manyhands_bench.tile.memory import bench_resident_tiles
from manyhands_bench.tile.setup import (
    QUICK_SHAPE,
    SHAPE,
    WARM_UP_STEPS,
    TiledNetwork,
    TileVariant,
    square_grid,
)
from manyhands_bench.tile.studies import CLUSTER, CLUSTER_OF_BASELINES, GRID_OF_CHAPTER_5, GROUPINGS, SLOTS, Pis
from manyhands_bench.tile.tile_costs import tile_costs

STORED = "tile-lab.json"
SPARE_BYTES = 4 * 10**9
"""The memory that every device is given: a Pi 3 of 1 GB cannot hold four processes of PyTorch. What tiles need is
measured by itself (Fig. 6.2)."""
START_SECONDS = 180.0
"""The limit for all workers to start: there may be 24, which all import PyTorch."""
SHARES = ("tiles", "data parallel", "layer partition")
PLANNED = "planned"
"""The grouping that our planner takes."""
LAB_SHAPE = (3, 304, 304)
"""A quarter of the paper's 608x608, of which one step on one core takes minutes: hours for all ways."""
RESIDENT_STEPS = 2
COMPUTING = ("forward", "backward", "loss", "step")


@dataclass(frozen=True)
class TileLabExtent:
    """The amount of measuring."""

    shape: tuple[int, ...] = LAB_SHAPE
    devices: int = 6
    tiles: int = SLOTS
    steps: int = 1
    """Steps that count, of each way of each round, after one that does not."""
    rounds: int = 1
    scale: float = 0.2
    """Below 1, because this machine is faster than six Raspberry Pis: computing and links alike are faster."""
    batches: tuple[int, ...] = (1, 2, 4, 8)
    batches_of_baselines: tuple[int, ...] = (1, 2, 4, 8, 16)
    resident: tuple[int, ...] = (1, 2, 4, 8, 24)
    """The numbers of tiles whose resident memory is measured, at the paper's size of pictures."""
    resident_shape: tuple[int, ...] = SHAPE


QUICK_EXTENT = TileLabExtent(
    QUICK_SHAPE,
    2,
    2,
    rounds=1,
    batches=(1, 2),
    batches_of_baselines=(1, 2),
    resident=(1, 2),
    resident_shape=QUICK_SHAPE,
)


class TileStep(msgspec.Struct, frozen=True):
    """One step of one way, in the lab's seconds."""

    part: str
    way: str
    round: int
    seconds: float
    bare_seconds: float
    """From the first action to the end of the last backward pass: without waiting for the weights' sums."""
    computing_seconds: float
    """What the busiest device computed."""


class StoredSteps(msgspec.Struct):
    """The steps and the memory that were measured so far."""

    setting: str
    scale: float
    steps: list[TileStep] = []
    memory: list[dict[str, float]] = []
    """Resident bytes by number of tiles, of every round."""

    def of(self, part: str, way: str) -> list[TileStep]:
        return [step for step in self.steps if (step.part, step.way) == (part, way)]

    def median(self, part: str, way: str, quantity: str = "seconds") -> float:
        """Return the median of a way's steps; not a number where there are none."""
        values = [getattr(step, quantity) for step in self.of(part, way)]
        return statistics.median(values) if values else float("nan")


class TileRun(NamedTuple):
    """A run to be made: a part of the study, one of its ways, and what makes the plan: some take seconds to price."""

    part: str
    way: str
    plan: Callable[[], Plan]


def bench_tile_lab(extent: TileLabExtent, out: Path | None, say: Progress) -> Figures:
    """Measure what is missing of all parts, and return the figures; the reason if there can be no lab."""
    if why := missing():
        return {"tile_lab_skipped": why}
    subject = TiledNetwork.of(extent.shape)
    stored = _stored(out, str(subject), extent.scale) or StoredSteps(str(subject), extent.scale)
    speedups = speedup_runs(subject, extent)
    labs = (
        (CLUSTER, extent.devices, [*(run for run in speedups if _is_sparse(run)), *batch_runs(subject, extent)]),
        (CLUSTER_OF_BASELINES, 2, baseline_runs(subject, extent)),
        (CLUSTER, extent.devices, [run for run in speedups if not _is_sparse(run)]),
    )
    for kind, devices, runs in labs:
        wanted = [(run, number) for number in range(extent.rounds) for run in _in_turn(runs, number)]
        left = [(run, number) for run, number in wanted if not any(s.round == number for s in stored.of(*run[:2]))]
        if not left:
            continue
        name = f"tile{os.getpid()}"
        with open_session(played(kind, name, devices, extent), say=say, limit_seconds=START_SECONDS) as session:
            _one_core_each(subject, Lab.find(name), session, extent)
            for run, number in left:
                say(f"tiles in the lab: {run.part}, {run.way}, {number + 1} of {extent.rounds}")
                stored.steps.append(_step(subject, session, extent, run, number))
                _store(out, stored)
    if extent.resident and len(stored.memory) < extent.rounds:
        for _ in range(len(stored.memory), extent.rounds):
            measured = bench_resident_tiles(
                TiledNetwork.of(extent.resident_shape), extent.resident, RESIDENT_STEPS, say
            )
            stored.memory.append({key: float(value) for key, value in measured.items()})
            _store(out, stored)
    return figures_of(stored, extent) | _costs(subject)


def played(kind: str, name: str, devices: int, extent: TileLabExtent) -> LabCluster:
    """Return the first devices of a preset, with as much memory as four processes need."""
    whole = preset(kind)
    roomy = [msgspec.structs.replace(device, memory_bytes=SPARE_BYTES) for device in whole.devices[:devices]]
    return LabCluster(Cluster(name, tuple(roomy), whole.link), scale=extent.scale, slots=extent.tiles)


def _one_core_each(subject: TiledNetwork, lab: Lab, session: Session, extent: TileLabExtent) -> None:
    """Limit every worker to one core of its device: it is not to use what the others leave.

    They run a step at full speed first: the kernels and modules that it loads would take a small core minutes.
    """
    for seat in lab.played.seats:
        lab.groups.set_cpu(lab.name, seat.device, None)
    names = session.cluster.names
    subject.run(session, subject.tiles(names, TileVariant(square_grid(len(names)))), 1)
    lab.settle()
    for seat in lab.played.seats:
        names = lab.played.workers_of(seat.device)
        processes = [session.coordinator.members[name].facts.pid for name in names]
        lab.groups.divide(lab.name, seat.device, dict.fromkeys(processes, seat.share / extent.tiles))


def _in_turn(runs: Sequence[TileRun], number: int) -> Sequence[TileRun]:
    """Return the runs of a round: every other one backwards, so that a machine's drift cancels out."""
    return runs if number % 2 == 0 else runs[::-1]


def _step(subject: TiledNetwork, session: Session, extent: TileLabExtent, run: TileRun, number: int) -> TileStep:
    plan = run.plan()
    outcome = with_batch(subject, plan.batch_size).run(
        session, plan, WARM_UP_STEPS + extent.steps, trace=True, laid=True
    )
    spans = [span for log in outcome.logs.values() for span in log.spans]
    parts = [_split([span for span in spans if span.step == step]) for step in sorted({span.step for span in spans})]
    bare, computing = (statistics.median(column) for column in zip(*parts, strict=True))
    return TileStep(run.part, run.way, number, statistics.median(outcome.step_seconds[WARM_UP_STEPS:]), bare, computing)


def _split(spans: Sequence[MeasuredSpan]) -> tuple[float, float]:
    """Return the seconds of a step until its last backward pass ends, and those that the busiest device computed."""
    begin = min(span.start for span in spans)
    busy: dict[str, float] = {}
    for span in spans:
        if span.kind in COMPUTING:
            busy[span.device] = busy.get(span.device, 0.0) + span.end - span.start
    return max(span.end for span in spans if span.kind == "backward") - begin, max(busy.values())


@cache
def _with_batch(shape: tuple[int, ...], batch_size: int) -> TiledNetwork:
    return TiledNetwork.of(shape, batch_size=batch_size)


def with_batch(subject: TiledNetwork, batch_size: int) -> TiledNetwork:
    """Return the network with a batch of another size."""
    return subject if subject.batch_size == batch_size else _with_batch(subject.shape, batch_size)


# What is run


def split_name(devices: int, tiles: int) -> str:
    return f"{devices}x{tiles}"


def speedup_runs(subject: TiledNetwork, extent: TileLabExtent) -> list[TileRun]:
    """Return Fig. 6.1: one sample on every number of devices and of tiles on each."""
    return [
        TileRun("speedups", split_name(devices, tiles), partial(_tiled, Pis(subject, devices, tiles)))
        for devices in range(1, extent.devices + 1)
        for tiles in range(1, extent.tiles + 1)
    ]


def _is_sparse(run: TileRun) -> bool:
    """Return whether a split is one of those that come first: 1, 2, 4 or 6 devices of 1, 2 or 4 tiles."""
    devices, _, tiles = run.way.partition("x")
    return devices in "1246" and tiles in "124"


def _tiled(pis: Pis) -> Plan:
    return pis.plan


def batch_runs(subject: TiledNetwork, extent: TileLabExtent) -> list[TileRun]:
    """Return Fig. 6.3: batches by one group, an exchange at every layer, the optimum by the paper's algorithm, and what
    our planner takes from the catalogue's numbers."""
    pis = Pis(subject, extent.devices, extent.tiles)
    priced = {size: cache(partial(pis.priced, size)) for size in extent.batches}
    return [
        TileRun("batches", f"{name}, {size}", partial(_grouped, priced[size], name))
        for size in extent.batches
        for name in (*GROUPINGS, PLANNED)
    ]


def _grouped(priced: Callable[[], Priced], name: str) -> Plan:
    """Return the plan by one of the paper's groupings, or by the one that our planner finds cheapest."""
    prices = priced()
    wanted = GROUPINGS[name] if name in GROUPINGS else min(prices.seconds, key=prices.seconds.__getitem__)
    return prices.planned(next(groups for groups in prices.groupings if groups.name == wanted))


def baseline_runs(subject: TiledNetwork, extent: TileLabExtent) -> list[TileRun]:
    """Return Fig. 6.6: batches by tiles, by samples and by layers."""
    pis = Pis(subject, 2, extent.tiles, CLUSTER_OF_BASELINES)
    return [
        TileRun("baselines", f"{name}, {size}", partial(_shared, pis, name, size))
        for size in extent.batches_of_baselines
        for name in SHARES
    ]


def _shared(pis: Pis, name: str, size: int) -> Plan:
    return pis.ways(size)[name]


# What is stored, and the figures


def _stored(out: Path | None, setting: str, scale: float) -> StoredSteps | None:
    """Return what an interrupted run has left in the folder; None: nothing."""
    path = None if out is None else out / STORED
    if path is None or not path.exists():
        return None
    stored = decode(read_document(path), StoredSteps, str(path))
    if (stored.setting, stored.scale) != (setting, scale):
        raise BadFile(
            f"{path}: holds {stored.setting} at scale {stored.scale:g}, not {setting} at {scale:g}.",
            hint="Name another folder with --out.",
        )
    return stored


def _store(out: Path | None, stored: StoredSteps) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_document(out / STORED, msgspec.to_builtins(stored))


def figures_of(stored: StoredSteps, extent: TileLabExtent) -> Figures:
    """Return the figures of every part that was measured, in the devices' own time."""
    figures: Figures = {"tile_lab_scale": stored.scale, "tile_lab_steps": len(stored.steps)}
    figures |= _speedups(stored, extent) | _batches(stored, extent) | _baselines(stored, extent)
    for key in stored.memory[0] if stored.memory else ():
        figures[key] = statistics.median(measured[key] for measured in stored.memory)
    spreads = [
        max(seconds) / min(seconds)
        for part, way in dict.fromkeys((step.part, step.way) for step in stored.steps)
        if len(seconds := [step.seconds for step in stored.of(part, way)]) > 1
    ]
    return figures | {
        "tile_lab_spread": statistics.median(spreads) if spreads else float("nan"),
        "tile_lab_spread_most": max(spreads, default=float("nan")),
        "tile_lab_setting": f"{stored.setting}, {extent.rounds} round(s) of {extent.steps} step(s) after "
        f"{WARM_UP_STEPS} that does not count, medians; {CLUSTER} and 2 of {CLUSTER_OF_BASELINES} at time scale "
        f"{stored.scale:g} (seconds are the devices' own), every tile limited to one core of its device, memory not "
        "limited, PyTorch's default kernels, SGD without momentum, samples at hand; weights added up by all-reduce",
    }


def _seconds(stored: StoredSteps, part: str, way: str, quantity: str = "seconds") -> float:
    """Return a way's seconds in the devices' own time."""
    return stored.median(part, way, quantity) / stored.scale


def _speedups(stored: StoredSteps, extent: TileLabExtent) -> Figures:
    figures: Figures = {}
    alone = split_name(1, 1)
    for devices in range(1, extent.devices + 1):
        for tiles in range(1, extent.tiles + 1):
            way = split_name(devices, tiles)
            if not stored.of("speedups", way):
                continue
            whole, bare, computing = (
                _seconds(stored, "speedups", way, each) for each in ("seconds", "bare_seconds", "computing_seconds")
            )
            figures |= {
                f"fig_6_1_seconds_{way}": whole, f"fig_6_1_boundary_seconds_{way}": bare - computing,
                f"fig_6_1_weights_seconds_{way}": whole - bare,
                f"fig_6_1_speedup_{way}": _seconds(stored, "speedups", alone) / whole,
                f"fig_6_1_speedup_{way}_without_weights":
                    _seconds(stored, "speedups", alone, "bare_seconds") / bare,
            }  # fmt: skip
    return figures


def _batches(stored: StoredSteps, extent: TileLabExtent) -> Figures:
    figures: Figures = {}
    for size in extent.batches:
        seconds = {name: _seconds(stored, "batches", f"{name}, {size}") for name in (*GROUPINGS, PLANNED)}
        if all(value == value for value in seconds.values()):
            for name, value in seconds.items():
                key = name.replace(" ", "_")
                figures[f"fig_6_3_seconds_{key}_{size}"] = value
                if name != PLANNED:
                    figures[f"fig_6_3_{key}_over_planned_{size}"] = value / seconds[PLANNED]
    every = [value for key, value in figures.items() if key.startswith("fig_6_3_every_layer_over_planned")]
    if every:
        figures["fig_6_3_planned_vs_every_layer_least"] = min(map(float, every))
    return figures


def _baselines(stored: StoredSteps, extent: TileLabExtent) -> Figures:
    figures: Figures = {}
    for size in extent.batches_of_baselines:
        seconds = {name: _seconds(stored, "baselines", f"{name}, {size}") for name in SHARES}
        for name, value in seconds.items():
            key = name.replace(" ", "_")
            if value == value:
                figures[f"fig_6_6_seconds_{key}_{size}"] = value
                if name != "tiles" and seconds["tiles"] == seconds["tiles"]:
                    figures[f"fig_6_6_{key}_over_tiles_{size}"] = value / seconds["tiles"]
    return figures


def _costs(subject: TiledNetwork) -> Figures:
    """Return Fig. 5.2 a and b: the paper's cost model with a price for computing alone, and for communication alone."""
    figures: Figures = {}
    for letter, costs in (("a", Costs(1.0, 0.0)), ("b", Costs(0.0, 1.0))):
        for way, each in tile_costs(subject.graph.network, GRID_OF_CHAPTER_5, costs).items():
            figures |= {
                f"fig_5_2{letter}_{way}_one_group": each.one_group,
                f"fig_5_2{letter}_{way}_every_layer": each.every_layer,
                f"fig_5_2{letter}_{way}_best": each.best, f"fig_5_2{letter}_{way}_groups": each.groups,
            }  # fmt: skip
    return figures

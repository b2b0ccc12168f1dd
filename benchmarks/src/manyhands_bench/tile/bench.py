"""Figures of `manyhands bench tile`: training in tiles against one device, in time, in memory and in bytes sent.

one device    our worker alone, whole image        ┐ the same kernels, one thread each, pinned to cores,
parts         bare parts of the image, no exchange ┤ all alive during the whole run, in turns block by block;
tiles         the same image cut between workers   ┘ the median of the blocks' ratios counts

limit         one device over parts: what cutting alone could give on this machine
efficiency    the part of it that tiles reach, with everything exchanged that makes them exact
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from manyhands.facts.errors import BadValue
from manyhands.profiler.kernels import Choice
from manyhands.runtime.processes import pin_process
from manyhands.session.session import Session
from manyhands_bench.core.ddp import Baseline
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE, check_asked, measure_parts, profiled_here
from manyhands_bench.tile.groups import bench_bytes, bench_groups
from manyhands_bench.tile.memory import bench_memory, bench_resident
from manyhands_bench.tile.processor import BLOCKS, STEPS, bench_processor
from manyhands_bench.tile.setup import (
    MODEL,
    QUICK_SHAPE,
    SHAPE,
    WARM_UP_STEPS,
    BareParts,
    TiledNetwork,
    TileVariant,
    chosen_kernels,
    kernels_text,
    square_grid,
    usable,
    workers,
)
from manyhands_bench.tile.studies import draw_studies

TUNING = 2
"""Blocks in which grids, and later groupings, are tried before anything counts."""
SPEED_BLOCKS, SPEED_STEPS = 8, 3
"""Many short blocks: on a machine that others use too, cores become slower by half and fast again within seconds."""
OTHERS_EVERY = 3
"""Of so many blocks one measures the other plans too."""
KERNEL_SECONDS, QUICK_KERNEL_SECONDS = 30.0, 8.0


def bench_speed(subject: TiledNetwork, session: Session, blocks: int, steps: int, say: Progress) -> Figures:
    """Time one device, bare parts and tiles in turns, and beside them PyTorch's default and the paper's other two
    plans."""
    names = session.cluster.names
    count = len(names)
    ways = _ways(count)
    single = subject.single(names[0])
    in_turn = subject.in_turn(names)
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(BareParts.of(subject, ways[0].grid))
        baseline = Baseline([f"plain({MODEL!r}, {subject.shape!r}, 1, 0.0)"])
        stack.callback(baseline.close)
        pin_process(baseline.processes[0].pid, usable()[0])
        baseline.run(1)
        say("speed, trying grids and where to exchange")
        trials = [
            {way: subject.step_seconds(session, subject.tiles(names, way), steps) for way in ways}
            for _ in range(TUNING)
        ]
        tried = {way: statistics.median(trial[way] for trial in trials) for way in ways}
        best = min(ways, key=tried.__getitem__)  # chosen before, not by the rounds that count
        counted = [way for way in ways if way.grid == best.grid]
        rounds: list[dict[str, float]] = []
        for block in range(blocks):
            say(f"speed, block {block + 1} of {blocks}")
            sides = {
                "one": lambda: subject.step_seconds(session, single, steps),
                "parts": lambda: parts.step_seconds(steps),
            } | {
                str(way): lambda way=way: subject.step_seconds(session, subject.tiles(names, way), steps)
                for way in counted
            }  # fmt: skip
            if block % OTHERS_EVERY == 0:
                sides |= {
                    "torch": lambda: statistics.median(baseline.run(steps + WARM_UP_STEPS)[WARM_UP_STEPS:]),
                    "partition": lambda: subject.step_seconds(session, in_turn, steps),
                }
            rounds.append({name: measured() for name, measured in sides.items()})
    tiles = str(best)

    def ratio(above: str, below: str) -> float:
        return statistics.median(round[above] / round[below] for round in rounds if {above, below} <= round.keys())

    speedup, limit = ratio("one", tiles), ratio("one", "parts")
    return {
        f"limit_{count}": limit,
        f"speedup_{count}": speedup,
        f"efficiency_vs_limit_{count}": speedup / limit,
        **{f"speedup_{count}_grid_{way}": ratio("one", str(way)) for way in counted},
        "one_device_step_seconds": statistics.median(round_["one"] for round_ in rounds),
        "parts_step_seconds": statistics.median(round_["parts"] for round_ in rounds),
        "tiles_step_seconds": statistics.median(round_[tiles] for round_ in rounds),
        "torch_default_step_seconds": statistics.median(round_["torch"] for round_ in rounds if "torch" in round_),
        f"speedup_{count}_vs_torch_default": ratio("torch", tiles),
        "batch1_vs_data_parallel": ratio("one", tiles),
        "batch1_vs_layer_partition": ratio("partition", tiles),
        "speed_setting": f"{subject}, {count} workers of 1 thread, each pinned to a core; tiles {tiles}, fastest of "
        f"{', '.join(map(str, ways))}: exchanged before every operator that reads beyond its tile, or beside the sums "
        "of the batch norm before that, backward the adjoint; SGD without momentum; all have the sample at hand",
        "limit_setting": f"{count} bare parts of {'x'.join(map(str, parts.subject.shape))}, each by its own worker "
        "on a core of its own, at once, with nothing exchanged: of every step the slowest part",
        "torch_default_setting": "the plain module in one process, one thread, default kernels, SGD without momentum",
        "data_parallel_setting": "a batch of one sample cannot be shared by samples: one device trains it alone",
        "layer_partition_setting": "; ".join(f"{stage.devices[0]} layers {stage.layers}" for stage in in_turn.stages),
        "speed_blocks": f"{blocks} blocks of {steps} steps after {WARM_UP_STEPS} that does not count; "
        + "; ".join(f"{name} {_listed([round_[name] for round_ in rounds if name in round_])} s" for name in rounds[0])
        + f"; tried before: {', '.join(f'{way} {seconds:.4g} s' for way, seconds in tried.items())}",
    }


def _ways(count: int) -> list[TileVariant]:
    """Return the variants to try: grids as square as possible, in both orientations, and both places to exchange."""
    rows, columns = square_grid(count)
    grids = dict.fromkeys([(rows, columns), (columns, rows)])
    return [TileVariant(grid, beside_sums) for grid in grids for beside_sums in (False, True)]


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


@dataclass
class TileBench:
    """The parts of the benchmark, by name: what they have in common is made when the first of them needs it."""

    count: int
    quick: bool
    out: Path | None
    say: Progress
    stack: contextlib.ExitStack

    @cached_property
    def choice(self) -> Choice:
        self.say("choosing kernels")
        seconds = QUICK_KERNEL_SECONDS if self.quick else KERNEL_SECONDS
        return chosen_kernels(TiledNetwork.of(self._shape), usable()[0], seconds)

    @cached_property
    def subject(self) -> TiledNetwork:
        return TiledNetwork.of(self._shape, self.choice.kernels)

    @cached_property
    def session(self) -> Session:
        return self.stack.enter_context(workers(self.count))

    @property
    def _shape(self) -> tuple[int, ...]:
        return QUICK_SHAPE if self.quick else SHAPE

    def speed(self) -> Figures:
        kernels: Figures = {"kernels": kernels_text(self.choice), "kernel_gain": self.choice.gain}
        extent = (1, 1) if self.quick else (SPEED_BLOCKS, SPEED_STEPS)
        return kernels | bench_speed(self.subject, self.session, *extent, self.say)

    def processor(self) -> Figures:
        return bench_processor(self.session, *((1, 10) if self.quick else (BLOCKS, STEPS)), self.say)

    def groups(self) -> Figures:
        grid, extent = square_grid(self.count), (1, 1, 1) if self.quick else (TUNING, 5, 3)
        ways = [TileVariant(grid, beside) for beside in (False, True)]
        sent = bench_bytes(self.subject, self.session, ways, self.say)
        profile: Figures = {PROFILE_MACHINE: profiled_here()}
        return profile | sent | bench_groups(self.subject, self.session, grid, *extent, self.say)

    def memory(self) -> Figures:
        counted = bench_memory(self.subject, self.quick, self.say)
        return counted | bench_resident(self.subject, *((1, 2) if self.quick else (5, 3)), self.say)

    def studies(self) -> Figures:
        return draw_studies(self.subject, self.out or Path("tile-studies"), self.quick, self.say)


PARTS: Mapping[str, Callable[[TileBench], Figures]] = {
    "speed": TileBench.speed, "processor": TileBench.processor, "groups": TileBench.groups, "memory": TileBench.memory,
    "studies": TileBench.studies,
}  # fmt: skip


def bench_tile(
    count: int = 2,
    quick: bool = False,
    full: bool = False,
    *,
    only: Sequence[str] = (),
    out: Path | None = None,
    on_progress: Progress | None = None,
) -> Figures:
    """Return every figure of `manyhands bench tile`, flat; `full` draws the paper's studies into `out` too. `only`: the
    parts to run; by default all but the studies."""
    check_asked(PARTS, only, False, full)
    cores = usable()
    if count > len(cores):
        raise BadValue(
            f"--workers {count}: this machine has {len(cores)} core(s), and two workers on one core measure nothing.",
            hint=f"Use --workers {len(cores)} or fewer.",
        )
    say = on_progress or (lambda text: None)
    chosen = [name for name in PARTS if name in only or (not only and (full or name != "studies"))]
    with contextlib.ExitStack() as stack:
        return measure_parts(
            PARTS, TileBench(count, quick, out, say, stack), only=chosen, quick=quick, out=None, say=say
        )

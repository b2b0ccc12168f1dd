"""The common ground of `manyhands bench tile`'s figures: network, kernels, pinned workers, and runs over them."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import torch

from manyhands.data.preload import Preload
from manyhands.facts.cluster import Cluster
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.profiler.kernels import Choice, choose_kernels
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import Outcome
from manyhands.runtime.run import Run
from manyhands.schedule.tiles import TileGeometry
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands.training.tuning import same_batches
from manyhands_bench.same_batch import SameBatch

Grid = tuple[int, int]
"""Rows and columns of tiles."""


class TileVariant(NamedTuple):
    """A way to cut an image, and the place where boundary data is exchanged."""

    grid: Grid
    beside_sums: bool = False
    """Whether the exchange is together with the sums of the batch norm before an operator that reads beyond its tile;
    else it is right before the operator."""

    def __str__(self) -> str:
        return grid_text(self.grid) + ("_beside_sums" if self.beside_sums else "")


MODEL = "yolov2-16"
SHAPE = (3, 608, 608)
QUICK_SHAPE = (3, 224, 224)
OPTIMIZER = Optimizer("SGD", lr=1e-3)
WARM_UP_STEPS = 1
"""Steps at the start of every block that do not count."""


@dataclass
class TiledNetwork:
    """The network captured at one image size, with a batch and the kernels both sides use."""

    shape: tuple[int, ...]
    graph: Graph
    data: SameBatch
    preload: Preload
    kernels: Mapping[str, Kernel]
    batch_size: int = 1

    @classmethod
    def of(
        cls, shape: tuple[int, ...], kernels: Mapping[str, Kernel] | None = None, batch_size: int = 1
    ) -> TiledNetwork:
        data = SameBatch(MODEL, shape, batch_size)
        torch.manual_seed(0)
        module, loss = build(MODEL), loss_function(ZOO[MODEL].loss)
        return cls(
            shape, captured(module, data, loss, granularity="blocks", name=MODEL), data, Preload.of(data),
            kernels or {}, batch_size,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{MODEL} {'x'.join(map(str, self.shape))} batch {self.batch_size}"

    # Plans

    def plan(self, *stages: Stage, batch_size: int = 1) -> Plan:
        return resolve(Plan(self.graph.name, batch_size, stages, optimizer_slots=0), self.graph.network)

    def single(self, device: str) -> Plan:
        return self.plan(Stage((0, len(self.graph.network.layers)), (device,)))

    def tiles(self, devices: Sequence[str], way: TileVariant) -> Plan:
        """Return a plan of even tiles."""
        grid = way.grid
        share = ByTiles((1,) * grid[0], (1,) * grid[1])
        stage = Stage((0, len(self.graph.network.layers)), tuple(devices), share)
        plan = self.plan(stage, batch_size=self.batch_size)
        if not way.beside_sums:
            return plan
        geometry = TileGeometry(plan, 0, self.graph.network)
        starts = geometry.start_names(geometry.beside_sums(through_windows=True))
        share = msgspec.structs.replace(share, forward_groups=starts)
        return self.plan(msgspec.structs.replace(plan.stages[0], share=share), batch_size=self.batch_size)

    def by_samples(self, devices: Sequence[str], batch_size: int) -> Plan:
        """Return a data-parallel plan, as even as possible; with fewer samples than devices the last ones are idle."""
        count = min(len(devices), batch_size)
        share = BySamples(tuple(batch_size // count + (place < batch_size % count) for place in range(count)))
        stage = Stage((0, len(self.graph.network.layers)), tuple(devices[:count]), share)
        return self.plan(stage, batch_size=batch_size)

    def in_turn(self, devices: Sequence[str]) -> Plan:
        """Return a partition by layers: devices one after another, with multiply-accumulates as even as possible."""
        layers = self.graph.network.layers
        work = [sum(op.macs for op in self.graph.network.ops[layer.first : layer.last]) for layer in layers]
        bounds = [0, *(_at_part(work, number / len(devices)) for number in range(1, len(devices))), len(layers)]
        return self.plan(*(Stage(pair, (device,)) for pair, device in zip(pairwise(bounds), devices, strict=True)))

    # Runs

    def run(
        self, session: Session, plan: Plan, steps: int, *, trace: bool = False, memory: bool = False, laid: bool = False
    ) -> Outcome:
        """Run `steps` steps; with `memory` the last of them counts tensor bytes. `laid`: the sample is resident in the
        workers before the first."""
        order = Order(
            graph=self.graph, plan=plan, start=RunState(dict(self.graph.state)), last_step=steps, optimizer=OPTIMIZER,
            kernels=dict.fromkeys(plan.devices, self.kernels),
            trace_steps=range(WARM_UP_STEPS, steps) if trace else range(0), memory_step=steps - 1 if memory else -1,
            preload=self.preload if laid else None,
        )  # fmt: skip
        run = Run(session.coordinator, order)
        run.prepare()
        return run.run(same_batches(self.preload, steps, is_preloaded=laid))

    def step_seconds(self, session: Session, plan: Plan, steps: int) -> float:
        """Return the median seconds of a step. The sample is resident in our workers, as it is in PyTorch's process:
        a process that fed them would take their cores."""
        return steady(self.run(session, plan, steps + WARM_UP_STEPS, laid=True).step_seconds)


def _at_part(work: Sequence[int], part: float) -> int:
    """Return the layer before which `part` of the work lies, as nearly as possible; at least one layer lies on either
    side."""
    sums = [sum(work[:number]) for number in range(1, len(work))]
    return 1 + min(range(len(sums)), key=lambda number: abs(sums[number] - part * sum(work)))


def steady(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def square_grid(tiles: int) -> Grid:
    """Return rows and columns of a number of tiles, as near to a square as possible, no fewer rows than columns."""
    columns = next(number for number in range(math.isqrt(tiles), 0, -1) if tiles % number == 0)
    return tiles // columns, columns


def grid_text(grid: Grid) -> str:
    return f"{grid[0]}x{grid[1]}"


def usable() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def chosen_kernels(subject: TiledNetwork, core: int, seconds: float) -> Choice:
    """Return the fastest kernels of one thread on one core, by whole steps, so that they never lose to PyTorch's
    default."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    try:
        return choose_kernels(subject.graph, 1, threads=1, seconds=seconds)
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def kernels_text(choice: Choice) -> str:
    """Return as text how many operators run by which kernel."""
    counts: dict[str, int] = {}
    for kernel in choice.kernels.values():
        counts[str(kernel)] = counts.get(str(kernel), 0) + 1
    text = ", ".join(f"{count} by {name}" for name, count in sorted(counts.items())) or "PyTorch's default"
    return f"{choice.name}: {text}; {choice.gain:.3g} times as fast as the default"


@contextlib.contextmanager
def workers(count: int, *, apart: bool = False) -> Iterator[Session]:
    """Yield a session of local workers of one thread, each on a core of its own as far as there are cores. `apart`:
    they share no memory of PyTorch."""
    with open_session(Cluster.local(count), threads=1, pin=usable(), apart=apart) as session:
        yield session


@dataclass
class BareParts:
    """A bare part of the image on each core, all trained at once, with nothing exchanged."""

    sessions: list[Session]
    subject: TiledNetwork

    @classmethod
    @contextlib.contextmanager
    def of(cls, whole: TiledNetwork, grid: Grid) -> Iterator[BareParts]:
        channels, rows, columns = whole.shape
        subject = TiledNetwork.of((channels, rows // grid[0], columns // grid[1]), whole.kernels)
        cores = usable()
        with contextlib.ExitStack() as stack:
            sessions = [
                stack.enter_context(open_session(Cluster.local(1), threads=1, pin=cores[number : number + 1]))
                for number in range(grid[0] * grid[1])
            ]
            yield cls(sessions, subject)

    def step_seconds(self, steps: int) -> float:
        """Return the median seconds until the slowest part of a step is done: on a shared machine, now this core is
        slow and now that."""

        def one(session: Session) -> Sequence[float]:
            plan = self.subject.single(session.cluster.names[0])
            return self.subject.run(session, plan, steps + WARM_UP_STEPS, laid=True).step_seconds

        with ThreadPoolExecutor(len(self.sessions)) as pool:
            return steady([max(step) for step in zip(*pool.map(one, self.sessions), strict=True)])

"""Figures of `manyhands bench core`: training through transport, executor and runtime, against what people use today.

Every ratio is taken inside one run: both sides stay alive and take turns, block by block, and the median of the
blocks' ratios counts.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.runtime.fork_server import close_fork_servers
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.run import Run
from manyhands.session.measuring import measure
from manyhands.session.opening import open_session
from manyhands.session.session import Session, usable_cores
from manyhands.simulator.simulate import simulate
from manyhands_bench.core.ddp import Baseline
from manyhands_bench.core.demo import bench_demo
from manyhands_bench.core.transports import bench_engine
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import check_asked, measure_parts
from manyhands_bench.same_batch import SameBatch

WARM_UP_STEPS = 2
MEASURED_EVERY = 4
"""Blocks between two measurements from which a step is predicted: the machine's speed drifts."""
BUCKETS_MB = (25, 4)
"""Bucket sizes, DDP's default and ours: each side is tuned to the faster of them."""
OPTIMIZER = Optimizer("SGD", lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class CoreSetting:
    """A model at an input size and batch size."""

    model: str
    shape: tuple[int, ...]
    samples: int

    def __str__(self) -> str:
        return f"{self.model} {'x'.join(map(str, self.shape))} batch {self.samples}"


@dataclass(frozen=True)
class DataParallelExtent:
    """The amount of measuring of data parallel training."""

    tuning: int
    """Trials of each bucket size."""
    blocks: int
    steps: int
    """Steps of a block that count."""
    warm_up_steps: int = WARM_UP_STEPS
    is_predicted: bool = True


DATA_PARALLEL = CoreSetting("resnet18", (3, 64, 64), 32)
LARGE, QUICK_LARGE = CoreSetting("vgg16", (3, 224, 224), 16), CoreSetting("resnet18", (3, 32, 32), 16)
_PREDICTED = ("predicted_step_seconds", "sim_error")
OVERHEAD = (CoreSetting("yolov2-16", (3, 608, 608), 1), CoreSetting("resnet50", (3, 224, 224), 4),
            CoreSetting("mobilenetv2", (3, 224, 224), 8))  # fmt: skip
QUICK_OVERHEAD = (CoreSetting("resnet18", (3, 64, 64), 8),)


def _captured(setting: CoreSetting, data: SameBatch) -> Graph:
    torch.manual_seed(0)
    return captured(
        build(setting.model), data, loss_function(ZOO[setting.model].loss), granularity="blocks", name=setting.model
    )


def _ours(session: Session, graph: Graph, plan: Plan, data: SameBatch, steps: int) -> list[float]:
    """Return the seconds of each step of a block, as the coordinator saw them end."""
    order = Order(graph=graph, plan=plan, start=RunState(dict(graph.state)), last_step=steps, optimizer=OPTIMIZER)
    run = Run(session.coordinator, order)
    run.prepare()
    return run.run((step, data.inputs, data.targets) for step in range(steps)).step_seconds


def _even(setting: CoreSetting, graph: Graph, names: tuple[str, ...]) -> Plan:
    share = BySamples(tuple(setting.samples // len(names) for _ in names))
    stage = Stage((0, len(graph.network.layers)), names, share)
    return resolve(Plan(graph.name, setting.samples, (stage,), batch_norm="local", optimizer_slots=1), graph.network)


def _steady(seconds: list[float]) -> float:
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


@contextlib.contextmanager
def _baseline(calls: list[str]) -> Iterator[Baseline]:
    baseline = Baseline(calls)
    try:
        yield baseline
    finally:
        baseline.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _ddp_calls(setting: CoreSetting, workers: int, bucket: int) -> list[str]:
    port = _free_port()
    share = setting.samples // workers
    return [
        f"distributed({setting.model!r}, {setting.shape!r}, {share}, {rank}, {workers}, {port}, {bucket})"
        for rank in range(workers)
    ]


def bench_data_parallel(setting: CoreSetting, extent: DataParallelExtent, workers: int, say: Progress) -> Figures:
    """Compare the throughput over local workers with DistributedDataParallel, and the simulator's prediction with the
    measurement."""
    if setting.samples % workers:
        raise BadValue(f"--workers {workers} must divide the batch of {setting.samples}.")
    data = SameBatch(setting.model, setting.shape, setting.samples)
    graph, steps = _captured(setting, data), extent.steps + extent.warm_up_steps
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(open_session(Cluster.local(workers), threads=1))
        even = _even(setting, graph, session.cluster.names)
        plans = {mb: msgspec.structs.replace(even, bucket_bytes=mb * 10**6) for mb in BUCKETS_MB}

        def ours(mb: int) -> float:
            return statistics.median(_ours(session, graph, plans[mb], data, steps)[extent.warm_up_steps :])

        def theirs(baseline: Baseline) -> float:
            return statistics.median(baseline.run(steps)[extent.warm_up_steps :])

        say(f"data parallel, {setting}, both sides with each bucket size")
        tried: list[tuple[float, float, int]] = []
        for mb in BUCKETS_MB:  # one after another: several copies of large weights would not fit
            with _baseline(_ddp_calls(setting, workers, mb)) as baseline:
                tried += [(ours(mb), theirs(baseline), mb) for _ in range(extent.tuning)]
        best, their_best = (min(BUCKETS_MB, key=partial(_median_of, tried, side)) for side in (0, 1))
        baseline = stack.enter_context(_baseline(_ddp_calls(setting, workers, their_best)))
        theirs(baseline)
        predictions: list[float] = []
        pairs: list[tuple[float, float]] = []
        for block in range(extent.blocks):
            say(f"data parallel, {setting}, block {block + 1} of {extent.blocks}")
            if extent.is_predicted and block % MEASURED_EVERY == 0:
                cluster, profile = measure(session, graph, setting.samples, optimizer=OPTIMIZER, refresh=True)
                simulated = simulate(plans[best], graph.network, cluster, profile, keep_spans=False)
                predictions.append(simulated.seconds)
            pairs.append((ours(best), theirs(baseline)))
    measured = statistics.median(our for our, _ in pairs)
    figures: Figures = {
        "vs_ddp": statistics.median(their / our for our, their in pairs),
        "step_seconds": measured,
        "ddp_step_seconds": statistics.median(their for _, their in pairs),
        "setting": f"{setting}, {workers} workers of 1 thread, local batch norm, SGD momentum, default kernels, "
        f"buckets of {best} MB (faster of {BUCKETS_MB})",
        "ddp_setting": f"the same by DistributedDataParallel over gloo, buckets of {their_best} MB (faster of "
        f"{BUCKETS_MB}), gradient_as_bucket_view, broadcast_buffers off",
        "blocks": f"{extent.blocks} blocks of {steps} steps, the first {extent.warm_up_steps} of each left out; ours "
        f"{_listed([our for our, _ in pairs])} s, DDP {_listed([their for _, their in pairs])} s; "
        f"predicted {_listed(predictions) or 'not'} s",
    }  # fmt: skip
    if predictions:
        predicted = statistics.median(predictions)
        figures |= {"predicted_step_seconds": predicted, "sim_error": abs(predicted - measured) / measured}
    return figures


def bench_resnet18(workers: int, quick: bool, say: Progress) -> Figures:
    """Return the figures of data parallel training of a small network, whose steps are also predicted."""
    extent = DataParallelExtent(1, 2, 4) if quick else DataParallelExtent(2, 8, 8)
    figures = bench_data_parallel(DATA_PARALLEL, extent, workers, say)
    ratio, predicted = figures.pop("vs_ddp"), {name: figures.pop(name) for name in _PREDICTED}
    return {
        **({"dp_vs_ddp": ratio} if workers == 2 else {}), f"dp_vs_ddp_{workers}": ratio, "dp_workers": workers,
        **{_key(name): value for name, value in figures.items()}, **predicted,
    }  # fmt: skip


def bench_vgg16(workers: int, quick: bool, say: Progress) -> Figures:
    """Return the figures of data parallel training of a network with 500 MB of weights."""
    setting = QUICK_LARGE if quick else LARGE
    extent = DataParallelExtent(1, 1, 1, 1, False) if quick else DataParallelExtent(1, 3, 1, 1, False)
    figures = bench_data_parallel(setting, extent, workers, say)
    ratio = figures.pop("vs_ddp")
    return {f"dp_vs_ddp_vgg16_{workers}": ratio, **{f"{_key(name)}_vgg16": value for name, value in figures.items()}}


def _key(name: str) -> str:
    return name if name.startswith("ddp_") else f"dp_{name}"


def _median_of(tried: list[tuple[float, float, int]], side: int, mb: int) -> float:
    return statistics.median(round_[side] for round_ in tried if round_[2] == mb)


def bench_overhead(quick: bool, say: Progress) -> Figures:
    """Compare a training step through coordinator, worker and executor with the plain module's, both on one thread."""
    figures: Figures = {}
    worst = 0.0
    for setting in QUICK_OVERHEAD if quick else OVERHEAD:
        data = SameBatch(setting.model, setting.shape, setting.samples)
        graph = _captured(setting, data)
        blocks, steps = (2, 5) if quick else (7, 7)
        with contextlib.ExitStack() as stack:
            call = f"plain({setting.model!r}, {setting.shape!r}, {setting.samples})"
            baseline = stack.enter_context(_baseline([call]))
            session = stack.enter_context(open_session(Cluster.local(1), threads=1))
            plan = resolve(
                Plan(graph.name, setting.samples, (Stage((0, len(graph.network.layers)), session.cluster.names),)),
                graph.network,
            )
            baseline.run(1)
            ratios = []
            for block in range(blocks):
                say(f"overhead of {setting}, block {block + 1} of {blocks}")
                ours = _steady(_ours(session, graph, plan, data, steps))
                ratios.append(ours / _steady(baseline.run(steps)))
        key = f"capture_overhead_{setting.model}"
        figures[key] = statistics.median(ratios)
        figures[f"{key}_setting"] = (
            f"{setting}, 1 worker of 1 thread against the plain module; ratios {_listed(ratios)}"
        )
        worst = max(worst, statistics.median(ratios))
    return {"capture_overhead": worst, **figures}


def bench_ready(workers: int, quick: bool, say: Progress) -> Figures:
    """Measure the seconds from nothing to joined workers."""
    seconds = []
    for repeat in range(1 if quick else 3):
        say(f"starting {workers} workers, {repeat + 1}")
        close_fork_servers()
        start = time.perf_counter()
        with open_session(Cluster.local(workers)):
            seconds.append(time.perf_counter() - start)
    return {"ready_seconds": statistics.median(seconds), "ready_workers": workers}


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


@dataclass(frozen=True)
class CoreBench:
    """The parts of the benchmark, by name."""

    workers: int
    quick: bool
    say: Progress

    def transport(self) -> Figures:
        return bench_engine(self.quick, self.say)

    def ready(self) -> Figures:
        return bench_ready(max(4, self.workers), self.quick, self.say)

    def ddp(self) -> Figures:
        return bench_resnet18(self.workers, self.quick, self.say)

    def vgg16(self) -> Figures:
        return bench_vgg16(self.workers, self.quick, self.say)

    def demo(self) -> Figures:
        return bench_demo(self.quick, self.say)

    def overhead(self) -> Figures:
        return bench_overhead(self.quick, self.say)


PARTS: Mapping[str, Callable[[CoreBench], Figures]] = {
    "transport": CoreBench.transport, "ready": CoreBench.ready, "ddp": CoreBench.ddp, "vgg16": CoreBench.vgg16,
    "demo": CoreBench.demo, "overhead": CoreBench.overhead,
}  # fmt: skip


def bench_core(
    workers: int = 2, quick: bool = False, *, only: Sequence[str] = (), on_progress: Progress | None = None
) -> Figures:
    """Return every figure of `manyhands bench core`, flat. `only`: the parts to run; by default all."""
    check_asked(PARTS, only, quick, False)
    say = on_progress or (lambda text: None)
    cores = usable_cores()
    if workers > cores:
        raise BadValue(
            f"--workers {workers}: this machine has {cores} core(s), and two workers on one core measure nothing.",
            hint=f"Use --workers {cores} or fewer.",
        )
    return measure_parts(PARTS, CoreBench(workers, quick, say), only=only, quick=quick, out=None, say=say)

"""Figures of `manyhands bench core`: training through transport, executor and runtime, against what people use today.

Every ratio is taken inside one run: both sides stay alive and take turns, block by block, and the median of the
blocks' ratios counts.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator
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
from manyhands.profiler.this_machine import identify
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


DATA_PARALLEL = CoreSetting("resnet18", (3, 64, 64), 32)
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


def bench_data_parallel(workers: int, quick: bool, say: Progress) -> Figures:
    """Compare the throughput over local workers with DistributedDataParallel, and the simulator's prediction with the
    measurement."""
    setting, tuning, blocks, steps = DATA_PARALLEL, *((1, 2, 6) if quick else (2, 12, 16))
    if setting.samples % workers:
        raise BadValue(f"--workers {workers} must divide the batch of {setting.samples}.")
    data = SameBatch(setting.model, setting.shape, setting.samples)
    graph = _captured(setting, data)
    with contextlib.ExitStack() as stack:
        baselines = {mb: stack.enter_context(_baseline(_ddp_calls(setting, workers, mb))) for mb in BUCKETS_MB}
        session = stack.enter_context(open_session(Cluster.local(workers), threads=1))
        even = _even(setting, graph, session.cluster.names)
        plans = {mb: msgspec.structs.replace(even, bucket_bytes=mb * 10**6) for mb in BUCKETS_MB}

        def ours(mb: int) -> float:
            return _steady(_ours(session, graph, plans[mb], data, steps))

        def theirs(mb: int) -> float:
            return _steady(baselines[mb].run(steps))

        say("data parallel, both sides with each bucket size")
        tried = [(ours(mb), theirs(mb), mb) for _ in range(tuning) for mb in BUCKETS_MB]
        best, their_best = (min(BUCKETS_MB, key=partial(_median_of, tried, side)) for side in (0, 1))
        predictions: list[float] = []
        pairs: list[tuple[float, float]] = []
        for block in range(blocks):
            say(f"data parallel, block {block + 1} of {blocks}")
            if block % MEASURED_EVERY == 0:
                cluster, profile = measure(session, graph, setting.samples, optimizer=OPTIMIZER, refresh=True)
                simulated = simulate(plans[best], graph.network, cluster, profile, keep_spans=False)
                predictions.append(simulated.seconds)
            pairs.append((ours(best), theirs(their_best)))
    measured, predicted = statistics.median(our for our, _ in pairs), statistics.median(predictions)
    return {
        "dp_vs_ddp": statistics.median(their / our for our, their in pairs),
        "dp_step_seconds": measured,
        "ddp_step_seconds": statistics.median(their for _, their in pairs),
        "dp_workers": workers,
        "predicted_step_seconds": predicted,
        "sim_error": abs(predicted - measured) / measured,
        "dp_setting": f"{setting}, {workers} workers of 1 thread, local batch norm, SGD momentum, default kernels, "
        f"buckets of {best} MB (faster of {BUCKETS_MB})",
        "ddp_setting": f"the same by DistributedDataParallel over gloo, buckets of {their_best} MB (faster of "
        f"{BUCKETS_MB}), gradient_as_bucket_view, broadcast_buffers off",
        "dp_blocks": f"{blocks} blocks of {steps} steps, the first {WARM_UP_STEPS} of each left out; ours "
        f"{_listed([our for our, _ in pairs])} s, DDP {_listed([their for _, their in pairs])} s; "
        f"predicted {_listed(predictions)} s",
    }


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


def bench_core(workers: int = 2, quick: bool = False, on_progress: Progress | None = None) -> Figures:
    """Return every figure of `manyhands bench core`, flat."""
    say = on_progress or (lambda text: None)
    cores = usable_cores()
    if workers > cores:
        raise BadValue(
            f"--workers {workers}: this machine has {cores} core(s), and two workers on one core measure nothing.",
            hint=f"Use --workers {cores} or fewer.",
        )
    figures: Figures = {"machine": identify(1).text}
    figures |= bench_engine(quick, say)
    figures |= bench_ready(max(4, workers), quick, say)
    figures |= bench_data_parallel(workers, quick, say)
    figures |= bench_demo(quick, say)
    figures |= bench_overhead(quick, say)
    return figures

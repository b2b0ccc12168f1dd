"""Figures of `manyhands bench pipeline`: planning time and optimality, plans beside those of the baselines (simulated
with the device catalogue), and pipelines measured beside PyTorch's own."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from manyhands.explaining.comparison import ALONE, HETPIPE, Comparison, compare
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing, estimate_cluster
from manyhands.planner.context import Batch, PlanningContext
from manyhands.planner.hybrid import Search, pipelines
from manyhands.planner.steps import Steps
from manyhands.plans.networks import load_network
from manyhands.profiler.this_machine import identify
from manyhands.simulator.simulate import simulate
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.papers import ASTEROID_TABLE_2, ASTEROID_TABLE_4
from manyhands_bench.parts import PROFILE_MACHINE
from manyhands_bench.pipeline import measured
from manyhands_bench.pipeline.exhaustive import Exhaustive
from manyhands_bench.pipeline.offloading import offloaded
from manyhands_bench.pipeline.overhead import executor_overhead
from manyhands_bench.pipeline.studies import draw_pipeline_studies

REPEATS = 5
DRAWN = 400
LOCAL_NORM = Batch(1, 1, is_synchronised=False)
"""As in the paper: every device normalises by its own samples."""


@dataclass(frozen=True)
class Table4Network:
    """A network of the paper's Table 4, with its input and mini-batch."""

    model: str
    shape: tuple[int, ...] | None
    batch_size: int


SUBJECTS = (
    Table4Network("efficientnet-b1", (3, 32, 32), 2048),
    Table4Network("mobilenetv2", (3, 32, 32), 2048),
    Table4Network("resnet50", (3, 224, 224), 256),
    Table4Network("bert-small", None, 2048),
)
ENVIRONMENTS = ("env-a", "env-b", "env-b-1000", "env-c")


@cache
def network_of(subject: Table4Network, granularity: str = "blocks") -> Network:
    return load_network(subject.model, subject.shape, granularity)


def bench_planner(quick: bool, say: Progress) -> Figures:
    """Measure the seconds to plan: the largest network cut anywhere on six devices, and a wide cluster."""
    repeats = 1 if quick else REPEATS
    say("planning times")
    fine = network_of(SUBJECTS[0], "operators")
    cluster = preset("env-c")
    profile = estimate_cluster(fine, cluster)

    def plan_fine(micro_batches: int | None) -> None:
        pipelines(fine, cluster, profile, SUBJECTS[0].batch_size, micro_batches=micro_batches, like=LOCAL_NORM)

    wide = _wide_cluster()
    resnet = network_of(SUBJECTS[2])
    profile_of_64 = estimate_cluster(resnet, wide)
    return {
        "plan_seconds": _median_seconds(repeats, lambda: plan_fine(None)),
        "plan_seconds_given_micro_batches": _median_seconds(repeats, lambda: plan_fine(32)),
        "plan_seconds_64_devices": _median_seconds(
            1 if quick else 3, lambda: pipelines(resnet, wide, profile_of_64, 1024, like=LOCAL_NORM)
        ),
        "plan_layers": len(fine.layers),
        "plan_setting": f"efficientnet-b1 3x32x32 cut at operators ({len(fine.layers)} layers), env-c, batch 2048, "
        "micro-batches chosen (and given: 32); resnet50 on 16 NX, 16 TX2, 16 Nano, 16 Pi 4, batch 1024; medians",
    }


def _median_seconds(repeats: int, act: Callable[[], object]) -> float:
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _wide_cluster() -> Cluster:
    kinds = ("jetson-nx", "jetson-tx2", "jetson-nano", "pi4")
    devices = [{"kind": kind, "count": 16, "port": "1000 Mbit/s"} for kind in kinds]
    return Cluster.from_dict(
        {"name": "wide", "devices": devices, "link": {"rate": "1000 Mbit/s", "delay": "0.3 ms"}}
    )  # fmt: skip


def bench_optimality(quick: bool, say: Progress) -> Figures:
    """Compare the search with every pipeline of drawn instances; count how often a single candidate for each place, as
    in the paper, misses the optimum; compare Algorithm 1 with exact shares."""
    say("drawn instances against exhaustive search")
    gaps, missed, losses = [], 0, []
    algorithm_1: dict[int, list[float]] = {1: [], 2: [], 4: []}
    network = network_of(Table4Network("tiny", None, 8))
    for cluster, profile, batch in _drawn(network, 40 if quick else DRAWN):
        best = min((seconds for seconds, _ in Exhaustive(network, cluster, profile, batch).all()), default=None)
        steps = Steps(PlanningContext(network, cluster, profile, batch.samples, batch.optimizer_slots), batch)
        pareto, single = Search(steps).best(), Search(steps, keep_fronts=False).best()
        if best is None:
            assert pareto is None, "a plan was found where there is none"
            continue
        assert pareto is not None
        gaps.append(pareto.seconds / best - 1)
        if single is None or single.seconds > best * (1 + 1e-9):
            missed += 1
            losses.append(single.seconds / best - 1 if single is not None else float("inf"))
        for block, block_gaps in algorithm_1.items():
            block_gaps.extend(_algorithm_1_gaps(network, cluster, profile, batch, block))
    return {
        "optimality_gap": max(gaps), "optimality_instances": len(gaps), "recurrence_misses_part": missed / len(gaps),
        "recurrence_worst_loss": max(losses, default=0.0),
        **{f"algorithm_1_gap_block_{block}": statistics.mean(block_gaps) for block, block_gaps in algorithm_1.items()},
        "algorithm_1_worst_gap": max(max(block_gaps) for block_gaps in algorithm_1.values()),
        "optimality_setting": f"{network.name}, {len(network.layers)} layers, 2 to 4 drawn devices, ladders, links, "
        "memory and micro-batches (seed 6); every cut, group and share; gap of Algorithm 1: its slowest device",
    }  # fmt: skip


def _drawn(network: Network, count: int) -> Iterator[tuple[Cluster, Profile, Batch]]:
    draw = random.Random(6)
    for _ in range(count):
        devices, profiles = [], {}
        for number in range(draw.randint(2, 4)):
            name, speed = f"d{number}", draw.choice((1.0, 2.5, 3.3, 10.0))
            memory = draw.choice((2 * 10**5, 10**6, 10**8))
            port = draw.choice((1e5, 1e6))
            devices.append(
                Device(name=name, gflops=1.0, memory_bytes=memory, up_bytes_per_second=port, down_bytes_per_second=port)
            )
            layers = []
            for layer in network.layers:
                each = draw.uniform(0.2, 2.0) * 1e-3 / speed
                times = [each * size ** draw.uniform(0.6, 1.0) for size in (1, 2, 4, 8)]
                steady = [max(times[: place + 1]) for place in range(4)]
                ladder = [Timing(size, seconds, 2 * seconds) for size, seconds in zip((1, 2, 4, 8), steady)]
                layers.append(LayerTiming(layer.name, tuple(ladder)))
            profiles[name] = DeviceProfile(
                network.name, network.fingerprint, network.input_text, network.granularity, name, "measured",
                tuple(layers),
            )  # fmt: skip
        cluster = Cluster("drawn", tuple(devices), Link(draw.choice((1e5, 1e9)), draw.choice((0.0, 1e-3))))
        yield cluster, Profile(profiles), Batch(draw.randint(2, 8), draw.randint(1, 8), 1, draw.random() < 0.5)


def _algorithm_1_gaps(
    network: Network, cluster: Cluster, profile: Profile, batch: Batch, block: int
) -> Iterator[float]:
    """Yield how much slower Algorithm 1's shares are than the best, with all devices on the whole network; nothing if
    there are more devices than samples."""
    exhaustive, layers = Exhaustive(network, cluster, profile, batch), len(network.layers)
    names = exhaustive.names
    if len(names) > batch.samples:
        return

    def seconds_of(name: str) -> Callable[[int], float]:
        return lambda samples: sum(exhaustive.times(name, 0, layers, samples))

    seconds = [seconds_of(name) for name in names]
    shares = offloaded(seconds, [batch.samples] * len(names), batch.samples, block)
    roomy = msgspec.structs.replace(
        cluster, devices=tuple(msgspec.structs.replace(device, memory_bytes=10**15) for device in cluster.devices)
    )
    best = Exhaustive(network, roomy, profile, batch).shares(0, layers, names, 1)
    assert shares is not None
    assert best is not None
    slowest = [max(device_seconds(y) for device_seconds, y in zip(seconds, share)) for share in (shares, best)]
    yield slowest[0] / slowest[1] - 1


def bench_prediction(quick: bool, say: Progress) -> Figures:
    """Compare the planner's prediction for its plans (Eq. 4-6) with the simulator's."""
    errors: dict[str, float] = {}
    for subject in SUBJECTS[1:2] if quick else SUBJECTS:
        network = network_of(subject)
        for environment in ("env-a", "env-b", "env-c", "env-d"):
            say(f"prediction, {subject.model} on {environment}")
            cluster = preset(environment)
            profile = estimate_cluster(network, cluster)
            best = pipelines(network, cluster, profile, subject.batch_size, like=LOCAL_NORM)[0]
            simulated = simulate(best.plan(network), network, cluster, profile, keep_spans=False).seconds
            errors[f"{subject.model} {environment}"] = abs(best.seconds - simulated) / simulated
    worst = max(errors, key=errors.__getitem__)
    return {
        "prediction_error": statistics.median(errors.values()),
        "prediction_error_worst": errors[worst],
        "prediction_setting": f"planner against simulator, {len(errors)} plans; worst: {worst}; "
        + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()),
    }


def bench_table_4(quick: bool, say: Progress) -> Figures:
    """Return the simulated speed-ups of our plans beside the paper's Table 4, and communication beside its Table 2."""
    figures: Figures = {}
    lines, least = [], float("inf")
    for subject in SUBJECTS[1:2] if quick else SUBJECTS:
        network = network_of(subject)
        for environment in ENVIRONMENTS:
            say(f"Table 4, {subject.model} on {environment}")
            table = compare(network, preset(environment), batch_size=subject.batch_size, batch_norm="local")
            ours, baseline = table.ours, table.best_baseline()
            against = {name: _over(table, name) for name in (ALONE, "data parallel", "pipeline parallel")}
            key = f"{subject.model}_{environment}".replace("-", "_")
            if baseline is not None:
                least = min(least, baseline.seconds / ours.seconds)
                figures[f"vs_best_rival_{key}"] = baseline.seconds / ours.seconds
            for short, name in (("device", ALONE), ("dp", "data parallel"), ("pp", "pipeline parallel")):
                if against[name] is not None:
                    figures[f"speedup_{short}_{key}"] = against[name] or 0.0
            paper = ASTEROID_TABLE_4.get((subject.model, environment))
            lines.append(
                f"{subject.model} {environment}: "
                + "/".join("OOM" if ratio is None else f"{ratio:.1f}" for ratio in against.values())
                + (f" (paper {'/'.join(map(str, paper))})" if paper else "")
                + f", best baseline {baseline.name if baseline else 'none'}; {table.why}"
            )
            if environment == "env-a" and subject.model in ASTEROID_TABLE_2:
                figures[f"volume_mb_hpp_{subject.model}".replace("-", "_")] = ours.volume / 1e6
                figures[f"volume_mb_hdp_{subject.model}".replace("-", "_")] = table.row(HETPIPE).volume / 1e6
    return {
        "table4_min_vs_rivals": least,
        **figures,
        "table4": "over the best device / data parallel / pipeline parallel, simulated with the catalogue, batch norm "
        "local; OOM: the baseline runs out of memory. " + " | ".join(lines),
        "table2_paper": "; ".join(
            f"{model}: HDP {hdp} MB, HPP {hpp} MB" for model, (hdp, hpp) in ASTEROID_TABLE_2.items()
        ),
    }


def _over(table: Comparison, name: str) -> float | None:
    row = table.row(name)
    return row.seconds / table.ours.seconds if row.runs else None


def bench_pipeline(
    quick: bool = False, full: bool = False, out: Path | None = None, on_progress: Progress | None = None
) -> Figures:
    """Return every figure of `manyhands bench pipeline`, flat; `full` draws the paper's studies into `out` too."""
    say = on_progress or (lambda text: None)
    figures: Figures = {"machine": identify(1).text, "quick": int(quick), PROFILE_MACHINE: ESTIMATED}
    figures |= executor_overhead(say, quick)
    figures |= measured.bench_local(say, quick)
    figures |= measured.bench_lab(say, quick)
    figures |= measured.summary(figures)
    figures |= bench_planner(quick, say)
    figures |= bench_optimality(quick, say)
    figures |= bench_prediction(quick, say)
    figures |= bench_table_4(quick, say)
    if full:
        figures |= draw_pipeline_studies(out or Path("pipeline-studies"), quick, say)
    return figures

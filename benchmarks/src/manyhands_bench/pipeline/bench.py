"""Figures of `manyhands bench pipeline`: planning time and optimality, plans beside those of the baselines (simulated
with the device catalogue), and pipelines measured beside PyTorch's own."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing, estimate_cluster
from manyhands.planner.context import Batch, PlanningContext
from manyhands.planner.hybrid import Search, pipelines
from manyhands.planner.steps import Steps
from manyhands.plans.networks import load_network
from manyhands.simulator.simulate import simulate
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE, check_asked, measure_parts
from manyhands_bench.pipeline import measured
from manyhands_bench.pipeline.exhaustive import Exhaustive
from manyhands_bench.pipeline.hybrid_lab import QUICK_EXTENT, HybridExtent, bench_hybrid
from manyhands_bench.pipeline.offloading import offloaded
from manyhands_bench.pipeline.overhead import executor_overhead
from manyhands_bench.pipeline.paper_tables import SUBJECTS, bench_paper_tables, network_of
from manyhands_bench.pipeline.studies import draw_accuracy, draw_pipeline_studies, draw_scaling

REPEATS = 5
DRAWN = 400
LOCAL_NORM = Batch(1, 1, is_synchronised=False)
"""As in the paper: every device normalises by its own samples."""


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
        **_planning_by_network(repeats, say),
        "plan_layers": len(fine.layers),
        "plan_setting": f"{fine.name} {fine.input_text} cut at operators ({len(fine.layers)} layers), env-c, batch "
        "2048, micro-batches chosen (and given: 32); resnet50 on 16 NX, 16 TX2, 16 Nano, 16 Pi 4, batch 1024; medians",
    }


def _planning_by_network(repeats: int, say: Progress) -> Figures:
    """Return Table 7: the seconds to plan each of the paper's networks on environment C, cut at operators."""
    figures: Figures = {}
    cluster = preset("env-c")
    for subject in SUBJECTS:
        say(f"planning time of {subject.paper}")
        network = network_of(subject, "operators")
        profile, key = estimate_cluster(network, cluster), subject.paper.replace("-", "_")

        def act(network: Network = network, profile: Profile = profile, size: int = subject.batch_size) -> None:
            pipelines(network, cluster, profile, size, like=LOCAL_NORM)

        figures[f"plan_seconds_{key}"] = _median_seconds(repeats, act)
        figures[f"plan_layers_{key}"] = len(network.layers)
    return figures


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
    network = load_network("tiny")
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
            say(f"prediction, {subject.paper} on {environment}")
            cluster = preset(environment)
            profile = estimate_cluster(network, cluster)
            best = pipelines(network, cluster, profile, subject.batch_size, like=LOCAL_NORM)[0]
            simulated = simulate(best.plan(network), network, cluster, profile, keep_spans=False).seconds
            errors[f"{subject.paper} {environment}"] = abs(best.seconds - simulated) / simulated
    worst = max(errors, key=errors.__getitem__)
    return {
        "prediction_error": statistics.median(errors.values()),
        "prediction_error_worst": errors[worst],
        "prediction_setting": f"planner against simulator, {len(errors)} plans; worst: {worst}; "
        + ", ".join(f"{name} {error:.1%}" for name, error in errors.items()),
    }


@dataclass(frozen=True)
class PipelineBench:
    """The settings that every part of the bench is given."""

    quick: bool
    say: Progress
    out: Path | None = None
    """Where a part that goes on after an interruption stores what it has measured."""


def _beside_torch(bench: PipelineBench) -> Figures:
    figures = measured.bench_local(bench.say, bench.quick) | measured.bench_lab(bench.say, bench.quick)
    return figures | measured.summary(figures)


STUDIES = Path("pipeline-studies")
PARTS: dict[str, Callable[[PipelineBench], Figures]] = {
    "overhead": lambda bench: executor_overhead(bench.say, bench.quick),
    "torch": _beside_torch,
    "planning": lambda bench: bench_planner(bench.quick, bench.say),
    "optimality": lambda bench: bench_optimality(bench.quick, bench.say),
    "prediction": lambda bench: bench_prediction(bench.quick, bench.say),
    "paper": lambda bench: bench_paper_tables(bench.quick, bench.say),
    "studies": lambda bench: draw_pipeline_studies(bench.out or STUDIES, bench.quick, bench.say),
    "scaling": lambda bench: draw_scaling(bench.out or STUDIES, bench.quick, bench.say),
    "accuracy": lambda bench: draw_accuracy(bench.out or STUDIES, bench.quick, bench.say),
    "hybrid": lambda bench: bench_hybrid(QUICK_EXTENT if bench.quick else HybridExtent(), bench.out, bench.say),
}
"""The first two and the last are measured and need a quiet machine; those from "prediction" to "accuracy" are simulated
with the catalogue, the same on any machine."""


LONG = ("studies", "scaling", "accuracy", "hybrid")
"""Parts that run only with `--full`, or if they are asked for."""


def bench_pipeline(
    quick: bool = False, full: bool = False, only: Sequence[str] = (), out: Path | None = None,
    on_progress: Progress | None = None,
) -> Figures:  # fmt: skip
    """Return the figures of `manyhands bench pipeline`, flat, of the usual parts or of those in `only`; `full` runs all
    of them. Studies are drawn into `out`."""
    say = on_progress or (lambda text: None)
    check_asked(PARTS, only, quick, full)
    parts = only or [name for name in PARTS if full or name not in LONG]
    figures = measure_parts(PARTS, PipelineBench(quick, say, out), only=parts, quick=quick, out=None, say=say)
    figures[PROFILE_MACHINE] = ESTIMATED
    return figures

"""The pipeline paper's studies as pictures: ablation, warm-up policies, scaling, time to an accuracy, energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.nn.functional import cross_entropy

from manyhands.data.digits import load_digits
from manyhands.data.loader import length
from manyhands.explaining.comparison import ALONE, OURS, compare
from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.models.registry import build
from manyhands.planner.baselines import average
from manyhands.planner.context import Batch, by_memory
from manyhands.planner.hybrid import pipelines
from manyhands.planner.task import Task
from manyhands.plans.networks import load_network
from manyhands.plans.pipelines import pipeline_plan
from manyhands.plans.simulating import simulate
from manyhands.simulator.result import Simulation
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.motivation import motivation
from manyhands_bench.pipeline.paper_tables import SUBJECTS
from manyhands_bench.pipeline.plots import draw_accuracies, draw_bars, draw_policies

SMALL_INPUT = (3, 32, 32)
MODELS = ("efficientnet-b1-32", "mobilenetv2-32")
"""The paper's networks for CIFAR-10, in their variants for pictures of that size."""
POLICIES: tuple[WarmUp, ...] = ("2(P-p)", "P-p", "2(P-p)+1", "2(P-p)-1")
LOCAL_NORM = Batch(1, 1, is_synchronised=False)
SAMPLES_EACH = 32
MICRO_BATCHES_OF_SCALING = 8
TARGET, MOST_EPOCHS, BATCH_OF_ACCURACY = 0.9, 14, 64


SETTING: Figures = {
    "studies_setting": "simulated with the catalogue's numbers, batch norm local; in Fig. 14 the accuracy is measured "
    f"({MODELS[1]} trained here on the bundled digits), the time simulated",
}


def draw_pipeline_studies(out: Path, quick: bool, say: Progress) -> Figures:
    """Draw Fig. 15 in `out`, and return the numbers of Fig. 1, 5 and 15 and of energy."""
    out.mkdir(parents=True, exist_ok=True)
    figures = _ablation(out, MODELS[1:] if quick else MODELS, say)
    figures |= _policies(out, MODELS[1] if quick else MODELS[0], say)
    figures |= _energy(MODELS[1] if quick else MODELS[0], say)
    figures |= motivation(SUBJECTS[1:2] if quick else SUBJECTS, say)
    return figures | SETTING


def draw_scaling(out: Path, quick: bool, say: Progress) -> Figures:
    """Draw Fig. 18 in `out`, and return its numbers."""
    out.mkdir(parents=True, exist_ok=True)
    return _scaling(out, MODELS[1:] if quick else MODELS, 3 if quick else 8, say) | SETTING


def draw_accuracy(out: Path, quick: bool, say: Progress) -> Figures:
    """Draw Fig. 14 in `out`, and return its numbers."""
    out.mkdir(parents=True, exist_ok=True)
    return _time_to_accuracy(out, 2 if quick else MOST_EPOCHS, say) | SETTING


def _runs(plan: Plan, network: Network, cluster: Cluster) -> tuple[float, Simulation]:
    """Return samples per second, 0 if a device runs out of memory, and the simulation."""
    result = simulate(plan, network, cluster, keep_spans=False)
    fits = all(device.peak_bytes <= device.memory_bytes for device in result.devices.values())
    return (result.samples_per_second if fits else 0.0), result


def _ablation(out: Path, models: Sequence[str], say: Progress) -> Figures:
    """Draw Fig. 15a: no planning for unequal devices, planning of stages, and of shares and memory too."""
    cluster = preset("env-c")
    figures: Figures = {}
    speeds: dict[str, list[float]] = {"naive": [], "stages planned": [], "stages and shares planned": []}
    for model in models:
        say(f"ablation, {model}")
        network = load_network(model)
        profile = estimate_cluster(network, cluster)
        ours = pipelines(network, cluster, profile, 2048, like=LOCAL_NORM, may_be_alone=False)[0].plan(network)
        roomy = _without_limits(cluster, cluster.link)
        stages = pipelines(network, roomy, estimate_cluster(network, roomy), 2048, like=LOCAL_NORM, may_be_alone=False)
        for name, plan in (
            ("naive", _naive(network, cluster)),
            ("stages planned", _evenly_shared(stages[0].plan(network))),
            ("stages and shares planned", ours),
        ):
            speed, _ = _runs(resolve(plan, network, cluster), network, cluster)
            speeds[name].append(speed)
            figures[f"ablation_{name.replace(' ', '_')}_{model}".replace("-", "_")] = speed
    draw_bars(models, speeds, out / "fig_15a.png", up="samples/s", title="Fig. 15a: what planning brings, env-c")
    return figures


def _without_limits(cluster: Cluster, link: Link) -> Cluster:
    devices = tuple(msgspec.structs.replace(device, memory_bytes=10**18) for device in cluster.devices)
    return Cluster("without limits", devices, link)


def _naive(network: Network, cluster: Cluster) -> Plan:
    """Plan as if devices were equal, and links and memory unlimited."""
    endless = [
        msgspec.structs.replace(
            cluster.devices[0], name=name, memory_bytes=10**18, up_bytes_per_second=1e15, down_bytes_per_second=1e15
        )
        for name in by_memory(cluster)
    ]
    alike = Cluster("alike", tuple(endless), Link(1e15, 0.0))
    task = Task(network, cluster, estimate_cluster(network, cluster), 2048)
    mean = average(task).of("any")
    profile = msgspec.structs.replace(task.profile, devices=dict.fromkeys(alike.names, mean))
    return pipelines(network, alike, profile, 2048, like=LOCAL_NORM, may_be_alone=False)[0].plan(network)


def _evenly_shared(plan: Plan) -> Plan:
    size = plan.micro_batch_size
    stages = []
    for stage in plan.stages:
        count = len(stage.devices)
        even = BySamples(tuple(size // count + (place < size % count) for place in range(count)))
        stages.append(msgspec.structs.replace(stage, share=even) if count > 1 else stage)
    return msgspec.structs.replace(plan, stages=tuple(stages))


def _policies(out: Path, model: str, say: Progress) -> Figures:
    """Draw Fig. 15b, three stages on three TX2: memory by order, memory and throughput by warm-up policy."""
    say("warm-up policies")
    document = {"devices": [{"kind": "jetson-tx2", "name": "tx2", "count": 3, "port": "100 Mbit/s"}]}
    cluster = Cluster.from_dict({"name": "tx2x3", **document, "link": {"rate": "100 Mbit/s", "delay": "0.3 ms"}})
    network = load_network(model)
    plans = pipelines(network, cluster, estimate_cluster(network, cluster), 2048, micro_batches=16, like=LOCAL_NORM)
    cuts = [stage.first for stage in plans[0].stages[1:]] if len(plans[0].stages) == 3 else None
    options = {"batch_size": 2048, "micro_batches": 16, "batch_norm": "local"}
    results = {
        policy: _runs(pipeline_plan(network, cluster, cuts, warm_up=policy, **options), network, cluster)  # type: ignore[arg-type]
        for policy in POLICIES
    }
    memory = [max(device.peak_bytes for device in results[policy][1].devices.values()) for policy in POLICIES]
    speed = [results[policy][1].samples_per_second for policy in POLICIES]
    draw_policies(POLICIES, memory, speed, out / "fig_15b_policies.png", f"Fig. 15b: warm-up policies, {model}, 3 TX2")
    gpipe = pipeline_plan(network, cluster, cuts, order="gpipe", **options)  # type: ignore[arg-type]
    parallel = pipeline_plan(network, cluster, [], [list(cluster.names)], **options)  # type: ignore[arg-type]
    by_order = {
        "1F1B": results["2(P-p)-1"][1],
        "backward after forward": _runs(gpipe, network, cluster)[1],
        "data parallel": _runs(parallel, network, cluster)[1],
    }
    bars = {name: [device.peak_bytes / 1e6 for device in result.devices.values()] for name, result in by_order.items()}
    draw_bars(
        cluster.names, bars, out / "fig_15b_memory.png", up="peak MB", title=f"Fig. 15b: memory by order, {model}"
    )
    figures: Figures = {}
    for policy, peak, rate in zip(POLICIES, memory, speed):
        key = {"2(P-p)": "a", "P-p": "b", "2(P-p)+1": "c", "2(P-p)-1": "ours"}[policy]
        figures[f"policy_{key}_peak_mb"], figures[f"policy_{key}_samples_per_second"] = peak / 1e6, rate
    return figures


def _scaling(out: Path, models: Sequence[str], most: int, say: Progress) -> Figures:
    """Draw Fig. 18, one to eight Nanos with 32 samples each: ours, data parallel, GPipe."""
    figures: Figures = {}
    for model in models:
        network = load_network(model)
        names = (OURS, "data parallel", "GPipe")
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for count in range(1, most + 1):
            say(f"scaling, {model}, {count} Nano(s)")
            device = {"kind": "jetson-nano", "name": "nano", "count": count, "port": "100 Mbit/s"}
            cluster = Cluster.from_dict(
                {"name": f"nano:{count}", "devices": [device], "link": {"rate": "100 Mbit/s", "delay": "0.3 ms"}}
            )
            size = SAMPLES_EACH * count * MICRO_BATCHES_OF_SCALING
            table = compare(
                network, cluster, batch_size=size, micro_batches=MICRO_BATCHES_OF_SCALING, batch_norm="local"
            )  # fmt: skip
            for name in names:
                row = table.row(name if count > 1 else ALONE)
                speeds[name].append(row.samples_per_second if row.runs else 0.0)
        path = out / f"fig_18_{model}.png".replace("-", "_")
        title = f"Fig. 18: {model}, {SAMPLES_EACH} samples each in a micro-batch, 100 Mbit/s"
        draw_bars([str(n) for n in range(1, most + 1)], speeds, path, up="samples/s", title=title, across="Nanos")
        figures[f"scaling_{most}_over_1_{model}".replace("-", "_")] = speeds[OURS][-1] / speeds[OURS][0]
        if speeds["data parallel"][-1]:
            key = f"scaling_{most}_vs_data_parallel_{model}".replace("-", "_")
            figures[key] = speeds[OURS][-1] / speeds["data parallel"][-1]
    return figures


def _energy(model: str, say: Progress) -> Figures:
    """Return the joules of a sample on environment D against data parallel (§5.7)."""
    say("energy")
    table = compare(load_network(model), preset("env-d"), batch_size=2048, batch_norm="local")
    ours, parallel = table.ours.joules_per_sample, table.row("data parallel").joules_per_sample
    return {"joules_per_sample": ours, "joules_per_sample_data_parallel": parallel, "joules_ratio": parallel / ours}


def _time_to_accuracy(out: Path, epochs: int, say: Progress) -> Figures:
    """Draw Fig. 14: all ways compute the same, so one measured curve serves them; an epoch takes each its own time."""
    from manyhands.training.train import train

    data = load_digits(input_shape=SMALL_INPUT)
    model = build(MODELS[1])
    accuracies: list[float] = []
    for epoch in range(epochs):
        say(f"time to accuracy, epoch {epoch + 1} of {epochs}")
        result = train(
            model, data.train, loss=cross_entropy, optimizer=Optimizer("Adam", lr=1e-3), batch_size=BATCH_OF_ACCURACY,
            epochs=1, cluster=Cluster.local(1), plan="single", test=data.test, seed=epoch,
            folder=out / f"epoch-{epoch}",
        )  # fmt: skip
        accuracies.append(result.accuracy or 0.0)
        if accuracies[-1] >= TARGET:
            break
    network = load_network(MODELS[1])
    figures: Figures = {"accuracy_reached": accuracies[-1], "epochs_to_target": len(accuracies)}
    for environment in ("env-b", "env-c"):
        try:
            table = compare(
                network, preset(environment), batch_size=BATCH_OF_ACCURACY, optimizer_slots=2, batch_norm="local"
            )
        except ManyhandsError:
            continue
        rounds = length(data.train) / BATCH_OF_ACCURACY
        seconds = {row.name: row.seconds * rounds for row in table.rows if row.runs and row.is_synchronous}
        title = f"Fig. 14: {MODELS[1]} on the digits, {environment}"
        draw_accuracies(accuracies, seconds, TARGET, out / f"fig_14_{environment}.png", title)
        ours = seconds.pop(OURS)
        for name, each in seconds.items():
            key = f"time_to_accuracy_vs_{name}_{environment}".lower().replace(" ", "_").replace("-", "_")
            figures[key] = each / ours
    return figures

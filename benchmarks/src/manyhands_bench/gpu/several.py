"""Several workers of which some compute on a GPU: two on the same one, and one beside processors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage, plan_line
from manyhands.runtime.coordinator import Coordinator
from manyhands.session.session import usable_cores
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.gpu.networks import GpuNetwork, loss

SHARED_STEPS = 12
SHARED_WAYS = ("samples", "stages", "tiles")
MIXED_STEPS = 12
"""Steps of each side with a slowed GPU, which takes seconds for one."""
MOST_CPU_WORKERS = 4
JETSON = "jetson-orin-nano"
"""The device of the catalogue at whose speed a GPU stands for a small one."""


def shared_gpu(network: GpuNetwork, way: str) -> Figures:
    """Return the bytes of tensors that two workers on one GPU exchange through the machine's memory, and the seconds of
    a step."""
    model, (inputs, targets) = network.build(), network.data(2)
    cluster, example = Cluster.local(2, gpus=[0, 0]), inputs[:2]
    plan = _plan(way, network.batch_size, mh.capture(model, example).network, cluster.names)
    with TemporaryDirectory() as folder:
        result = mh.train(
            model, TensorDataset(inputs, targets), loss=loss, optimizer=mh.Optimizer("SGD", lr=0.01),
            batch_size=network.batch_size, steps=SHARED_STEPS, cluster=cluster, plan=plan, verify=False,
            folder=Path(folder) / "run",
        )  # fmt: skip
    return {
        f"bytes_through_host_{way}": sum(log.host_bytes for log in result.logs.values()),
        f"shared_gpu_{way}_step_seconds": result.measured_seconds,
    }


def _plan(way: str, batch_size: int, network: Network, names: tuple[str, ...]) -> Plan:
    half, layers = batch_size // 2, len(network.layers)
    if way == "stages":
        stages = (Stage((0, layers // 2), names[:1]), Stage((layers // 2, layers), names[1:]))
        return Plan(network.name, batch_size, stages, micro_batches=4)
    share = BySamples((half, batch_size - half)) if way == "samples" else ByTiles((1, 1), (1,))
    return Plan(network.name, batch_size, (Stage((0, layers), names, share),))


def jetson_slowdown(network: GpuNetwork, busy_seconds: float) -> float:
    """Return how many times slower than this GPU a Jetson computes; a step takes this one `busy_seconds`."""
    graph = mh.capture(network.build(), network.draw(2))
    per_second = 3 * 2 * graph.network.macs * network.batch_size / busy_seconds
    return max(1.0, per_second / (CATALOGUE[JETSON].gflops * 1e9))


def mixed_gain(network: GpuNetwork, slowdown: float, cpu_workers: int, say: Progress) -> Figures:
    """Return the speed of a slowed GPU beside processors over that of the GPU alone."""
    say(f"the GPU alone, {slowdown:.3g} times slower than it could")
    alone = _mixed_seconds(network, Cluster.local(1, gpus=1), slowdown, "single")
    say(f"{alone[0]:.2f} s a step; beside {cpu_workers} workers on processors")
    beside = _mixed_seconds(network, Cluster.local(1 + cpu_workers, gpus=1), slowdown, "auto")
    return {
        "mixed_gpu_cpu_gain": alone[0] / beside[0], "mixed_alone_step_seconds": alone[0],
        "mixed_step_seconds": beside[0], "mixed_predicted_seconds": beside[1], "mixed_plan": beside[2],
        "mixed_setting": f"{network.title}; the GPU computes {slowdown:.4g} times slower than it could, as fast as a "
        f"{JETSON}, and {cpu_workers} workers share the machine's {usable_cores()} cores; plan auto; "
        f"median of {MIXED_STEPS} steps",
    }  # fmt: skip


def _mixed_seconds(network: GpuNetwork, cluster: Cluster, slowdown: float, plan: str) -> tuple[float, float, str]:
    """Return the median seconds of a step, the planner's prediction, and the plan as a text."""
    model, (inputs, targets) = network.build(), network.data(2)
    ended: list[float] = []
    threads = max(1, usable_cores() // max(1, len(cluster.devices) - 1))
    slowdowns: Mapping[str, float] = {cluster.names[0]: slowdown}
    with (
        TemporaryDirectory() as folder,
        Coordinator.local_cluster(cluster, threads=threads, slowdowns=slowdowns) as coordinator,
    ):
        result = mh.train(
            model, TensorDataset(inputs, targets), loss=loss, optimizer=mh.Optimizer("SGD", lr=0.01),
            batch_size=network.batch_size, steps=MIXED_STEPS, cluster=coordinator, plan=plan, verify=False,
            profile_seconds=0, folder=Path(folder) / "run", on_step=lambda *step: ended.append(time.monotonic()),
        )  # fmt: skip
    seconds = [after - before for before, after in zip(ended[3:], ended[4:])]
    return statistics.median(seconds), result.predicted_seconds, plan_line(result.plan)

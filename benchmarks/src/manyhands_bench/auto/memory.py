"""High-resolution segmentation on devices too small for it: a U-Net at 1024x1024 on four of 1.5 GB, and on one of them.

In the lab, with the kernel's own limits: a process that takes more is killed. The memory of a device is that of all its
processes, so Python and torch count too, as on the device.
"""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass

import torch

from manyhands.executor.optimizers import slots
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError, OutOfMemory, WorkerLost
from manyhands.facts.link import Link
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.units import format_bytes
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.lab.lab import Lab
from manyhands.lab.removal import missing
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.plans import planning as public
from manyhands.plans.simulating import simulate
from manyhands.profiler.this_machine import this_machine
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import Outcome
from manyhands.runtime.run import Run
from manyhands.session.lab_session import play_here
from manyhands.session.measuring import measure
from manyhands.session.opening import open_session
from manyhands.session.session import Session
from manyhands_bench.auto.simulated import stages_text
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.same_batch import SameBatch

MODEL = "unet"
OPTIMIZER = Optimizer("SGD", lr=0.01, momentum=0.9)
SHARE = 0.4
"""The share of a core for each device: two cores carry four devices."""
BYTES_PER_SECOND, DELAY_SECONDS = 1.25e8, 0.3e-3


@dataclass(frozen=True)
class MemoryExtent:
    """The network that is trained, and its devices."""

    width: int = 32
    size: int = 1024
    devices: int = 4
    memory_bytes: int = 1_500_000_000
    steps: int = 3
    measure_seconds: float = 10.0

    def __str__(self) -> str:
        return (
            f"U-Net of base width {self.width}, {self.size}x{self.size}, batch 1, SGD with momentum, on "
            f"{self.devices} devices of {format_bytes(self.memory_bytes)} each, {SHARE:g} of a core each, 1 Gbit/s"
        )


def bench_memory(extent: MemoryExtent, say: Progress) -> Figures:
    """Train on all devices, then on one of them until the kernel ends it; return the reason if there can be no lab."""
    if why := missing():
        return {"unet_skipped": f"memory that really ends needs a lab: {why}"}
    name = f"unet{os.getpid()}"
    lab_cluster = LabCluster(_cluster(name, extent), scale=1.0)
    try:
        play_here(lab_cluster)
    except LabError as error:
        return {"unet_skipped": error.message}
    torch.manual_seed(0)
    data = SameBatch(MODEL, (3, extent.size, extent.size), 1)
    module = build(MODEL, width=extent.width)
    graph = captured(module, data, loss_function(ZOO[MODEL].loss), granularity="blocks", name=MODEL)
    figures: Figures = {"unet_setting": str(extent)}
    with open_session(lab_cluster, say=say) as session:
        figures |= _together(session, graph, data, extent, say)
        lab = Lab.find(name)
        figures["unet_peak_bytes_max"] = max(device.group.peak_bytes for device in lab.status())
        return figures | _alone(session, graph, data, lab, say)


def _cluster(name: str, extent: MemoryExtent) -> Cluster:
    core = this_machine(threads=1).gflops
    devices = tuple(
        Device(
            name=f"d{number}", gflops=SHARE * core, memory_bytes=extent.memory_bytes,
            up_bytes_per_second=BYTES_PER_SECOND, down_bytes_per_second=BYTES_PER_SECOND,
        )
        for number in range(1, extent.devices + 1)
    )  # fmt: skip
    return Cluster(name, devices, Link(BYTES_PER_SECOND, DELAY_SECONDS))


def _together(session: Session, graph: Graph, data: SameBatch, extent: MemoryExtent, say: Progress) -> Figures:
    """Train on all devices, as auto plans it within the memory that each has left beside Python and torch."""
    say("unet, measuring")
    cluster, profile = measure(
        session, graph, 1, optimizer=OPTIMIZER, seconds=extent.measure_seconds, refresh=True, ladder=(1,), kernels={}
    )
    say("unet, planning")
    options = {"batch_size": 1, "profile": profile, "optimizer_slots": slots(OPTIMIZER)}
    refused = ""
    try:
        public.plan(graph.network, cluster, strategy="single", **options)  # type: ignore[arg-type]
    except OutOfMemory as error:
        refused = error.message
    plan = public.plan(graph.network, cluster, strategy="auto", **options).plan  # type: ignore[arg-type]
    predicted = simulate(plan, graph.network, cluster, profile, keep_spans=False)
    say(f"unet, {extent.steps} steps on {len(plan.devices)} devices: {stages_text(plan)}")
    outcome = _run(session, graph, data, plan, extent.steps)
    return {
        "unet_trains": int(len(outcome.step_seconds) == extent.steps and all(map(math.isfinite, outcome.losses))),
        "unet_step_seconds": statistics.median(outcome.step_seconds[1:] or outcome.step_seconds),
        "unet_predicted_seconds": predicted.seconds,
        "unet_tensor_bytes_max": max(log.peak_bytes for log in outcome.logs.values()),
        "unet_predicted_bytes_max": max(device.peak_bytes for device in predicted.devices.values()),
        "unet_budget_bytes": min(device.memory_bytes for device in cluster.devices),
        "unet_refused_alone": int(bool(refused)),
        "unet_plan": f"{stages_text(plan)}; steps "
        + ", ".join(f"{seconds:.3g}" for seconds in outcome.step_seconds)
        + " s; losses "
        + ", ".join(f"{loss:.4g}" for loss in outcome.losses),
        "unet_refusal": refused or "none: the planner would have run it on one device",
    }


def _alone(session: Session, graph: Graph, data: SameBatch, lab: Lab, say: Progress) -> Figures:
    """Train on one device although the planner refuses it: `unet_alone_oom` is the kernel's count, not ours."""
    device = session.cluster.names[0]
    say(f"unet, on {device} alone, until memory ends")
    whole = Stage((0, len(graph.network.layers)), (device,))
    plan = resolve(Plan(graph.name, 1, (whole,), optimizer_slots=slots(OPTIMIZER)), graph.network)
    outcome = "it trained"
    try:
        _run(session, graph, data, plan, 1)
    except WorkerLost as error:
        outcome = error.message
    killed = next(status.group.oom_kills for status in lab.status() if status.name == device)
    return {"unet_alone_oom": int(killed > 0), "unet_alone": outcome}


def _run(session: Session, graph: Graph, data: SameBatch, plan: Plan, steps: int) -> Outcome:
    order = Order(
        graph=graph, plan=plan, start=RunState(dict(graph.state)), last_step=steps, optimizer=OPTIMIZER,
        memory_step=steps - 1,
    )  # fmt: skip
    run = Run(session.coordinator, order)
    run.prepare()
    return run.run((step, data.inputs, data.targets) for step in range(steps))

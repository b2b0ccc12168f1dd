"""Seconds of planning and simulating as networks and clusters grow: `plan_seconds_*`, `simulate_seconds_1000`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from manyhands.facts.catalogue import CATALOGUE
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Layer, Network
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.plans import planning as public
from manyhands.plans.networks import load_network
from manyhands.plans.simulating import simulate
from manyhands_bench.auto.simulated import stages_text
from manyhands_bench.figures import Figures, Progress

LAYERS = 200
FINE = "efficientnet-b1"
"""The zoo's network with the most layers, cut at every operator; neighbours are joined until `LAYERS` are left."""
BATCH = 64
KINDS = ("pi4", "pi5", "laptop", "jetson-nano", "jetson-tx2", "jetson-nx")
MEMORIES = (1.0, 0.75, 0.5)
GROUPS, EACH = 10, 100
MICRO_BATCHES = 4


@dataclass(frozen=True)
class ScaleExtent:
    """The amount of timing."""

    layers: int = LAYERS
    devices: tuple[int, ...] = (16, 64)
    repeats: int = 1
    each: int = EACH
    """Devices in each of the simulated groups."""


def bench_scale(extent: ScaleExtent, say: Progress) -> Figures:
    fine = load_network(FINE, None, "operators")
    network = joined_layers(fine, extent.layers)
    figures: Figures = {"plan_layers": len(network.layers)}
    plans = []
    for count in extent.devices:
        say(f"planning {len(network.layers)} layers on {count} devices")
        cluster = unequal(count)
        profile = estimate_cluster(network, cluster)
        durations = []
        for _ in range(extent.repeats):
            begin = time.perf_counter()
            planned = public.plan(network, cluster, batch_size=BATCH, strategy="auto", profile=profile)
            durations.append(time.perf_counter() - begin)
        figures[f"plan_seconds_{count}"] = statistics.median(durations)
        plans.append(f"{count} devices: {stages_text(planned.plan)}")
    figures["plan_setting"] = (
        f"{FINE}, {len(fine.layers)} operators joined to {len(network.layers)} layers, batch {BATCH}, strategy auto; "
        f"unequal devices in turn of {', '.join(KINDS)} with {', '.join(f'{part:.0%}' for part in MEMORIES)} of their "
        f"memory, 100 Mbit/s; median of {extent.repeats}; {'; '.join(plans)}"
    )
    return figures | _simulated(extent, say)


def _simulated(extent: ScaleExtent, say: Progress) -> Figures:
    """Simulate a pipeline of groups of equal devices, each group sharing by samples."""
    count = GROUPS * extent.each
    say(f"simulating {count} devices")
    network = load_network("resnet50")
    devices = [{"kind": "pi4", "name": f"group{group}", "count": extent.each} for group in range(GROUPS)]
    link = {"rate": "1000 Mbit/s", "delay": "0.3 ms"}
    cluster = Cluster.from_dict({"name": "thousand", "devices": devices, "link": link})
    profile = estimate_cluster(network, cluster)
    bounds = [round(number * len(network.layers) / GROUPS) for number in range(GROUPS + 1)]
    stages = tuple(
        Stage(pair, cluster.names[extent.each * group : extent.each * (group + 1)], BySamples((1,) * extent.each))
        for group, pair in enumerate(pairwise(bounds))
    )
    plan = Plan(network.name, MICRO_BATCHES * extent.each, stages, micro_batches=MICRO_BATCHES)
    plan = resolve(plan, network, cluster)
    begin = time.perf_counter()
    result = simulate(plan, network, cluster, profile, keep_spans=False)
    return {
        f"simulate_seconds_{count}": time.perf_counter() - begin,
        f"simulate_actions_{count}": result.actions,
        "simulate_setting": f"resnet50 over {GROUPS} stages of {extent.each} Pi 4 each, by samples, {plan.batch_size} "
        f"samples in {MICRO_BATCHES} micro-batches; {result.seconds:.3g} s a step under the virtual clock",
    }


def unequal(count: int) -> Cluster:
    """Return a cluster of devices of all kinds in turn, some of each kind with less memory."""
    devices = []
    for place in range(count):
        kind, part = KINDS[place % len(KINDS)], MEMORIES[place // len(KINDS) % len(MEMORIES)]
        memory = f"{part * CATALOGUE[kind].free_bytes:.0f} B"
        devices.append({"name": f"d{place + 1}", "kind": kind, "memory": memory, "port": "100 Mbit/s"})
    link = {"rate": "100 Mbit/s", "delay": "0.3 ms"}
    return Cluster.from_dict({"name": f"unequal-{count}", "devices": devices, "link": link})


def joined_layers(network: Network, count: int) -> Network:
    """Return the network with neighbouring layers joined, as evenly as possible, until `count` are left."""
    total = len(network.layers)
    if total <= count:
        return network
    bounds = [round(number * total / count) for number in range(count + 1)]
    layers = tuple(_joined(network, network.layers[first:last]) for first, last in pairwise(bounds))
    return msgspec.structs.replace(network, layers=layers, fingerprint=f"{network.fingerprint}-{count}")


def _joined(network: Network, layers: Sequence[Layer]) -> Layer:
    first, last = layers[0].first, layers[-1].last
    made = {name for op in network.ops[first:last] for name in op.outputs}
    later = {name for op in network.ops[last:] for name in op.inputs} | set(network.outputs)
    outputs = tuple(name for layer in layers for name in layer.outputs if name in later)
    sums = ("macs", "parameter_bytes", "buffer_bytes", "activation_bytes", "saved_bytes", "saved_fixed_bytes")
    added = {name: sum(getattr(layer, name) for layer in layers) for name in sums}
    return msgspec.structs.replace(
        layers[0], last=last, **added, outputs=outputs,
        output_bytes=sum(network.tensors[name].bytes_per_sample for name in outputs),
        inputs=tuple(dict.fromkeys(name for layer in layers for name in layer.inputs if name not in made)),
        weights=tuple(dict.fromkeys(name for layer in layers for name in layer.weights)),
    )  # fmt: skip

"""ASTEROID's motivation, simulated with the catalogue: its Fig. 1 and 5.

fig. 1   three Nanos at 100 Mbit/s: the part of a data-parallel round that is communication, and the bytes of a sample
         by data and by pipeline parallelism
fig. 5   one NX: what fills the memory in training, by weights with their gradients and state, and activations
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.explaining.comparison import compare
from manyhands.facts.cluster import Cluster
from manyhands.plans.simulating import simulate
from manyhands.simulator.result import Simulation
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.paper_tables import ONE_PORT, PP, PaperNetwork, network_of

SAMPLES = 32
"""Samples of a device in a mini-batch: the paper does not say how many."""
NANOS = 3


def motivation(subjects: Sequence[PaperNetwork], say: Progress) -> Figures:
    """Return what data parallelism spends on communication, the bytes of both ways, and what fills the memory."""
    figures: Figures = {}
    for subject in subjects:
        say(f"motivation, {subject.paper}")
        key = subject.paper.replace("-", "_")
        network, nanos = network_of(subject), _devices("jetson-nano", NANOS)
        table = compare(network, nanos, batch_size=SAMPLES * NANOS, batch_norm="local")
        for name, row in (("dp", table.row(ONE_PORT)), ("dp_overlapped", table.row("data parallel"))):
            if row.plan is not None:
                result = simulate(row.plan, network, nanos, keep_spans=False)
                figures[f"fig_1_communication_part_{name}_{key}"] = 1 - _computing(result) / result.seconds
                figures[f"fig_1_bytes_per_sample_{name}_{key}"] = row.bytes / (SAMPLES * NANOS)
        if table.row(PP).plan is not None:
            figures[f"fig_1_bytes_per_sample_pp_{key}"] = table.row(PP).bytes / (SAMPLES * NANOS)
        figures |= _memory(subject, key)
    return figures | {
        "motivation_setting": f"simulated with the catalogue, batch norm local; Fig. 1: {NANOS} Nanos at 100 Mbit/s, "
        f"{SAMPLES} samples each in a mini-batch, data parallel through one port (and with our overlapped sums); Fig. "
        f"5: one NX, {SAMPLES} samples, SGD with momentum",
    }


def _devices(kind: str, count: int) -> Cluster:
    device = {"kind": kind, "name": "d", "count": count, "port": "100 Mbit/s"}
    link = {"rate": "100 Mbit/s", "delay": "0.3 ms"}
    return Cluster.from_dict({"name": f"{kind}:{count}", "devices": [device], "link": link})


def _computing(result: Simulation) -> float:
    """Return the seconds that the busiest device computes."""
    return max(device.busy_seconds for device in result.devices.values())


def _memory(subject: PaperNetwork, key: str) -> Figures:
    """Return Fig. 5: weights, gradients and the optimizer's state are three numbers a parameter; the rest is what a
    step keeps."""
    network, cluster = network_of(subject), _devices("jetson-nx", 1)
    table = compare(network, cluster, batch_size=SAMPLES, micro_batches=1, batch_norm="local")
    plan = table.row("one device").plan
    if plan is None:
        return {}
    result = simulate(plan, network, cluster, keep_spans=False)
    peak = max(device.peak_bytes for device in result.devices.values())
    weights = sum(weight.bytes for weight in network.weights.values())
    trained = sum(weight.bytes for weight in network.weights.values() if weight.trainable)
    return {
        f"fig_5_weights_bytes_{key}": weights, f"fig_5_gradients_and_state_bytes_{key}": 2 * trained,
        f"fig_5_activations_bytes_{key}": peak - weights - 2 * trained,
        f"fig_5_activations_part_{key}": (peak - weights - 2 * trained) / peak,
    }  # fmt: skip

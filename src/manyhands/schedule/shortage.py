"""Hints for a device whose memory a plan does not fit: what helps depends on what there is too much of."""

from __future__ import annotations

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Layer, Network
from manyhands.facts.plan import Plan
from manyhands.facts.units import format_bytes
from manyhands.schedule.memory import weight_copies

MORE_MEMORY = "devices with more memory (manyhands devices lists kinds)"
DIVIDED_LAYERS = "channels, which divide every layer (--share channels)"
"""For inference only."""
LESS_STATE = "an optimiser with less state (SGD without momentum)"


def remedy(plan: Plan, network: Network, cluster: Cluster, device: str, static_bytes: float) -> str:
    """Return what to type if `device` would run out of memory, of which `static_bytes` do not depend on the batch."""
    if static_bytes > cluster.device(device).memory_bytes:
        return _for_weights(plan, network, cluster, device, static_bytes)
    ways = ["a smaller share for this device", "more stages (--share pipeline)", MORE_MEMORY]
    if plan.is_training:
        ways = [*_smaller_batches(plan), *ways]
    return f"Use {', '.join(ways[:-1])}, or {ways[-1]}."


def _for_weights(plan: Plan, network: Network, cluster: Cluster, device: str, static_bytes: float) -> str:
    contents = "Weights, gradients and optimiser" if plan.is_training else "Weights"
    hint = f"{contents} alone are more than {device} has: no batch size helps."
    size, name = max((_layer_bytes(plan, network, layer), layer.name) for layer in network.layers)
    ways = [MORE_MEMORY]
    if size <= max(other.memory_bytes for other in cluster.devices):
        ways.insert(0, "fewer layers on each device (--share pipeline)")
    elif plan.is_training:
        hint += f" Nor do more devices: layer {name} has {format_bytes(size)} of that, more than any of them."
    if not plan.is_training:
        ways.insert(0, DIVIDED_LAYERS)
    elif static_bytes * 2 / (2 + plan.optimizer_slots) <= cluster.device(device).memory_bytes:
        ways.append(LESS_STATE)
    return f"{hint} Use {' or '.join(ways)}."


def _layer_bytes(plan: Plan, network: Network, layer: Layer) -> int:
    weights = [network.weights[name] for name in layer.weights]
    return sum(weight.bytes * weight_copies(plan, weight) for weight in weights)


def _smaller_batches(plan: Plan) -> list[str]:
    """Return ways to compute fewer samples at once. A device that shares a stage by samples takes at least one."""
    least = max((len(stage.devices) for stage in plan.stages if stage.share.splits_samples), default=1)
    size = plan.micro_batch_size
    ways = []
    if any(plan.batch_size % finer == 0 for finer in range(least, size)):
        ways.append("more micro-batches (--micro-batches)")
    if size > least:
        ways.append("a smaller batch (--batch-size)")
    return ways

"""What to do about a device whose memory a plan does not fit: what helps depends on what there is too much of."""

from __future__ import annotations

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Layer, Network
from manyhands.facts.plan import Plan
from manyhands.facts.units import format_bytes
from manyhands.schedule.memory import weight_copies

MORE_MEMORY = "devices with more memory (manyhands devices lists kinds)"
DIVIDED_LAYERS = "channels, which divide every layer (--share channels)"
"""Of inference only."""
LESS_STATE = "an optimiser with less state (SGD without momentum)"


def remedy(plan: Plan, network: Network, cluster: Cluster, device: str, static_bytes: float) -> str:
    """What to type where `device` would run out of memory, of which `static_bytes` do not depend on the batch."""
    if static_bytes > cluster.device(device).memory_bytes:
        return _for_weights(plan, network, cluster, device, static_bytes)
    ways = ["a smaller share for this device", "more stages (--share pipeline)", MORE_MEMORY]
    if plan.is_training:
        ways = [*_smaller_batches(plan), *ways]
    return f"Use {', '.join(ways[:-1])}, or {ways[-1]}."


def _for_weights(plan: Plan, network: Network, cluster: Cluster, device: str, static_bytes: float) -> str:
    kept = "Weights, gradients and optimiser" if plan.is_training else "Weights"
    hint = f"{kept} alone are more than {device} has: no batch size helps."
    size, name = max((_layer_bytes(plan, network, layer), layer.name) for layer in network.layers)
    ways = [MORE_MEMORY]
    if size <= max(one.memory_bytes for one in cluster.devices):
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
    """Ways to compute fewer samples at once. A device that shares a stage by samples takes one of them at least."""
    least = max((len(one.devices) for one in plan.stages if one.share.splits_samples), default=1)
    size = plan.micro_batch_size
    ways = []
    if any(plan.batch_size % finer == 0 for finer in range(least, size)):
        ways.append("more micro-batches (--micro-batches)")
    if size > least:
        ways.append("a smaller batch (--batch-size)")
    return ways

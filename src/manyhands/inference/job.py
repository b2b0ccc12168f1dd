"""Opens an inference job by names, and reports its state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.inference.config import InferConfig
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known
    from manyhands.runtime.coordinator import Coordinator


def open_by_name(config: InferConfig, network: Known, devices: Cluster | LabCluster | Coordinator) -> Inference:
    """Distribute the network, and return the inference, which answers from now on."""
    from manyhands.inference.infer import open_with

    return open_with(replace(config.on(devices), name=network.name), network.model, network.example)


def health(running: Inference) -> dict[str, Any]:
    """Return the state of an inference, for monitoring."""
    plan = running.plan
    return {
        "network": running.graph.name,
        "objective": running.objective,
        "devices": list(plan.devices),
        "answered": running.answered,
        "waiting": running.waiting,
        "reruns": running.reruns,
        "recoveries": list(running.recoveries),
        "predicted_seconds": running.predicted_seconds,
        "plan": plan.to_dict(),
    }

"""How an inference job is opened by names, and how it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.inference.config import InferConfig
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known
    from manyhands.runtime.coordinator import Coordinator


def open_by_name(config: InferConfig, known: Known, devices: Cluster | LabCluster | Coordinator) -> Inference:
    """Hand out the network, and return the inference, which answers from now on."""
    from manyhands.inference.infer import open_with

    return open_with(replace(config.on(devices), name=known.name), known.model, known.example)


def health(running: Inference) -> dict[str, Any]:
    """How it goes, for whoever looks after it."""
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

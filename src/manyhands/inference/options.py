"""The keywords of `mh.infer`, made from `InferConfig` by python docs/generate.py: change them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from pathlib import Path

    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.facts.plan import Plan
    from manyhands.facts.ray_cluster import RayCluster
    from manyhands.job.callbacks import Say
    from manyhands.runtime.coordinator import Coordinator


class InferOptions(TypedDict, total=False):
    """Every keyword that `InferConfig` describes."""

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    end_tokens: tuple[int, ...] | None
    chunk: int
    objective: str
    plan: Plan | str | Path
    home: str
    most_waiting: int
    memory: bool
    min_devices: int
    max_devices: int | None
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None
    granularity: str
    name: str
    say: Say | None
    limit_seconds: float

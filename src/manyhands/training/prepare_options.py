"""The keywords of `mh.prepare`, made from `PrepareConfig` by python docs/generate.py: change them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.facts.plan import Plan
    from manyhands.facts.ray_cluster import RayCluster
    from manyhands.job.callbacks import OnOpened, OnPlanned, Say
    from manyhands.planner.task import TileOptions
    from manyhands.runtime.coordinator import Coordinator


class PrepareOptions(TypedDict, total=False):
    """Every keyword that `PrepareConfig` describes."""

    seed: int
    plan: Plan | str | Path
    tiles: TileOptions | None
    reduce: str
    micro_batches: int | None
    batch_norm: str
    replan: str
    backup_every: int | None
    silence_seconds: float
    tensorboard: bool
    allow_optimizers: Sequence[str]
    precision: str
    exact: bool
    profile_seconds: float
    min_devices: int
    max_devices: int | None
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None
    clip_norm: float | None
    clip_value: float | None
    folder: str | Path | None
    resume: bool | str | Path
    verify: bool | None
    on_opened: OnOpened | None
    on_planned: OnPlanned | None
    granularity: str
    name: str
    say: Say | None
    limit_seconds: float

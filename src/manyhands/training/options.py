"""The keywords of `mh.train`, made from `TrainConfig` by python docs/generate.py: change them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from torch.utils.data import Dataset

    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.facts.plan import Plan
    from manyhands.facts.ray_cluster import RayCluster
    from manyhands.job.callback import Callback
    from manyhands.job.callbacks import OnOpened, OnPlanned, OnStep, Say
    from manyhands.job.metrics import Metric
    from manyhands.planner.task import TileOptions
    from manyhands.runtime.coordinator import Coordinator


class TrainOptions(TypedDict, total=False):
    """Every keyword that `TrainConfig` describes."""

    epochs: int
    steps: int | None
    batch_size: int | None
    seed: int
    shuffle: bool | None
    plan: Plan | str | Path
    tiles: TileOptions | None
    reduce: str
    feed: str
    micro_batches: int | None
    tune: int
    batch_norm: str
    replan: str
    backup_every: int | None
    silence_seconds: float
    tensorboard: bool
    allow_optimizers: Sequence[str]
    precision: str
    exact: bool
    lengths: Sequence[int] | None
    pad: Mapping[str, float] | None
    validate: Dataset[Any] | None
    validate_every: int | str | None
    metrics: Mapping[str, Metric] | None
    callbacks: Sequence[Callback]
    profile_seconds: float
    min_devices: int
    max_devices: int | None
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None
    clip_norm: float | None
    clip_value: float | None
    ema: float | None
    folder: str | Path | None
    resume: bool | str | Path
    test: Dataset[Any] | None
    verify: bool | None
    config: Mapping[str, Any] | None
    on_opened: OnOpened | None
    on_planned: OnPlanned | None
    on_step: OnStep | None
    granularity: str
    name: str
    say: Say | None
    limit_seconds: float

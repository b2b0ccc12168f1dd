"""The keywords of `mh.split_train`, made from `SplitConfig` by python docs/generate.py: change them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from torch.utils.data import Dataset

    from manyhands.facts.trace import LinkTrace
    from manyhands.job.callbacks import OnOpened, OnPlanned, OnStep, Say
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.split.session import Two
    from manyhands.split.silos import Silos


class SplitOptions(TypedDict, total=False):
    """Every keyword that `SplitConfig` describes."""

    epochs: int | None
    steps: int | None
    batch_size: int | None
    seed: int
    shuffle: bool | None
    cut: int | str
    bits: int | str
    k: int | str | None
    mode: str
    cloud: str | Two | Coordinator | None
    trace: str | Path | LinkTrace | None
    delay_seconds: float | str | None
    rival: str
    edge_slowdown: float
    server_slowdown: float
    calibrate_seconds: float
    allowed_drop: float
    least_bits: int | Mapping[int, int] | None
    memory_bytes: float | str | None
    labels: str
    edge_side: str
    silos: Silos | str | None
    weights: str | Path | None
    freeze: int | str
    error_feedback: bool
    pack_gradients: bool
    data_name: str
    backup_every: int | None
    silence_seconds: float | None
    engine: Mapping[str, Any] | None
    token: str
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

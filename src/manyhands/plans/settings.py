"""Settings of a training step that a plan carries, as `mh.plan` and `mh.pipeline_plan` take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

from manyhands.facts.plan import BatchNorm, Order, WarmUp
from manyhands.planner.task import TileOptions


@dataclass(frozen=True)
class StepSettings:
    """The settings of a training step that a plan keeps besides its stages."""

    order: Order = "1f1b"
    warm_up: WarmUp | tuple[int, ...] = "2(P-p)-1"
    """Forward passes of each stage before its first backward pass."""
    batch_norm: BatchNorm = "synchronised"
    optimizer_slots: int = 1
    """Numbers that the optimizer keeps beside each weight."""
    gradient_norm: bool = False
    """Whether the devices learn the norm of all gradients before each update, as to clip by it."""


class StepOptions(TypedDict, total=False):
    """The fields of `StepSettings`, as keywords."""

    order: Order
    warm_up: WarmUp | tuple[int, ...]
    batch_norm: BatchNorm
    optimizer_slots: int
    gradient_norm: bool


@dataclass(frozen=True)
class PlanSettings(StepSettings):
    """The settings of a training step, and those of the strategies."""

    warm_up: WarmUp = "2(P-p)-1"
    tiles: TileOptions | None = None
    """What is fixed about tiles; None: nothing."""
    within_seconds: float = math.inf
    """Seconds of computing in which strategy auto is to plan: once there is a plan, no strategy is begun that is likely
    to take longer."""


class PlanOptions(TypedDict, total=False):
    """The fields of `PlanSettings`, as keywords."""

    order: Order
    warm_up: WarmUp
    batch_norm: BatchNorm
    optimizer_slots: int
    gradient_norm: bool
    tiles: TileOptions | None
    within_seconds: float

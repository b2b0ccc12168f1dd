"""What a caller of `mh.train` asked for, checked before anything starts; and the run it is to go on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.loader import length
from manyhands.data.order import BatchOrder
from manyhands.executor import checkpoint
from manyhands.executor.optimizers import validate
from manyhands.facts.errors import BadFile, BadValue, unknown
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan
from manyhands.planner.replanning import WAYS as WAYS_TO_REPLAN
from manyhands.planner.task import TileOptions
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.schedule.feeding import WAYS as WAYS_TO_FEED
from manyhands.session.session import Say

CHECKPOINT_SECONDS = 30.0
LEAST_CHECKPOINT_SECONDS = 1.0
"""Short epochs are not worth a checkpoint each."""


@dataclass
class Options:
    """What the user asked for, checked before anything starts."""

    model: nn.Module
    data: Dataset[Any]
    loss: Callable[..., torch.Tensor]
    optimizer: Optimizer
    batch_size: int
    epochs: int
    steps: int | None
    shuffle: bool
    batch_norm: str
    seed: int
    feed: str = "step"

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise BadValue(f"model is a {type(self.model).__name__}; it must be a torch.nn.Module.")
        if not isinstance(self.optimizer, Optimizer):
            raise BadValue(
                f"optimizer is a {type(self.optimizer).__name__}; it must be an mh.Optimizer.",
                hint='Write optimizer=mh.Optimizer("SGD", lr=0.1).',
            )
        if not callable(self.loss):
            raise BadValue(f"loss is a {type(self.loss).__name__}; it must be a function of (output, target).")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise BadValue(f"seed is {self.seed!r}; it must be a whole number of at least 0.")
        for field_name, least in (("batch_size", 1), ("epochs", 1), ("steps", 1)):
            value = getattr(self, field_name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise BadValue(f"{field_name} is {value!r}; it must be a whole number of at least {least}.")
        if self.batch_norm not in ("synchronised", "local"):
            raise BadValue(f"batch_norm is {self.batch_norm!r}; it must be 'synchronised' or 'local'.")
        if self.feed not in WAYS_TO_FEED:
            raise unknown("way to feed samples", self.feed, WAYS_TO_FEED)
        self.order = BatchOrder(length(self.data), self.batch_size, self.shuffle, self.seed)
        validate(self.optimizer, self.last_step)

    @property
    def last_step(self) -> int:
        """How many steps of the optimiser the whole run makes."""
        return self.steps if self.steps is not None else self.epochs * self.order.steps_per_epoch

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on as if it had never stopped."""
        return {
            "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "batch_norm": self.batch_norm,
            "samples": length(self.data), "optimizer": self.optimizer.to_dict(),
        }  # fmt: skip

    def checkpoint_steps(self, step_seconds: float) -> int:
        """How many steps lie between two checkpoints: an epoch, within the limits of time."""
        most = max(1, int(CHECKPOINT_SECONDS / max(step_seconds, 1e-6)))
        least = math.ceil(LEAST_CHECKPOINT_SECONDS / max(step_seconds, 1e-6))
        epoch = self.order.steps_per_epoch
        return min(most, epoch * math.ceil(least / epoch))


def resumed_from(
    folder: str | Path | None, resume: bool | str | Path, say: Say | None = None
) -> tuple[str | Path | None, checkpoint.Checkpoint | None]:
    """The folder of the run, and the checkpoint to go on from, if any: the newest that can be read."""
    if resume is False:
        return folder, None
    where = folder if resume is True else resume
    if where is None:
        raise BadValue("resume=True needs the folder of the run.", hint="Write folder='runs/...' or resume='runs/...'.")
    if not Path(where).is_dir():
        raise BadFile(f"{where}: there is no such run folder.", hint="ls runs")
    newest = checkpoint.load_newest(Path(where))
    if newest is None:
        raise BadFile(f"{where}: has no complete checkpoint to go on from.", hint="Start anew, without resume.")
    if newest.note and say is not None:
        say(newest.note)
    return where, newest.checkpoint


def check_same(loaded: checkpoint.Checkpoint, options: Options, last_step: int) -> None:
    """A run goes on as it was, or not at all."""
    if loaded.step >= last_step:
        raise BadValue(
            f"The run has done {loaded.step} of {last_step} steps: there is nothing to go on with.",
            hint="Ask for more: epochs= or steps= (--epochs, --steps).",
        )
    now: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(options.facts))  # as it was written
    for key, value in now.items():
        was = loaded.facts.get(key, value)
        if was != value:
            raise BadValue(
                f"The run was started with {key} = {was}; it is now {value}. It would not go on as it was.",
                hint="Use the same, or start a new run.",
            )


@dataclass(frozen=True)
class Sharing:
    """How the work is to be shared, as the caller said it."""

    plan: Plan | str | Path
    micro_batches: int | None
    tiles: TileOptions | None
    reduce: str
    tune: int = 0

    def __post_init__(self) -> None:
        if self.tune < 0:
            raise BadValue(f"tune is {self.tune}; it must be 0 or more plans.")
        if self.reduce not in ("allreduce", "gateway"):
            raise unknown("way to add up gradients", self.reduce, ("allreduce", "gateway"))

    def applied(self, plan: Plan, batch_size: int) -> Plan:
        """The plan with what was said beside it. One without shares of samples fits any batch."""
        if not any(isinstance(stage.share, BySamples) for stage in plan.stages):
            plan = msgspec.structs.replace(plan, batch_size=batch_size * plan.steps_per_round)
        if self.reduce != "gateway":
            return plan
        stages = tuple(msgspec.structs.replace(stage, reduce="gateway") for stage in plan.stages)
        return msgspec.structs.replace(plan, stages=stages)


@dataclass(frozen=True)
class Lasting:
    """How to go on when workers come and go, as the caller said it."""

    replan: str
    backup_every: int | None
    min_devices: int
    max_devices: int | None

    def __post_init__(self) -> None:
        if self.replan not in WAYS_TO_REPLAN:
            raise unknown("way to re-plan", self.replan, WAYS_TO_REPLAN)
        if self.backup_every is not None and self.backup_every < 0:
            raise BadValue(f"backup_every is {self.backup_every}; it must be 0 or more rounds.")
        self.endurance(0.0)

    def endurance(self, wait_seconds: float) -> RetryPolicy:
        """How hard the job tries; `wait_seconds`: how long others may take to join."""
        return RetryPolicy(self.replan, self.min_devices, self.max_devices, wait_seconds)

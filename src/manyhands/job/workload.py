"""The workload of a job, checked before anything starts; and the checkpoint from which a resumed run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.length_order import LengthOrder
from manyhands.data.loader import length
from manyhands.data.order import BatchOrder
from manyhands.data.padding import Padded
from manyhands.executor import checkpoint
from manyhands.executor.optimizers import validate
from manyhands.executor.scheduling import FACT, Scheduling
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.own_loss import OWN_LOSS
from manyhands.job.callbacks import Say
from manyhands.job.config_sections import WorkloadConfig
from manyhands.job.given_optimizer import names_of_parameters
from manyhands.job.lengths import SampleLengths

CHECKPOINT_SECONDS = 30.0
LEAST_CHECKPOINT_SECONDS = 1.0
"""Short epochs are not worth a checkpoint each."""


@dataclass
class Workload:
    """The workload of a job: the module, its data, loss and optimiser, with a configuration whose batch size is set."""

    model: nn.Module
    data: Dataset[Any]
    loss: Callable[..., torch.Tensor] | Literal["own"]
    """A function of (output, target); "own": forward is given the target as its labels, and returns the loss."""
    optimizer: Optimizer
    config: WorkloadConfig
    batch_norm: str = "synchronised"
    feed: str = "step"
    lengths: SampleLengths | None = None
    """The lengths of samples that are padded; None: they all have one shape."""
    scheduling: Scheduling | None = None
    """The schedulers of the optimizer; None: those that it names, if any."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise BadValue(f"model is a {type(self.model).__name__}; it must be a torch.nn.Module.")
        if not isinstance(self.optimizer, Optimizer):
            raise BadValue(
                f"optimizer is a {type(self.optimizer).__name__}; it must be an mh.Optimizer.",
                hint='Write optimizer=mh.Optimizer("SGD", lr=0.1), or give one of torch.optim.',
            )
        if not callable(self.loss) and self.loss != OWN_LOSS:
            raise BadValue(f"loss is a {type(self.loss).__name__}; it must be a function of (output, target).")
        if self.config.batch_size is None:
            raise BadValue("batch_size is None; it must be a whole number of at least 1.", hint="Write batch_size=64.")
        self.batch_size: int = self.config.batch_size
        shuffle = self.config.shuffle is not False
        self.batch_facts = length(self.data), self.batch_size, shuffle, self.seed
        """What the order of batches follows from, beside the samples' lengths."""
        self.order: BatchOrder = BatchOrder(*self.batch_facts)
        if self.lengths is not None:
            padding, of_samples = self.lengths.of_batches, self.lengths.of_samples
            self.order = LengthOrder(*self.batch_facts, padding=padding, sample_lengths=of_samples)
        self.optimizer = self.optimizer.over(list(names_of_parameters(self.model).values()))
        validate(self.optimizer, ((name, p.dim()) for name, p in self.model.named_parameters() if p.requires_grad))
        self.scheduling = self.scheduling or Scheduling.by_name(self.optimizer)
        if self.scheduling is not None:
            self.scheduling.begin(self.order.steps_per_epoch, self.known_steps or 0)
            self.scheduling.check()

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def epochs(self) -> int:
        """The number of passes over the data of the whole run, unless `steps` is given."""
        return self.config.epochs or 1

    @property
    def last_step(self) -> int:
        """The number of optimiser steps of the whole run."""
        steps = self.config.steps
        return steps if steps is not None else self.epochs * self.order.steps_per_epoch

    @property
    def known_steps(self) -> int | None:
        """The number of optimiser steps of the whole run; None: as many as there will be batches."""
        return self.last_step

    @property
    def facts(self) -> dict[str, Any]:
        """The values that must be the same for a run to go on as if it had never stopped."""
        return {
            **self.config.decisive, "shuffle": self.config.shuffle is not False, "batch_norm": self.batch_norm,
            "samples": length(self.data), "optimizer": self.optimizer.to_dict(),
            **({"sample_lengths": self.order.digest} if isinstance(self.order, LengthOrder) else {}),
        }  # fmt: skip

    def facts_at(self, steps_done: int) -> dict[str, Any]:
        """Return all that a checkpoint of so many steps holds beside tensors."""
        return self.facts | (self.scheduling.facts(steps_done) if self.scheduling is not None else {})

    @property
    def of_one_shape(self) -> Dataset[Any]:
        """The data set with samples of one shape: where they have several lengths, padded to the longest."""
        return self.data if self.lengths is None else Padded(self.data, self.lengths.padding, self.lengths.longest)

    def examples(self) -> dict[int, Dataset[Any]]:
        """Return data sets that begin with a few samples to capture the network with, for each length; under 0, those
        of the only shape."""
        if self.lengths is None:
            return {0: self.data}
        return {long: self.lengths.examples(self.data, long) for long in self.lengths.padding.lengths}

    def checkpoint_steps(self, step_seconds: float) -> int:
        """Return the number of steps between two checkpoints: an epoch, within the limits of time."""
        most = max(1, int(CHECKPOINT_SECONDS / max(step_seconds, 1e-6)))
        least = math.ceil(LEAST_CHECKPOINT_SECONDS / max(step_seconds, 1e-6))
        epoch = self.order.steps_per_epoch
        return min(most, epoch * math.ceil(least / epoch))


def resumed_from(
    folder: str | Path | None, resume: bool | str | Path, say: Say | None = None
) -> tuple[str | Path | None, checkpoint.Checkpoint | None]:
    """Return the folder of the run, and the checkpoint to go on from, if any: the newest that can be read."""
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


def check_same(loaded: checkpoint.Checkpoint, workload: Workload, last_step: int) -> None:
    """Refuse to resume a run that is finished, or whose workload differs from the checkpoint's."""
    if loaded.step >= last_step:
        raise BadValue(
            f"The run has done {loaded.step} of {last_step} steps: there is nothing to go on with.",
            hint="Ask for more: epochs= or steps= (--epochs, --steps).",
        )
    now: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(workload.facts))  # as it was written
    for key, value in now.items():
        was = loaded.facts.get(key, value)
        if was != value and key == "optimizer":
            raise BadValue(
                f"The run was started with the optimizer {_short(was)}; it is now {_short(value)}. It would not go "
                "on as it was.",
                hint="Use the same class, options and groups, or start a new run.",
            )
        if was != value:
            raise BadValue(
                f"The run was started with {key} = {was}; it is now {value}. It would not go on as it was.",
                hint="Use the same, or start a new run.",
            )
    if workload.scheduling is not None:
        # checkpoints of 0.2.0 have none
        unrecorded: dict[str, Any] = {FACT: {}} if workload.optimizer.schedule else {}
        workload.scheduling.resume({**unrecorded, **loaded.facts}, loaded.step)
    elif FACT in loaded.facts:
        raise BadValue(
            "The run was started with a schedule; none is given now. It would not go on as it was.",
            hint="Give the same scheduler, or start a new run.",
        )


def _short(optimizer: Any) -> str:
    """Return an optimizer's document in a few words."""
    if not isinstance(optimizer, dict):
        return f"{optimizer!r:.200}"
    groups = optimizer.get("groups") or ()
    options = ", ".join(f"{name}={value}" for name, value in (optimizer.get("options") or {}).items())
    words = f"{optimizer.get('name')}({options})" + (f" with {len(groups)} more group(s)" if groups else "")
    if optimizer.get("schedule"):
        words += f" and the schedule {optimizer['schedule']}"
    return f"{words:.300}"

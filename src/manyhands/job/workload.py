"""The workload of a job, checked before anything starts; and the checkpoint from which a resumed run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.batch_stream import BatchStream
from manyhands.data.kept import KeptBatches
from manyhands.data.length_order import LengthOrder
from manyhands.data.loaded import LoadedBatches
from manyhands.data.loader import Prefetcher, length
from manyhands.data.order import BatchOrder, GivenOrder
from manyhands.data.padding import Padded
from manyhands.data.preload import Numbered
from manyhands.data.rewinding import Rewindable
from manyhands.executor import checkpoint
from manyhands.executor.optimizers import slots, validate
from manyhands.executor.scheduling import FACT, Scheduling
from manyhands.executor.torch_optimizers import stand_ins
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.precision import FLOAT32, FP16
from manyhands.graph.graph import Graph
from manyhands.graph.own_loss import OWN_LOSS
from manyhands.graph.precision import check_precision, under
from manyhands.job.callback import Callback
from manyhands.job.callback_list import check_monitors
from manyhands.job.callbacks import Say
from manyhands.job.config import keywords_of
from manyhands.job.config_sections import WorkloadConfig
from manyhands.job.given_optimizer import names_of_parameters
from manyhands.job.lengths import SampleLengths
from manyhands.job.update_config import UpdateConfig
from manyhands.job.validation import HeldOut
from manyhands.runtime.smaller_batches import plan_for

PLACE = "epoch"
"""The key of a checkpoint's facts under which the beginning of its epoch is, of data that comes in batches."""
GIVEN = "in batches as given"
"""In place of the number of samples, where that does not follow from the data."""
CHECKPOINT_SECONDS = 30.0
LEAST_CHECKPOINT_SECONDS = 1.0
"""Short epochs are not worth a checkpoint each."""
CHECKPOINT_BYTES_PER_SECOND = 5e6
"""Bytes of trained weights for each second between checkpoints: to copy, check, send and write them, with what the
optimizer keeps, takes some hundredths of that second."""


@dataclass
class Workload:
    """The workload of a job: the module, its data, loss and optimiser, with a configuration whose batch size is set."""

    model: nn.Module
    data: Dataset[Any] | BatchStream
    """Samples by number, or batches as they come."""
    loss: Callable[..., torch.Tensor] | Literal["own"]
    """A function of (output, target); "own": forward is given the target as its labels, and returns the loss."""
    optimizer: Optimizer
    config: WorkloadConfig
    batch_norm: str = "synchronised"
    feed: str = "step"
    lengths: SampleLengths | None = None
    """The lengths of samples that are padded; None: they all have one shape."""
    precision: str = FLOAT32
    """The precision that the network computes in (facts/precision.py)."""
    scheduling: Scheduling | None = None
    """The schedulers of the optimizer; None: those that it names, if any."""
    held_out: HeldOut | None = None
    """The data of validations while the job goes on; None: there are none."""
    callbacks: Sequence[Callback] = ()

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
        self.order = self._order()
        self.optimizer = self.optimizer.over(list(names_of_parameters(self.model).values()))
        validate(self.optimizer, ((name, p.dim()) for name, p in self.model.named_parameters() if p.requires_grad))
        self.scheduling = self.scheduling or Scheduling.by_name(self.optimizer)
        self._check_epochs()
        if self.held_out is not None:
            self.held_out.check(self.last_step, self.order.steps_per_epoch)
        if self.scheduling is not None:
            if self.held_out is not None:
                interval = self.held_out.interval(self.order.steps_per_epoch)
                self.scheduling.validates_after = lambda steps_done: steps_done % interval == 0
            self.scheduling.begin(self.order.steps_per_epoch, self.known_steps or 0)
            self.scheduling.check()
        check_precision(self.precision, self.model)

    def _check_epochs(self) -> None:
        """Refuse what happens at the end of each epoch where the data does not say when that is."""
        if self.stream is None or self.stream.batches_per_epoch is not None:
            return
        unknown = f"the {self.stream.name} does not say how many batches an epoch has."
        if self.scheduling is not None and self.scheduling.follows_epochs:
            raise BadValue(
                f"The scheduler is stepped once an epoch; {unknown}",
                hint='Step it by steps: scheduler={"scheduler": ..., "interval": "step"}.',
            )
        if self.held_out is not None and self.held_out.every is None:
            raise BadValue(f"Validation is after each epoch; {unknown}", hint="Write validate_every=, in steps.")

    def _order(self) -> BatchOrder | GivenOrder:
        if isinstance(self.data, BatchStream):
            return GivenOrder(self.data.batches_per_epoch or self.config.steps or 1)
        facts = length(self.data), self.batch_size, self.config.shuffle is not False, self.seed
        if self.lengths is None:
            return BatchOrder(*facts)
        padding, of_samples = self.lengths.of_batches, self.lengths.of_samples
        return LengthOrder(*facts, padding=padding, sample_lengths=of_samples)

    @property
    def stream(self) -> BatchStream | None:
        """The data, where its batches come as they are given; None: samples are taken by number."""
        return self.data if isinstance(self.data, BatchStream) else None

    @property
    def samples(self) -> Dataset[Any]:
        """The data set; of a stream, the samples of the first batch."""
        return self.data.samples() if isinstance(self.data, BatchStream) else self.data

    @property
    def seed(self) -> int:
        return self.config.seed

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which the module computes in its precision."""
        return under(self.precision, self.model)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, and steps whose gradients are not finite are skipped."""
        return self.precision == FP16

    @property
    def optimizer_slots(self) -> int:
        """The numbers that are kept beside each weight: the optimizer's, and its average."""
        return slots(self.optimizer) + (self.config.ema is not None)

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
        is_by_number = not isinstance(self.data, BatchStream)
        return {
            "samples": length(self.samples) if is_by_number else GIVEN, **self.config.decisive,
            **({"shuffle": self.config.shuffle is not False} if is_by_number else {}),
            "batch_norm": self.batch_norm, "optimizer": self.optimizer.to_dict(),
            **({"sample_lengths": self.order.digest} if isinstance(self.order, LengthOrder) else {}),
        }  # fmt: skip

    @property
    def of_one_shape(self) -> Dataset[Any]:
        """The data set with samples of one shape: where they have several lengths, padded to the longest."""
        if self.lengths is None:
            return self.samples
        return Padded(self.data, self.lengths.padding, self.lengths.longest)

    def first_batch(self) -> tuple[Any, Any]:
        """Return a batch to try plans with, in the shape of the longest."""
        if isinstance(self.data, BatchStream):
            return self.data.first_batch()
        order = BatchOrder(length(self.data), self.batch_size, self.config.shuffle is not False, self.seed)
        with Prefetcher(self.of_one_shape, order, 0, 1) as batches:
            return next(batches)[1:]

    def facts_at(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after so many steps keeps, for a resumed run to compare, and to go on from."""
        facts = self.facts
        if isinstance(self.data, BatchStream):
            facts |= {PLACE: self.data.start_of(step)}
        return facts | (self.scheduling.facts(step) if self.scheduling is not None else {})

    def learning_rate(self, step: int) -> float | None:
        """Return the learning rate of a step that is done, of the first group; None where it has none."""
        if self.scheduling is not None:
            return self.scheduling.learning_rate(step)
        rate = stand_ins(self.optimizer)[1][0].get("lr")
        return None if rate is None else float(rate)

    def check_smaller_batch(self, plan: Plan, network: Network) -> None:
        """Refuse a plan by which the smaller last batch of an epoch, if it is known that there is one, cannot be
        trained."""
        if not isinstance(self.data, BatchStream) or self.last_step < self.order.steps_per_epoch:
            return
        if 0 < (samples := self.data.incomplete_samples) < self.batch_size:
            plan_for(plan, network, samples, None)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        return self.data.epoch_of(step) if isinstance(self.data, BatchStream) else step // self.order.steps_per_epoch

    def batches(
        self, first: int, last: int, folder: Path, wake: Callable[[], None], *, is_preloaded: bool = False
    ) -> Rewindable | LoadedBatches:
        """Return the batches of the steps from `first` up to `last`, loaded ahead; `wake` is called as they come."""
        if isinstance(self.data, BatchStream):
            return LoadedBatches(self.data, last, KeptBatches(folder), wake=wake)
        data, order = Numbered(self.data) if is_preloaded else self.data, self.order
        assert isinstance(order, BatchOrder)
        return Rewindable(lambda step: Prefetcher(data, order, step, last, wake=wake), first)

    def check_watched(self, graph: Graph) -> tuple[str, ...]:
        """Return the names of a validation's results. Refuse held-out data that does not fit the graph, and callbacks
        that need a metric which it does not have."""
        names: tuple[str, ...] = ()
        if self.held_out is not None:
            self.held_out.check_fits(graph, self.of_one_shape)
            names = self.held_out.metric_names(graph)
        check_monitors(self.callbacks, names)
        return names

    def examples(self) -> dict[int, Dataset[Any]]:
        """Return data sets that begin with a few samples to capture the network with, for each length; under 0, those
        of the only shape."""
        if self.lengths is None:
            return {0: self.samples}
        return {long: self.lengths.examples(self.data, long) for long in self.lengths.padding.lengths}

    def checkpoint_steps(self, step_seconds: float, trained_bytes: int) -> int:
        """Return the number of steps between two checkpoints: an epoch, within the limits of time."""
        most = max(1, int(CHECKPOINT_SECONDS / max(step_seconds, 1e-6)))
        least_seconds = max(LEAST_CHECKPOINT_SECONDS, trained_bytes / CHECKPOINT_BYTES_PER_SECOND)
        least = math.ceil(least_seconds / max(step_seconds, 1e-6))
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
    unset = {name: field.default for name, field in keywords_of(UpdateConfig).items()}  # older runs lack them
    unset["precision"] = FLOAT32
    for key, value in now.items():
        was = loaded.facts.get(key, unset.get(key, value))
        if was != value and key == "optimizer":
            raise BadValue(
                f"The run was started with the optimizer {_short(was)}; it is now {_short(value)}. It would not go on "
                "as it was.",
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


def go_on_with_data(loaded: checkpoint.Checkpoint, workload: Workload, say: Say | None) -> None:
    """Take data that comes in batches to where the checkpoint was in it."""
    if workload.stream is None:
        return
    skipped = workload.stream.resume(loaded.step, loaded.facts.get(PLACE, {}))
    if say is not None and workload.stream.is_drawn_by_persistent_workers:
        say(
            "The DataLoader's workers persist over epochs: numbers that they draw (augmentation) are others than those "
            "of a run that was never stopped. With persistent_workers=False they are the same."
        )
    if say is not None and skipped:
        say(f"The data is read from the beginning of its epoch: {skipped:,} batch(es) that were trained are skipped.")

"""`mh.train`: captures and plans a model, runs it on the cluster, and puts the trained weights back into the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.given import batch_size_of, given, with_labels
from manyhands.data.loader import Prefetcher, length
from manyhands.data.order import BatchOrder
from manyhands.data.padding import Padded
from manyhands.data.preload import Preload
from manyhands.executor.messages import runs_here
from manyhands.executor.optimizers import slots
from manyhands.executor.scheduling import Scheduling
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.allowed_optimizers import allow_optimizers
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.own_loss import LABELS, OWN_LOSS
from manyhands.job.base import Job, cuts_statistics
from manyhands.job.config import takes
from manyhands.job.given_optimizer import GivenOptimizer, OptimizerLike, read_optimizer
from manyhands.job.lengths import sample_lengths
from manyhands.job.notebook import shown_in_notebook
from manyhands.job.opening import open_run
from manyhands.job.result import TrainResult
from manyhands.job.workload import Workload
from manyhands.planner.task import TileOptions
from manyhands.plans.planning import batch_norm_named, is_strategy, plan_file, read_plan
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.tiles import check_tiles
from manyhands.runtime.record import read_config, read_decided
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring import measure_who_stays
from manyhands.session.opening import expect_session, open_session
from manyhands.training.arguments import DOCUMENT
from manyhands.training.config import TrainConfig
from manyhands.training.options import TrainOptions
from manyhands.training.tuning import fastest_in_trial


@takes(TrainConfig)
def train(
    model: nn.Module,
    data: Dataset[Any],
    *,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None = None,
    optimizer: OptimizerLike,
    scheduler: Any = None,
    **options: Unpack[TrainOptions],
) -> TrainResult:
    """Train `model` on `data`, a data set of pairs (input, target), or of inputs if the model needs no target for its
    loss, over a cluster, exactly as one device would.

    The model keeps its type (float32, float64) and holds the trained weights and buffers when this returns.
    `TrainConfig` describes the options.

    data            any of torch.utils.data: map-style, a DataLoader (its data set, batch size and order), an
                    IterableDataset (one pass of it is kept in memory; mh.collect takes a part)
    loss            any callable (output, target) that torch.export can capture; left out: the loss that the model's
                    forward returns, given the target as its labels if it takes any
    optimizer       mh.Optimizer(name, **options) for any torch.optim class, with groups of weights and schedules; or
                    an optimizer of torch.optim over the model's parameters, a list of several over different ones, or
                    a function that makes them of the list of named parameters. Parameters in none stay as they are
    scheduler       a scheduler of torch.optim, a function that makes it of the optimizer, or a dict with "scheduler",
                    "interval" ("step" or "epoch") and "monitor" (the metric of ReduceLROnPlateau); or a list of these
    """
    return train_with(TrainConfig.from_keywords("mh.train", options), model, data, loss, optimizer, scheduler)


def train_with(
    config: TrainConfig,
    model: nn.Module,
    data: Dataset[Any],
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    optimizer: OptimizerLike,
    scheduler: Any = None,
) -> TrainResult:
    """Train as configured, and return the result."""
    config = shown_in_notebook(config)
    allow_optimizers(config.allow_optimizers)
    read = read_optimizer(model, optimizer, scheduler)
    with read.frozen():
        return _train(config, workload_of(config, model, data, loss, read.optimizer, read.scheduling), read)


def _train(config: TrainConfig, workload: Workload, read: GivenOptimizer) -> TrainResult:
    say, plan, stored = config.say, config.plan, dict(config.config or {})
    tiles = config.tile_options
    expect_session(config.cluster)
    with (
        open_run(
            workload,
            document=stored.get(DOCUMENT),
            on_captured=lambda graph: check_tiles(graph.network, tiles if plan == "tiles" else None),
            tensorboard=config.tensorboard,
        ) as opened,
        open_session(
            config.cluster, logs=opened.folder / "workers", say=say, silence_seconds=config.silence_seconds,
            rendezvous=config.rendezvous,
        ) as session,
    ):  # fmt: skip
        retry_policy = RetryPolicy(config.replan, config.min_devices, config.max_devices, session.rejoin_seconds)
        session.begin(retry_policy)
        job = TrainJob(workload, session, opened)
        decided: dict[str, Any] = {
            "plan": "given" if isinstance(plan, Plan) else str(plan), "micro_batches": config.micro_batches,
        }  # fmt: skip
        if plan == "tiles":
            decided["tiles"] = msgspec.to_builtins(tiles or TileOptions())
        planned = job.planned(retry_policy, decided if opened.is_resumed else None)
        opened.record.decided(
            {**stored, **workload.facts, "steps": opened.last_step, **decided}, planned.cluster, planned.profile,
            planned.plan,
        )  # fmt: skip
        if config.on_planned is not None:
            config.on_planned(planned)
        strategy = str(plan) if not isinstance(plan, Plan) and is_strategy(str(plan)) else "auto"
        if not opened.is_resumed:
            job.begin_with(*read.state())
        result, planned = job.run(planned, config.on_step, strategy, retry_policy)
        read.take_back(job.trained.optimizer, job.trained.scalars)
        job.finish(planned, result)
        return result


def workload_of(
    config: TrainConfig,
    model: nn.Module,
    data: Dataset[Any],
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    optimizer: Optimizer,
    scheduling: Scheduling | None = None,
) -> Workload:
    """Return the workload, with the batch size and the order of a DataLoader where the configuration has none.

    Samples of different lengths are read once, to know these.
    """
    samples = given(data)
    data, test = samples.data, given(config.test).data if config.test is not None else None
    if loss is None or loss == OWN_LOSS:
        loss, data, test = OWN_LOSS, with_labels(data, LABELS), with_labels(test, LABELS) if test is not None else None
    config = replace(
        config, batch_size=batch_size_of(samples, config.batch_size), shuffle=samples.shuffles(config.shuffle),
        test=test,
    )  # fmt: skip
    if config.lengths is not None and config.say is not None:
        config.say(f"reading {length(data):,} samples once, for their lengths")
    lengths = sample_lengths(data, test, config.lengths, config.pad)
    if lengths is not None:
        assert config.lengths is not None
        test = Padded(test, lengths.padding, lengths.longest) if test is not None else None
        config = replace(config, lengths=tuple(sorted({*config.lengths})), test=test)
    return Workload(model, data, loss, optimizer, config, config.batch_norm, config.feed, lengths, scheduling)


def applied(config: TrainConfig, plan: Plan, batch_size: int) -> Plan:
    """Return the plan adapted to the configuration: a plan without shares of samples fits any batch size."""
    if not any(isinstance(stage.share, BySamples) for stage in plan.stages):
        plan = msgspec.structs.replace(plan, batch_size=batch_size * plan.steps_per_round)
    if config.reduce != "gateway":
        return plan
    stages = tuple(msgspec.structs.replace(stage, reduce="gateway") for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


class TrainJob(Job):
    """A training job, which plans for any cluster, by any strategy."""

    @property
    def settings(self) -> TrainConfig:
        """The configuration of this kind of job."""
        assert isinstance(self.config, TrainConfig)
        return self.config

    @property
    def wanted_backups(self) -> int | None:
        return self.settings.backup_every

    def planned(self, retry_policy: RetryPolicy, decided_before: Mapping[str, Any] | None) -> PlannedRun:
        """Measure, plan and predict. A resumed run with the same options keeps its plan: another would round
        differently."""
        network, config = self.graph.network, self.settings
        requested = config.plan
        alternatives: dict[str, float] = {}
        before = self._decided(decided_before) if decided_before is not None else None
        if before is not None:
            cluster, profile, _ = before
        else:
            cluster, profile = measure_who_stays(
                self.session, self.graph, self.workload.batch_size,
                retry_policy if is_strategy(str(requested)) else None, optimizer=self.workload.optimizer, say=self.say,
            )  # fmt: skip
        if before is not None and is_strategy(str(requested)):
            plan = before[2]
        elif isinstance(requested, Plan):
            plan = requested
        elif is_strategy(str(requested)):
            made = make_plan(
                network, cluster, batch_size=self.workload.batch_size, strategy=str(requested), profile=profile,
                micro_batches=config.micro_batches, optimizer_slots=slots(self.workload.optimizer),
                tiles=config.tile_options, batch_norm=batch_norm_named(self.workload.batch_norm),
            )  # fmt: skip
            plan = self._runnable(made.plan, [c.plan for c in made.candidates if c.plan is not None])
            if config.tune > 1:
                plan = self._tried([plan, *(other for other in made.runners_up if other != plan)], config.tune, profile)
            alternatives = {c.name: c.seconds for c in made.candidates if c.plan is not None}
        else:
            plan = read_plan(plan_file(str(requested)), network, cluster)
        plan = resolve(applied(config, plan, self.workload.batch_size), network, cluster)
        if plan.step_size != self.workload.batch_size:
            raise BadPlan(f"The plan is for batches of {plan.step_size}; batch_size is {self.workload.batch_size}.")
        if not plan.is_training:
            raise BadPlan(f"The plan's order is '{plan.order}', which does not train.", hint="Use order: 1f1b.")
        if self.workload.batch_norm == "local" and plan.batch_norm != "local":
            hint = "Write batch_norm: local in the plan."
            raise BadPlan(f"batch_norm is 'local'; the plan's is '{plan.batch_norm}'.", hint=hint)
        return replace(self.checked(plan, cluster, profile), alternatives=alternatives)

    def _decided(self, options: Mapping[str, Any]) -> tuple[Cluster, Profile, Plan] | None:
        """Return the stored cluster, profile and plan of this run, if the options and the devices are the same."""
        try:
            config = read_config(self.folder)
            cluster, profile, plan = read_decided(self.folder, self.graph.network)
        except ManyhandsError:
            return None
        is_same = all(config.get(key) == value for key, value in options.items())
        names = set(self.session.cluster.names)
        return (cluster, profile, plan) if is_same and set(cluster.names) == names == set(profile.devices) else None

    def _runnable(self, best: Plan, others: list[Plan]) -> Plan:
        """Return the fastest plan that the executor can run. `runs_here` refuses stages whose devices would have to add
        up gradients of several types; no strategy for training plans stages shared by channels, which are for
        inference.

        Batch statistics over a part of the batch differ from those over all of it: plans that keep it whole go first.
        """
        runnable: list[Plan] = []
        for plan in (best, *others):
            try:
                runs_here(plan, self.graph.network)
                runnable.append(plan)
            except BadPlan as error:
                refusal = error
        if not runnable:
            raise refusal
        return next((plan for plan in runnable if not cuts_statistics(plan, self.graph.network)), runnable[0])

    def _tried(self, plans: list[Plan], most: int, profile: Profile) -> Plan:
        """Return the fastest of the first plans in a trial of a few steps; only of those that compute the same batch
        statistics as the first."""
        alike = []
        for plan in plans:
            with contextlib.suppress(BadPlan):
                runs_here(plan, self.graph.network)
                if cuts_statistics(plan, self.graph.network) == cuts_statistics(plans[0], self.graph.network):
                    alike.append(plan)
        if self.say is not None:
            self.say(f"trying {min(most, len(alike))} plan(s)")
        order = BatchOrder(*self.workload.batch_facts)
        with Prefetcher(self.workload.of_one_shape, order, 0, 1) as batches:
            _, inputs, targets = next(iter(batches))
        kernels = {name: device_profile.kernels for name, device_profile in profile.devices.items()}
        trials = fastest_in_trial(
            self.session.coordinator,
            self.graph,
            alike[:most],
            self.workload.optimizer,
            kernels,
            Preload(inputs, targets, self.workload.batch_size),
            is_preloaded=self.workload.feed == "start",
        )
        for plan, seconds in trials:
            self.record.event("tried", seconds=seconds, plan=plan.to_dict())
        return trials[0][0] if trials else plans[0]

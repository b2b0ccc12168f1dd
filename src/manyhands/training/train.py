"""`mh.train`: captures and plans a model, runs it on the cluster, and puts the trained weights back into the module."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.batch_errors import deaths_named
from manyhands.data.preload import Preload
from manyhands.executor.averaging import check_averaged
from manyhands.executor.messages import runs_here
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.allowed_optimizers import allow_optimizers
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.plan import BySamples, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.compiler import without_compiler
from manyhands.job.base import Guide, Job
from manyhands.job.callback_list import ValidationListener
from manyhands.job.config import takes
from manyhands.job.given_optimizer import GivenOptimizer, OptimizerLike, read_optimizer
from manyhands.job.notebook import shown_in_notebook
from manyhands.job.opening import open_run
from manyhands.job.ordering import cuts_statistics
from manyhands.job.refining import Refinement, Refiner
from manyhands.job.replanning import Replanner
from manyhands.job.result import TrainResult
from manyhands.job.workload import Workload
from manyhands.planner.task import TileOptions
from manyhands.plans.planned import Planned
from manyhands.plans.planning import batch_norm_named, is_strategy, plan_file, read_plan
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.tiles import check_tiles
from manyhands.runtime.controller import Controller
from manyhands.runtime.gpu_settings import gpu_math
from manyhands.runtime.record import read_config, read_decided
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring import among_who_stay, is_plain, measure_who_stays
from manyhands.session.opening import expect_session, open_session
from manyhands.session.quick_measuring import measure_within, thorough_seconds
from manyhands.session.step_costs import MEASURING_SECONDS, are_costs_known, with_step_costs
from manyhands.training.arguments import DOCUMENT
from manyhands.training.callbacks import TensorBoard
from manyhands.training.config import TrainConfig
from manyhands.training.given_workload import workload_of
from manyhands.training.options import TrainOptions
from manyhands.training.tuning import fastest_in_trial

PLANNING = 0.5
"""The part of the limit of seconds for measuring that planning may take."""
WHOLE_PLANNING = 15.0
"""How many times as long as the quick strategies all of them are likely to take to plan."""


@takes(TrainConfig)
def train(
    model: nn.Module,
    data: Dataset[Any] | Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None = None,
    optimizer: OptimizerLike,
    scheduler: Any = None,
    **options: Unpack[TrainOptions],
) -> TrainResult:
    """Train `model` on `data`, pairs (input, target), or inputs if the model needs no target for its loss, over a
    cluster, exactly as one device would.

    The model keeps its type (float32, float64), whatever `precision` it computes in, and holds the trained weights and
    buffers when this returns. `TrainConfig` describes the options.

    data            any of torch.utils.data: map-style, a DataLoader (used as it is), an IterableDataset; or an iterable
                    of batches, or a function that returns one
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
    data: Any,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    optimizer: OptimizerLike,
    scheduler: Any = None,
) -> TrainResult:
    """Train as configured, and return the result."""
    config = shown_in_notebook(config)
    allow_optimizers(config.allow_optimizers)
    expect_session(config.cluster)
    with without_compiler():
        read = read_optimizer(model, optimizer, scheduler)
        with read.frozen():
            return _train(config, workload_of(config, model, data, loss, read.optimizer, read.scheduling), read)


def _train(config: TrainConfig, workload: Workload, read: GivenOptimizer) -> TrainResult:
    say, plan, stored = config.say, config.plan, dict(config.config or {})
    tiles = config.tile_options
    with (
        open_run(
            workload,
            document=stored.get(DOCUMENT),
            on_captured=lambda graph: check_tiles(graph.network, tiles if plan == "tiles" else None),
            tensorboard=config.tensorboard or any(isinstance(callback, TensorBoard) for callback in config.callbacks),
            checks_meanwhile=True,
        ) as opened,
        deaths_named(lambda: workload.stream.next_step if workload.stream is not None else 0),
        open_session(
            config.cluster, logs=opened.folder / "workers", say=say, silence_seconds=config.silence_seconds,
            rendezvous=config.rendezvous,
        ) as session,
    ):  # fmt: skip
        retry_policy = RetryPolicy(config.replan, config.min_devices, config.max_devices, session.rejoin_seconds)
        session.begin(retry_policy)
        session.coordinator.gpu_math = gpu_math(exact=config.exact)
        job = TrainJob(workload, session, opened)
        decided: dict[str, Any] = {
            "plan": "given" if isinstance(plan, Plan) else str(plan), "micro_batches": config.micro_batches,
        }  # fmt: skip
        if plan == "tiles":
            decided["tiles"] = msgspec.to_builtins(tiles or TileOptions())
        planned = job.planned(retry_policy, decided if opened.is_resumed else None)
        opened.finish_checks()
        opened.record.decided(
            {**stored, **workload.facts, "steps": opened.last_step, **decided}, planned.cluster, planned.profile,
            planned.plan,
        )  # fmt: skip
        if config.on_planned is not None:
            config.on_planned(planned)
        strategy = str(plan) if not isinstance(plan, Plan) and is_strategy(str(plan)) else "auto"
        if not opened.is_resumed:
            job.begin_with(*read.state())
        callbacks = job.watch.callbacks
        try:
            result, planned = job.run(planned, config.on_step, strategy, retry_policy)
            read.take_back(job.trained.optimizer, job.trained.scalars)
            job.finish(planned, result)
        except BaseException as error:
            callbacks.end(error=error)
            raise
        callbacks.end(workload.model)
        return result


def needs_norm(config: TrainConfig) -> bool:
    """Return whether the devices learn of all gradients before each update: to clip them, or to skip it."""
    return config.clip_norm is not None or config.scales_loss


def applied(config: TrainConfig, plan: Plan, batch_size: int) -> Plan:
    """Return the plan adapted to the configuration: a plan without shares of samples fits any batch size."""
    plan = msgspec.structs.replace(plan, gradient_norm=plan.gradient_norm or needs_norm(config))
    if not any(isinstance(stage.share, BySamples) for stage in plan.stages):
        plan = msgspec.structs.replace(plan, batch_size=batch_size * plan.steps_per_round)
    if config.reduce != "gateway":
        return plan
    stages = tuple(msgspec.structs.replace(stage, reduce="gateway") for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


class TrainJob(Job):
    """A training job, which plans for any cluster, by any strategy."""

    is_partly_planned = False
    """Whether there was no time for every strategy."""
    planning_seconds = 0.0
    refiner: Refiner | None = None
    """Measures and plans again while training, where that is worth it."""

    @property
    def settings(self) -> TrainConfig:
        """The configuration of this kind of job."""
        assert isinstance(self.config, TrainConfig)
        return self.config

    @property
    def wanted_backups(self) -> int | None:
        return self.settings.backup_every

    def listeners(self) -> tuple[ValidationListener, ...]:
        return () if self.workload.scheduling is None else (self.workload.scheduling,)

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
            cluster, profile = self._measured(retry_policy)
        if before is not None and is_strategy(str(requested)):
            plan = before[2]
        elif isinstance(requested, Plan):
            plan = requested
        elif is_strategy(str(requested)):
            began = time.monotonic()
            made = self._made(cluster, profile, PLANNING * config.profile_seconds or math.inf)
            self.is_partly_planned, self.planning_seconds = made.is_partial, time.monotonic() - began
            plan = self._runnable(made.plan, [c.plan for c in made.candidates if c.plan is not None])
            if config.tune > 1:
                self.opened.finish_checks()
                plan = self._tried([plan, *(other for other in made.runners_up if other != plan)], config.tune, profile)
            alternatives = {c.name: c.seconds for c in made.candidates if c.plan is not None}
        else:
            plan = read_plan(plan_file(str(requested)), network, cluster)
        plan = resolve(applied(config, plan, self.workload.batch_size), network, cluster)
        if config.ema is not None:
            check_averaged(plan)
        if plan.step_size != self.workload.batch_size:
            raise BadPlan(f"The plan is for batches of {plan.step_size}; batch_size is {self.workload.batch_size}.")
        if not plan.is_training:
            raise BadPlan(f"The plan's order is '{plan.order}', which does not train.", hint="Use order: 1f1b.")
        if self.workload.batch_norm == "local" and plan.batch_norm != "local":
            hint = "Write batch_norm: local in the plan."
            raise BadPlan(f"batch_norm is 'local'; the plan's is '{plan.batch_norm}'.", hint=hint)
        return replace(self.checked(plan, cluster, profile), alternatives=alternatives)

    def _measured(self, retry_policy: RetryPolicy) -> tuple[Cluster, Profile]:
        """Return the cluster and the profile, as they are stored or measured now, within the limit of seconds."""
        workload, seconds = self.workload, self.settings.profile_seconds
        retry_policy_of_strategy = retry_policy if is_strategy(str(self.settings.plan)) else None
        if not seconds:
            return measure_who_stays(
                self.session, self.graph, workload.batch_size, retry_policy_of_strategy, optimizer=workload.optimizer,
                say=self.say,
            )  # fmt: skip
        return among_who_stay(
            self.session, retry_policy_of_strategy, self.say,
            lambda: measure_within(
                self.session, self.graph, workload.batch_size, seconds, optimizer=workload.optimizer, say=self.say
            ),
        )  # fmt: skip

    def _made(self, cluster: Cluster, profile: Profile, within_seconds: float = math.inf) -> Planned:
        """Plan by the strategy."""
        config = self.settings
        return make_plan(
            self.graph.network, cluster, batch_size=self.workload.batch_size, strategy=str(config.plan),
            profile=profile, micro_batches=config.micro_batches, optimizer_slots=self.workload.optimizer_slots,
            tiles=config.tile_options, batch_norm=batch_norm_named(self.workload.batch_norm),
            gradient_norm=needs_norm(config), within_seconds=within_seconds,
        )  # fmt: skip

    def replanner(self, planned: PlannedRun, strategy: str) -> Guide:
        replanner = super().replanner(planned, strategy)
        assert isinstance(replanner, Replanner)
        config, profiles = self.settings, planned.profile.devices.values()
        is_coarse = any(profile.is_coarse for profile in profiles)
        is_free = is_strategy(str(config.plan)) and config.tune <= 1 and config.feed == "step"
        has_costs = not is_plain(self.session) or are_costs_known(self.session, planned.cluster)
        if not config.profile_seconds or not is_free or not (is_coarse or self.is_partly_planned or not has_costs):
            return replanner
        workload = self.workload
        measuring_seconds = thorough_seconds(planned.profile, workload.batch_size) if is_coarse else 0.0

        def measure() -> tuple[Cluster, Profile]:
            if not is_coarse:
                return with_step_costs(self.session, planned.cluster), planned.profile
            return measure_within(
                self.session, self.graph, workload.batch_size, measuring_seconds, optimizer=workload.optimizer,
                refresh=True,
            )  # fmt: skip

        def plan(cluster: Cluster, profile: Profile) -> Plan:
            made = self._made(cluster, profile)
            chosen = self._runnable(made.plan, [other.plan for other in made.candidates if other.plan is not None])
            return resolve(applied(config, chosen, workload.batch_size), self.graph.network, cluster)

        seconds = measuring_seconds + self.planning_seconds * (WHOLE_PLANNING if self.is_partly_planned else 1.0)
        seconds += 0.0 if has_costs else MEASURING_SECONDS
        is_measured = is_coarse or not has_costs
        course = Refinement(seconds, self.last_step, measure if is_measured else None, plan, self.record.measured)
        self.refiner = Refiner(replanner, planned, course)
        return self.refiner

    def controller(self) -> Controller | None:
        return self.refiner

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
        inputs, targets = self.workload.first_batch()
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

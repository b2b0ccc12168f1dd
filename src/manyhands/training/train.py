"""`mh.train`: capture, plan, run on the cluster, and put the trained weights back into the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.given import batch_size_of, given
from manyhands.data.loader import Prefetcher
from manyhands.data.preload import Preload
from manyhands.executor.messages import runs_here
from manyhands.executor.optimizers import slots
from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import BadPlan, ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.job.base import Job, OnOpened, OnPlanned, OnStep, cuts_statistics, opened
from manyhands.job.options import Lasting, Options, Sharing
from manyhands.job.result import TrainResult
from manyhands.planner.task import TileOptions
from manyhands.plans.planning import batch_norm_named, is_strategy, plan_file, read_plan
from manyhands.plans.planning import plan as make_plan
from manyhands.plans.tiles import check_tiles
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS
from manyhands.runtime.order import WAIT_LIMIT_SECONDS
from manyhands.runtime.record import read_config, read_decided
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring import measure_who_stays
from manyhands.session.opening import expect_session, open_session
from manyhands.session.session import Say
from manyhands.training.tuning import fastest_in_trial


def train(
    model: nn.Module,
    data: Dataset[Any],
    *,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool | None = None,
    cluster: Cluster | LabCluster | str | Path | Coordinator | None = None,
    plan: Plan | str | Path = "auto",
    batch_norm: str = "synchronised",
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool | str | Path = False,
    test: Dataset[Any] | None = None,
    verify: bool | None = None,
    micro_batches: int | None = None,
    tune: int = 0,
    tiles: TileOptions | None = None,
    reduce: str = "allreduce",
    feed: str = "step",
    granularity: str = "blocks",
    replan: str = "auto",
    backup_every: int | None = None,
    min_devices: int = 1,
    max_devices: int | None = None,
    silence_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    on_opened: OnOpened | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: Say | None = None,
    tensorboard: bool = False,
    limit_seconds: float = WAIT_LIMIT_SECONDS,
) -> TrainResult:
    """Train `model` on `data`, a data set of pairs (input, target), over a cluster, exactly as one device would.

    data        any of torch.utils.data: map-style, a DataLoader (its data set, batch size and order), an
                IterableDataset (one pass of it is kept in memory; mh.collect takes a part)
    batch_size  samples of a step, over all devices; None: the DataLoader's
    loss        any callable (output, target) that torch.export can capture
    optimizer   mh.Optimizer(name, **options) for any torch.optim class, with a learning-rate schedule if wanted
    steps       how many steps, in place of `epochs`; an incomplete last batch of an epoch is left out
    shuffle     another order in every epoch; None: as the DataLoader does, else yes
    cluster     mh.Cluster.local(n), a YAML file, or an mh.Coordinator that workers have joined; None: local workers
    plan        a Plan (mh.tile_plan and mh.pipeline_plan make one), a plan file, or a strategy: "auto", "single",
                "samples", "pipeline", "tiles", "mixed"; "auto", "pipeline" and "mixed" may leave devices out
    tune        try so many of the strategy's best plans for a few steps each, then those nearest to the best of
                several, and take the fastest; 0: trust the simulation
    reduce      how the devices of a stage add up gradients: "allreduce", or by a "gateway" (the first of them)
    feed        when samples travel: those of a "step" before it, or all at the "start", to whoever may need them: then
                only their numbers do. "start" is for data that is the same in every epoch, and fits the devices
    batch_norm  "synchronised" (statistics over all devices; of each micro-batch where there are several) or "local"
                (per replica, as DDP; of the buffers, which then differ, the first replica's are kept)
    resume      True: go on from the newest checkpoint in `folder`; or the folder of the run to go on with
    test        held-out data: evaluated by the same workers afterwards
    verify      compare the captured graph's loss and gradients on a few samples with the module's own before the first
                step; a difference beyond rounding is an error that names the first layer. None: yes, if there is room
    replan      how to go on when a worker is lost, joins or leaves: "light" (shares, tiles and cuts move), "heavy"
                (planned anew) or "auto"
    backup_every
                rounds between two copies of all weights that workers keep for each other; None: so that it is hardly
                felt; 0: none, so that a loss costs what came after the last checkpoint
    min_devices with fewer left it waits a minute for others to join, then ends; where nobody can join, it ends at once.
                How many it begins with is the cluster's: those of mh.Cluster, or who has joined an mh.Coordinator
                (its wait_for waits for so many)
    max_devices more are not used, though they join; None: all are
    silence_seconds
                a local worker that says nothing for so long is lost (an mh.Coordinator has its own)
    tensorboard write logs for TensorBoard into the run's folder too (pip install 'manyhands[tensorboard]')
    limit_seconds
                how long anybody waits for a message, or for a step, of which nothing comes

    The model keeps its type (float32, float64) and holds the trained weights and buffers when this returns.
    """
    samples, held_out = given(data), given(test).data if test is not None else None
    options = Options(
        model, samples.data, loss, optimizer, batch_size_of(samples, batch_size), epochs, steps,
        samples.shuffles(shuffle), batch_norm, seed, feed,
    )  # fmt: skip
    lasting = Lasting(replan, backup_every, min_devices, max_devices)
    expect_session(cluster)
    with (
        opened(
            options,
            folder=folder,
            resume=resume,
            granularity=granularity,
            name=name,
            say=say,
            typed=(config or {}).get("wish"),
            on_captured=lambda graph: check_tiles(graph.network, tiles if plan == "tiles" else None),
            on_opened=on_opened,
            tensorboard=tensorboard,
            verify=verify,
        ) as found,
        open_session(cluster, logs=found.folder / "workers", say=say, silence_seconds=silence_seconds) as session,
    ):
        endurance = lasting.endurance(session.rejoin_seconds)
        session.begin(endurance)
        job = TrainJob(
            options, found.graph, session, found.record, found.start, found.last_step, found.folder, say, held_out,
            limit_seconds,
        )  # fmt: skip
        asked = {"plan": "given" if isinstance(plan, Plan) else str(plan), "micro_batches": micro_batches}
        if plan == "tiles":
            asked["tiles"] = msgspec.to_builtins(tiles or TileOptions())
        wish = Sharing(plan, micro_batches, tiles, reduce, tune)
        planned = job.planned(wish, endurance, asked if found.is_resumed else None)
        found.record.decided(
            {**dict(config or {}), **options.facts, "steps": found.last_step, **asked}, planned.cluster,
            planned.profile, planned.plan,
        )  # fmt: skip
        if on_planned is not None:
            on_planned(planned)
        strategy = str(plan) if not isinstance(plan, Plan) and is_strategy(str(plan)) else "auto"
        result, planned = job.run(planned, on_step, strategy, lasting)
        job.finish(planned, result, loss)
        return result


class TrainJob(Job):
    """Plans for any cluster, by any strategy."""

    def planned(self, wish: Sharing, endurance: RetryPolicy, asked_before: Mapping[str, Any] | None) -> PlannedRun:
        """Measure, plan, predict. A run that goes on, asked for as before, keeps its plan: another would round
        otherwise."""
        network, wanted = self.graph.network, wish.plan
        alternatives: dict[str, float] = {}
        known = self._decided(asked_before) if asked_before is not None else None
        if known is not None:
            cluster, profile, _ = known
        else:
            cluster, profile = measure_who_stays(
                self.session, self.graph, self.options.batch_size, endurance if is_strategy(str(wanted)) else None,
                optimizer=self.options.optimizer, say=self.say,
            )  # fmt: skip
        if known is not None and is_strategy(str(wanted)):
            plan = known[2]
        elif isinstance(wanted, Plan):
            plan = wanted
        elif is_strategy(str(wanted)):
            made = make_plan(
                network, cluster, batch_size=self.options.batch_size, strategy=str(wanted), profile=profile,
                micro_batches=wish.micro_batches, optimizer_slots=slots(self.options.optimizer), tiles=wish.tiles,
                batch_norm=batch_norm_named(self.options.batch_norm),
            )  # fmt: skip
            plan = self._runnable(made.plan, [c.plan for c in made.candidates if c.plan is not None])
            if wish.tune > 1:
                plan = self._tried([plan, *(one for one in made.runners_up if one != plan)], wish.tune, profile)
            alternatives = {c.name: c.seconds for c in made.candidates if c.plan is not None}
        else:
            plan = read_plan(plan_file(str(wanted)), network, cluster)
        plan = resolve(wish.applied(plan, self.options.batch_size), network, cluster)
        if plan.step_size != self.options.batch_size:
            raise BadPlan(f"The plan is for batches of {plan.step_size}; batch_size is {self.options.batch_size}.")
        if not plan.is_training:
            raise BadPlan(f"The plan's order is '{plan.order}', which does not train.", hint="Use order: 1f1b.")
        if self.options.batch_norm == "local" and plan.batch_norm != "local":
            hint = "Write batch_norm: local in the plan."
            raise BadPlan(f"batch_norm is 'local'; the plan's is '{plan.batch_norm}'.", hint=hint)
        return replace(self.checked(plan, cluster, profile), alternatives=alternatives)

    def _decided(self, asked: Mapping[str, Any]) -> tuple[Cluster, Profile, Plan] | None:
        """What this run was decided with, if it was asked for in the same way and for the same devices."""
        try:
            config = read_config(self.folder)
            cluster, profile, plan = read_decided(self.folder, self.graph.network)
        except ManyhandsError:
            return None
        is_same = all(config.get(key) == value for key, value in asked.items())
        names = set(self.session.cluster.names)
        return (cluster, profile, plan) if is_same and set(cluster.names) == names == set(profile.devices) else None

    def _runnable(self, best: Plan, others: list[Plan]) -> Plan:
        """The fastest plan that the executor can run. `runs_here` refuses stages whose devices would have to add up
        gradients of several types; stages shared by channels, which are for inference, no strategy plans for training.

        Batch statistics over a part of the batch are others than over all of it: plans that keep it whole go first.
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
        """The fastest of the first plans in a trial of a few steps; only of those that take statistics alike."""
        alike = []
        for plan in plans:
            with contextlib.suppress(BadPlan):
                runs_here(plan, self.graph.network)
                if cuts_statistics(plan, self.graph.network) == cuts_statistics(plans[0], self.graph.network):
                    alike.append(plan)
        if self.say is not None:
            self.say(f"trying {min(most, len(alike))} plan(s)")
        with Prefetcher(self.options.data, self.options.order, 0, 1) as batches:
            _, inputs, targets = next(iter(batches))
        kernels = {name: one.kernels for name, one in profile.devices.items()}
        trials = fastest_in_trial(
            self.session.coordinator,
            self.graph,
            alike[:most],
            self.options.optimizer,
            kernels,
            Preload(inputs, targets, self.options.batch_size),
            is_laid=self.options.feed == "start",
        )
        for plan, seconds in trials:
            self.record.event("tried", seconds=seconds, plan=plan.to_dict())
        return trials[0][0] if trials else plans[0]

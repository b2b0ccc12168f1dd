"""`mh.train`: capture, plan, run on the cluster, and put the trained weights back into the module."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.api.asked import Lasting, Options, Sharing, check_same, resumed_from
from manyhands.api.evaluation import EvaluateResult, evaluate_in, inference_plan
from manyhands.api.evaluation import captured as captured
from manyhands.api.public import batch_norm_named, is_strategy, plan_file, read_plan, simulate
from manyhands.api.public import plan as make_plan
from manyhands.api.recovering import Replanner, chosen_backups, happened
from manyhands.api.session import Say, Session, measure, open_session
from manyhands.api.tile_report import Traffic, planned_traffic
from manyhands.api.tuning import fastest_in_trial
from manyhands.data.loader import Prefetcher, length
from manyhands.data.rewinding import Rewindable
from manyhands.executor import checkpoint
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import plan_bytes, runs_here
from manyhands.executor.optimizers import slots
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadData, BadFile, BadPlan, ManyhandsError, NotFinite, WorkerLost
from manyhands.facts.lab import LabCluster
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.files.documents import write_document
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.planner.task import TileWish
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.journey import Endurance, Journey, Travelled
from manyhands.runtime.order import WAIT_LIMIT_SECONDS, Order, RunState, snapshot_steps
from manyhands.runtime.record import PLOTS, RunRecord, new_folder, read_config, read_decided, resumed_state
from manyhands.runtime.watch import SILENCE_SECONDS
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation

REJOIN_SECONDS = 60.0
"""How long a job with too few workers waits for others to join, or to join again."""
WARM_UP_STEPS = 2
TRACED_STEPS = 3

OnStep = Callable[[int, float, float], None]
"""Step, loss, seconds."""
OnPlanned = Callable[["Planned"], None]


@dataclass(frozen=True)
class Planned:
    """What is about to run, and what the simulator expects of it."""

    plan: Plan
    network: Network
    cluster: Cluster
    profile: Profile
    prediction: Simulation
    steps: int
    folder: Path
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """What else `auto` looked at -> predicted seconds of a step."""


@dataclass
class TrainResult:
    """What training gave. The module holds the trained weights."""

    losses: list[float]
    """One per step."""
    plan: Plan
    folder: Path
    throughput: float
    """Samples per second, without the first steps."""
    predicted_seconds: float
    """Of one step, simulated before the run."""
    measured_seconds: float
    """Of one step, median without the first ones."""
    logs: dict[str, DeviceLog]
    planned_bytes: dict[tuple[str, str], int]
    """(from, to) -> bytes the plan says travel in a step."""
    traffic: Traffic
    """What the plan says travels in a step, and what for."""
    checkpoint: Path
    steps: int
    scale: float | None = None
    """How many times slower than in life everything went; None: this was life, not a lab."""
    stands_in: bool = False
    """A lab was asked for; plain processes stood in, whose links were shaped and whose speed was this machine's."""
    test: EvaluateResult | None = None
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Each time workers were lost, joined or left: how it went on, from which step, after how many seconds."""

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Device -> its tensor bytes when they were most, by part, counted in one step."""
        found = {name: self.logs[name] for name in self.plan.devices if name in self.logs}
        return {name: log.peak_parts for name, log in found.items() if log.peak_bytes}

    @property
    def bytes_by_use(self) -> dict[str, int]:
        """Bytes that the plan says travel in a step: input_output, boundary, weights (TILE Fig. 5.2c)."""
        return self.traffic.by_use

    @property
    def accuracy(self) -> float | None:
        """On the held-out data, where some was given."""
        return self.test.accuracy if self.test is not None else None


def train(
    model: nn.Module,
    data: Dataset[Any],
    *,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    cluster: Cluster | LabCluster | str | Path | Coordinator | None = None,
    plan: Plan | str | Path = "auto",
    batch_norm: str = "synchronised",
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool | str | Path = False,
    test: Dataset[Any] | None = None,
    micro_batches: int | None = None,
    tune: int = 0,
    tiles: TileWish | None = None,
    reduce: str = "allreduce",
    granularity: str = "blocks",
    replan: str = "auto",
    backup_every: int | None = None,
    workers: tuple[int, int | None] = (1, None),
    silence_seconds: float = SILENCE_SECONDS,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: Say | None = None,
    limit_seconds: float = WAIT_LIMIT_SECONDS,
) -> TrainResult:
    """Train `model` on `data`, a map-style data set of (input, target), over a cluster, exactly as one device would.

    loss        any callable (output, target) that torch.export can capture
    optimizer   mh.Optimizer(name, **options) for any torch.optim class, with a learning-rate schedule if wanted
    steps       how many steps, in place of `epochs`; an incomplete last batch of an epoch is left out
    cluster     mh.Cluster.local(n), a YAML file, or an mh.Coordinator that workers have joined; None: local workers
    plan        a Plan (mh.tile_plan and mh.pipeline_plan make one), a plan file, or a strategy: "auto", "single",
                "samples", "pipeline", "tiles"; "auto" and "pipeline" may leave devices out
    tune        try so many of the strategy's best plans for a few steps each, and take the fastest; 0: trust the
                simulation
    reduce      how the devices of a stage add up gradients: "allreduce", or by a "gateway" (the first of them)
    batch_norm  "synchronised" (statistics over all devices; of each micro-batch where there are several) or "local"
                (per replica, as DDP; of the buffers, which then differ, the first replica's are kept)
    resume      True: go on from the newest checkpoint in `folder`; or the folder of the run to go on with
    test        held-out data: evaluated by the same workers afterwards
    replan      how to go on when a worker is lost, joins or leaves: "light" (shares, tiles and cuts move), "heavy"
                (planned anew) or "auto"
    backup_every
                rounds between two copies of all weights that workers keep for each other; None: so that it is hardly
                felt; 0: none, so that a loss costs what came after the last checkpoint
    workers     (least, most): with fewer it waits for others to join, more are not used; most may be None
    silence_seconds
                a local worker that says nothing for so long is lost (an mh.Coordinator has its own)
    limit_seconds
                how long anybody waits for a message, or for a step, of which nothing comes

    The model keeps its type (float32, float64) and holds the trained weights and buffers when this returns.
    """
    options = Options(model, data, loss, optimizer, batch_size, epochs, steps, shuffle, batch_norm, seed)
    folder, resumed = resumed_from(folder, resume, say)
    last_step = steps if steps is not None else epochs * options.order.steps_per_epoch
    graph = captured(model, data, loss, granularity=granularity, name=name)
    start = resumed_state(graph, resumed) if resumed is not None else RunState(dict(graph.state))
    if resumed is not None:
        check_same(resumed, options, last_step)
    is_new = folder is None or not Path(folder).exists()
    where = Path(folder) if folder is not None else new_folder("train", graph.name)
    record = RunRecord(where, steps_done=resumed.step if resumed is not None else None)
    try:
        record.event("started", model=graph.name, step=start.steps_done, steps=last_step)
        with open_session(cluster, logs=where / "workers", say=say, silence_seconds=silence_seconds) as session:
            job = _Job(options, graph, session, record, start, last_step, where, say, test, limit_seconds)
            asked = {"plan": "given" if isinstance(plan, Plan) else str(plan), "micro_batches": micro_batches}
            if plan == "tiles":
                asked["tiles"] = msgspec.to_builtins(tiles or TileWish())
            wish = Sharing(plan, micro_batches, tiles, reduce, tune)
            lasting = Lasting(replan, backup_every, workers)
            planned = job.planned(wish, asked if resumed is not None else None)
            record.decided(
                {**dict(config or {}), **options.facts, "steps": last_step, **asked}, planned.cluster, planned.profile,
                planned.plan,
            )  # fmt: skip
            if on_planned is not None:
                on_planned(planned)
            strategy = str(plan) if not isinstance(plan, Plan) and is_strategy(str(plan)) else "auto"
            result, planned = job.run(planned, on_step, strategy, lasting)
            if test is not None:
                result.test = job.evaluated(planned, test, loss)
                record.event("evaluated", accuracy=result.test.accuracy, loss=result.test.loss)
            job.write_pictures(planned, result)
            record.event("finished", steps=result.steps)
        return result
    except BaseException as error:
        with contextlib.suppress(ManyhandsError):  # a full disk, say, is not what went wrong first
            record.event("failed", kind=type(error).__name__, message=str(getattr(error, "message", error))[:500])
        if isinstance(error, ManyhandsError):
            _point_to_checkpoint(error, where, by_name="wish" in (config or {}))
        raise
    finally:
        record.close()
        if is_new and not (where / "checkpoints").exists():  # it never began: nothing is left behind
            shutil.rmtree(where, ignore_errors=True)


def _point_to_checkpoint(error: ManyhandsError, folder: Path, *, by_name: bool) -> None:
    """An error in the middle of a run says where to go on from."""
    newest = None
    with contextlib.suppress(BadFile):
        newest = checkpoint.latest(folder)
    if newest is not None:
        how = f"manyhands train --resume {folder}" if by_name else f"mh.train(..., resume='{folder}')"
        again = f"Checkpoint: {newest}\nGo on with: {how}"
        error.hint = f"{error.hint}\n{again}".strip()


def _cuts_statistics(plan: Plan, network: Network) -> bool:
    return plan.micro_batches > 1 and any(op.statistics for op in network.ops)


def _was_finite(tensor: torch.Tensor) -> bool:
    """A constant such as a mask may hold infinities from the beginning."""
    return bool(torch.isfinite(tensor).all())


@dataclass
class _Job:
    """One call of `train`, with its workers at hand."""

    options: Options
    graph: Graph
    session: Session
    record: RunRecord
    start: RunState
    last_step: int
    folder: Path
    say: Say | None
    test: Dataset[Any] | None
    limit_seconds: float

    def planned(self, wish: Sharing, asked_before: Mapping[str, Any] | None) -> Planned:
        """Measure, plan, predict. A run that goes on, asked for as before, keeps its plan: another would round
        otherwise."""
        network, wanted = self.graph.network, wish.plan
        alternatives: dict[str, float] = {}
        known = self._decided(asked_before) if asked_before is not None else None
        if known is not None:
            cluster, profile, _ = known
        else:
            cluster, profile = measure(
                self.session, self.graph, self.options.batch_size, optimizer=self.options.optimizer, say=self.say
            )
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
        if plan.batch_size != self.options.batch_size:
            raise BadPlan(f"The plan is for batches of {plan.batch_size}; batch_size is {self.options.batch_size}.")
        if not plan.is_training:
            raise BadPlan(f"The plan's order is '{plan.order}', which does not train.", hint="Use order: 1f1b.")
        if self.options.batch_norm == "local" and plan.batch_norm != "local":
            hint = "Write batch_norm: local in the plan."
            raise BadPlan(f"batch_norm is 'local'; the plan's is '{plan.batch_norm}'.", hint=hint)
        runs_here(plan, network)
        if self.test is not None:  # what would go wrong after training is found before it
            runs_here(resolve(inference_plan(plan), network), network)
            if not length(self.test):
                raise BadData("The held-out data set is empty.", hint="Leave test out.")
        if _cuts_statistics(plan, network):
            note = (
                f"Batch norm takes its statistics over each of {plan.micro_batches} micro-batches, not the whole batch."
            )
            self.record.event("note", text=note)
            if self.say is not None:
                self.say(note)
        schedule = Schedule(plan, network)
        if schedule.is_fixed:
            check(schedule, cluster)
        prediction = simulate(plan, network, cluster, profile)
        steps = self.last_step - self.start.steps_done
        return Planned(plan, network, cluster, profile, prediction, steps, self.folder, alternatives)

    def _decided(self, asked: Mapping[str, Any]) -> tuple[Cluster, Profile, Plan] | None:
        """What this run was decided with, if it was asked for in the same way and for the same devices."""
        try:
            config = read_config(self.folder)
            cluster, profile, plan = read_decided(self.folder, self.graph.network)
        except ManyhandsError:
            return None
        is_same = all(config.get(key) == value for key, value in asked.items())
        names = self.session.cluster.names
        return (cluster, profile, plan) if is_same and cluster.names == names == tuple(profile.devices) else None

    def _runnable(self, best: Plan, others: list[Plan]) -> Plan:
        """The fastest plan that the executor can run; channels are simulated only, so far.

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
        return next((plan for plan in runnable if not _cuts_statistics(plan, self.graph.network)), runnable[0])

    def _tried(self, plans: list[Plan], most: int, profile: Profile) -> Plan:
        """The fastest of the first plans in a trial of a few steps; only of those that take statistics alike."""
        alike = []
        for plan in plans:
            with contextlib.suppress(BadPlan):
                runs_here(plan, self.graph.network)
                if _cuts_statistics(plan, self.graph.network) == _cuts_statistics(plans[0], self.graph.network):
                    alike.append(plan)
        if self.say is not None:
            self.say(f"trying {min(most, len(alike))} plan(s)")
        with Prefetcher(self.options.data, self.options.order, 0, 1) as batches:
            _, inputs, targets = next(iter(batches))
        kernels = {name: one.kernels for name, one in profile.devices.items()}
        trials = fastest_in_trial(
            self.session.coordinator, self.graph, alike[:most], self.options.optimizer, kernels, (inputs, targets)
        )
        for plan, seconds in trials:
            self.record.event("tried", seconds=seconds, plan=plan.to_dict())
        return trials[0][0] if trials else plans[0]

    def run(
        self, planned: Planned, on_step: OnStep | None, strategy: str, lasting: Lasting
    ) -> tuple[TrainResult, Planned]:
        """Train to the end. The plan may be another one then: what is given back is the last."""
        options, steps_per_epoch = self.options, self.options.order.steps_per_epoch
        every = options.checkpoint_steps(planned.prediction.seconds)
        first, last = self.start.steps_done, self.last_step
        traced = range(min(first + WARM_UP_STEPS, last - 1), min(first + WARM_UP_STEPS + TRACED_STEPS, last))
        replanner = Replanner(
            self.session, self.graph, planned.cluster, planned.profile, strategy, options.optimizer,
            planned.prediction.seconds, lasting.backup_every,
        )  # fmt: skip
        order = Order(
            graph=self.graph, plan=planned.plan, start=self.start, last_step=last, optimizer=options.optimizer,
            seed=options.seed, kernels=replanner.kernels(planned.plan), snapshots=snapshot_steps(first, last, every),
            trace_steps=traced, memory_step=min(first + 1, last - 1), wait_limit_seconds=self.limit_seconds,
            backup_every=chosen_backups(
                planned.plan, planned.network, planned.cluster, planned.prediction.seconds, lasting.backup_every
            ),
        )  # fmt: skip

        def stepped(step: int, loss: float | None, seconds: float) -> None:
            self.record.step(step, step // steps_per_epoch, loss, seconds, options.batch_size)
            if on_step is not None:
                on_step(step, loss if loss is not None else float("nan"), seconds)

        if first == 0:
            self._keep(self.start)
        least, most = lasting.workers
        endurance = Endurance(
            lasting.replan, least, most, wait_seconds=REJOIN_SECONDS if self.session.others_may_join else 0.0
        )
        with Rewindable(lambda step: Prefetcher(options.data, options.order, step, last), first) as batches:
            journey = Journey(
                self.session.coordinator, order, batches, replanner, endurance, on_step=stepped,
                on_snapshot=self._keep, tell=self._tell,
            )  # fmt: skip
            outcome = journey.run()
        assert outcome.state is not None
        assert outcome.plan is not None
        self.trained = outcome.state
        Weights(self.trained.weights).load_into(options.model, self.graph)
        if outcome.plan != planned.plan:
            cluster, profile = replanner.present(outcome.plan, outcome.plan.devices)
            prediction = simulate(outcome.plan, planned.network, cluster, profile)
            planned = replace(planned, plan=outcome.plan, cluster=cluster, profile=profile, prediction=prediction)
        return self._result(planned, outcome), planned

    def _tell(self, event: str, /, **facts: Any) -> None:
        """What happened to the workers: into the folder, and to whoever looks on."""
        self.record.event(event, **facts)
        if event == "replanned":
            write_document(self.folder / "plan.yaml", facts["plan"])
        text = happened(event, facts)
        if text and self.say is not None:
            self.say(text)

    def _keep(self, found: RunState) -> None:
        options = self.options
        self._check_finite(found)
        self.checkpoint = self.record.checkpoint(
            options.model, self.graph, found, options.optimizer, options.seed, options.facts
        )

    def _check_finite(self, found: RunState) -> None:
        """What no step can go on from is no checkpoint."""
        if not found.steps_done:
            return
        network = self.graph.network
        for layer in network.layers:
            for name in network.weights_of(layer.first, layer.last):
                tensor = found.weights[name]
                if (
                    tensor.is_floating_point()
                    and not bool(torch.isfinite(tensor).all())
                    and _was_finite(self.graph.state[name])
                ):
                    raise NotFinite(
                        f"The weight {name} of layer {layer.name} is not finite after step {found.steps_done - 1}.",
                        hint="Lower the learning rate. The last checkpoint is from before it.",
                    )

    def _result(self, planned: Planned, outcome: Travelled) -> TrainResult:
        steady = outcome.step_seconds[WARM_UP_STEPS:] or outcome.step_seconds
        seconds = statistics.median(steady)
        schedule = Schedule(planned.plan, planned.network)
        travels = plan_bytes({d: tuple(schedule.every_action(d)) for d in schedule.lowering.work}, planned.network)
        traffic = planned_traffic(schedule, self.graph)
        for text in traffic.differences(outcome.logs):
            self.record.event("note", text=text)
        self.record.devices(outcome.logs, travels, traffic.to_dict())
        return TrainResult(
            losses=self.record.losses(), plan=planned.plan, folder=self.folder,
            throughput=self.options.batch_size * len(steady) / sum(steady),
            predicted_seconds=planned.prediction.seconds, measured_seconds=seconds, logs=outcome.logs,
            planned_bytes=travels, traffic=traffic, checkpoint=self.checkpoint, steps=len(outcome.step_seconds),
            scale=self.session.scale, stands_in=self.session.stands_in, recoveries=outcome.recoveries,
        )  # fmt: skip

    def evaluated(self, planned: Planned, test: Dataset[Any], loss: Callable[..., torch.Tensor]) -> EvaluateResult:
        """On held-out data, by the devices that trained; if one of those is lost now, by one of the others alone."""
        trained = self.trained.weights
        try:
            return evaluate_in(self.session, self.graph, planned.plan, trained, test, loss, planned.profile)
        except WorkerLost as error:
            names = [name for name in planned.plan.devices if not self.session.coordinator.members[name].is_lost]
            if not names:
                raise
            self._tell("lost", reason=f"{error.message} {names[0]} evaluates alone.")
            stage = Stage((0, len(self.graph.network.layers)), (names[0],))
            alone = msgspec.structs.replace(planned.plan, stages=(stage,), warm_up="2(P-p)-1", homes={})
            return evaluate_in(self.session, self.graph, alone, trained, test, loss, planned.profile)

    def write_pictures(self, planned: Planned, result: TrainResult) -> None:
        from manyhands.api.pictures import write_pictures  # drawing is loaded last: a run need not wait for it

        write_pictures(self.folder, self.folder / PLOTS, planned, result, self.options.order.steps_per_epoch)

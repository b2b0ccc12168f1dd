"""One training job with its workers: runs it to the end, keeps its folder, and reports its result."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import Dataset

from manyhands.data.loader import length
from manyhands.data.preload import HINT, Preload
from manyhands.executor.messages import feed_parts, plan_bytes, runs_here
from manyhands.executor.optimizers import renamed
from manyhands.executor.resident_dataset import resident_bytes
from manyhands.explaining.planned_run import PlannedRun
from manyhands.explaining.prediction_accuracy import PredictionAccuracy, compared, correct_profiles, sentence
from manyhands.explaining.tile_report import planned_traffic, traffic_of_all
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadData, OutOfMemory, WorkerLost
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel, Profile
from manyhands.facts.units import format_bytes
from manyhands.files.documents import write_document
from manyhands.graph.batching import refuse_pairs
from manyhands.graph.graph import Graph
from manyhands.graph.lengths import LengthGraphs
from manyhands.graph.weights import Weights
from manyhands.job.aftermath import Aftermath
from manyhands.job.callback_list import ValidationListener
from manyhands.job.callbacks import OnStep, Say
from manyhands.job.config_sections import WorkloadConfig
from manyhands.job.data_wait_report import DataWaitReport
from manyhands.job.evaluation import EvaluateResult, evaluate_in, inference_plan
from manyhands.job.evaluation import captured as captured
from manyhands.job.finite_state import check_finite
from manyhands.job.first_checkpoint import FirstCheckpoint
from manyhands.job.lengths import lengths_of
from manyhands.job.opening import OpenedRun
from manyhands.job.ordering import WARM_UP_STEPS, cuts_statistics, order_of
from manyhands.job.replanning import Replanner, chosen_backups, happened, unplanned
from manyhands.job.result import TrainResult
from manyhands.job.stopping import stopping
from manyhands.job.validation import check_plan
from manyhands.job.watch import JobWatch
from manyhands.job.workload import Workload
from manyhands.plans.simulating import simulate
from manyhands.runtime.controller import Controller, Replan
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.order import RunState
from manyhands.runtime.outcome import JobHooks, JobOutcome
from manyhands.runtime.record import ADAPTER, PLOTS, RunRecord, averaged_state
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.schedule.checker import check
from manyhands.schedule.policy import Schedule
from manyhands.session.session import Session
from manyhands.weights.adapters import peft_model_of, save_adapter


class Guide(Replan, Protocol):
    """Plans for the present devices, and knows their cluster, profile and kernels."""

    def kernels(self, plan: Plan) -> Mapping[str, Mapping[str, Kernel]]: ...

    def present(self, plan: Plan, names: tuple[str, ...]) -> tuple[Cluster, Profile]: ...


@dataclass
class Job:
    """One call of `train` or a similar function: the workload, the connected workers, and the run folder."""

    workload: Workload
    session: Session
    opened: OpenedRun

    @functools.cached_property
    def watch(self) -> JobWatch:
        """The job's validations and callbacks."""
        return JobWatch(self.workload, self.opened, self.session.coordinator, self.listeners())

    def listeners(self) -> tuple[ValidationListener, ...]:
        """Return the parts of the job that go by the results of validations; they are told before any callback."""
        return ()

    @property
    def graph(self) -> Graph:
        return self.opened.graph

    @property
    def record(self) -> RunRecord:
        return self.opened.record

    @property
    def start(self) -> RunState:
        return self.opened.start

    @property
    def last_step(self) -> int:
        return self.opened.last_step

    @property
    def folder(self) -> Path:
        return self.opened.folder

    @property
    def config(self) -> WorkloadConfig:
        return self.workload.config

    @property
    def say(self) -> Say | None:
        return self.config.say

    @property
    def test(self) -> Dataset[Any] | None:
        """Held-out data."""
        return self.config.test

    def checked(self, plan: Plan, cluster: Cluster, profile: Profile) -> PlannedRun:
        """Return a resolved plan with its prediction, after checking that all of it can be run."""
        network = self.graph.network
        runs_here(plan, network)
        if self.test is not None:  # find errors of the evaluation before training, not after
            runs_here(resolve(inference_plan(plan), network), network)
            refuse_pairs(self.graph)
            if not length(self.test):
                raise BadData("The held-out data set is empty.", hint="Leave test out.")
        if (held_out := self.workload.held_out) is not None:
            check_plan(plan, network, held_out.interval(self.workload.order.steps_per_epoch), self.start.steps_done)
        self.workload.check_smaller_batch(plan, network)
        if cuts_statistics(plan, network):
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
        return PlannedRun(plan, network, cluster, profile, prediction, steps, self.folder)

    def run(
        self, planned: PlannedRun, on_step: OnStep | None, strategy: str, retry_policy: RetryPolicy
    ) -> tuple[TrainResult, PlannedRun]:
        """Train to the end, and return the result with the last plan, which may differ from `planned`."""
        workload = self.workload
        self.data_waits = DataWaitReport(self.record, self.say, WARM_UP_STEPS)
        first, last = self.start.steps_done, self.last_step
        replanner = self.replanner(planned, strategy)
        order = order_of(self, planned, replanner, self.start, last)
        order.lengths = self._lengths_reported()
        if workload.feed == "start":
            order.preload = self._preload(planned)
        self._show(planned)

        def stepped(step: int, loss: float | None, seconds: float) -> None:
            now = elastic_job.outcome
            self.data_waits.add(seconds, now.data_waits.get(step, 0.0))
            samples = now.smaller.get(step, workload.batch_size)
            self.record.step(step, workload.epoch_of(step), loss, seconds, samples, *now.of_last_step)
            stop.is_patient = True
            if on_step is not None:
                with stop.asked_by():
                    on_step(step, loss if loss is not None else float("nan"), seconds)

        watch = self.watch
        write = partial(self._keep, self.start, watch.facts_after(first)) if first == 0 else None
        first_kept = FirstCheckpoint(write, is_awaited=bool(watch.callbacks.callbacks))
        watch.callbacks.start()
        with (
            first_kept,
            stopping() as stop,
            workload.batches(
                first, last, self.folder, self.session.coordinator.wake, is_preloaded=order.preload is not None
            ) as batches,
        ):
            hooks = JobHooks(stepped, self._keep, self.tell, lambda: stop.is_wanted(self.say), on_ready=first_kept.wait)
            elastic_job = ElasticJob(
                self.session.coordinator, order, batches, replanner, retry_policy,
                hooks=watch.hooks(hooks), controller=self.controller(), living=self.record.living,
            )  # fmt: skip
            try:
                outcome = elastic_job.run()
            finally:
                stop.is_patient = False
        assert outcome.state is not None
        assert outcome.plan is not None
        self.trained = outcome.state
        Weights(self.trained.weights).load_into(workload.model, self.graph)
        if workload.scheduling is not None:
            workload.scheduling.rewind(self.trained.steps_done)
        if stop.is_asked:
            raise KeyboardInterrupt
        watch.check()
        if outcome.plan != planned.plan:
            cluster, profile = replanner.present(outcome.plan, outcome.plan.devices)
            prediction = simulate(outcome.plan, planned.network, cluster, profile)
            planned = replace(planned, plan=outcome.plan, cluster=cluster, profile=profile, prediction=prediction)
        return self._result(planned, outcome), planned

    def begin_with(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Begin with what an optimizer has kept, by weight/key, in steps before this run."""
        self.start.optimizer.update(renamed(tensors, self.graph.aliases))
        self.start.scalars.update(renamed(scalars, self.graph.aliases))

    def _lengths_reported(self) -> LengthGraphs | None:
        """Return the graph of each step, after saying how batches are padded; None: all have one shape."""
        steps = (self.start.steps_done, self.last_step)
        self.lengths = lengths = lengths_of(self.workload.order, self.opened.graphs, *steps)
        if text := lengths.text:
            self.record.event("lengths", text=text, used=[use.to_dict() for use in lengths.uses])
            if self.say is not None:
                self.say(text)
        return lengths.graphs

    def _preload(self, planned: PlannedRun) -> Preload:
        """Return all samples for the devices to hold; refuse if one has no room for them beside what the plan needs."""
        self._doing("reading all samples, to lay them out at the devices")
        preload = Preload.of(self.workload.samples)
        lowering = Schedule(planned.plan, planned.network).lowering
        sizes = {}
        for name in planned.plan.devices:
            sizes[name] = resident_bytes(feed_parts(self.graph, lowering, name, targets=True), preload.count)
            needed, memory = planned.prediction.devices[name].peak_bytes, planned.cluster.device(name).memory_bytes
            if needed + sizes[name] > memory:
                raise OutOfMemory(
                    f"{name} would hold {format_bytes(sizes[name])} of samples beside the {format_bytes(needed)} that "
                    f"the plan needs; it has {format_bytes(memory)}.",
                    hint=HINT,
                )
        self.record.event("laid", samples=preload.count, bytes=sizes)
        if self.say is not None:
            listed = ", ".join(f"{format_bytes(size)} at {name}" for name, size in sizes.items() if size)
            self.say(f"{preload.count:,} samples are laid out before the first step: {listed}")
        return preload

    # Overridden by other kinds of jobs

    @property
    def wanted_backups(self) -> int | None:
        """Rounds between two backups of the state, as configured; None: so many that their cost is negligible."""
        return None

    def checkpoint_every(self, planned: PlannedRun) -> int:
        """Return the number of steps between two checkpoints."""
        return self.workload.checkpoint_steps(planned.step_seconds, planned.network.trained_bytes)

    def backup_every(self, planned: PlannedRun) -> int:
        """Return the number of rounds between two backups of the state."""
        return chosen_backups(
            planned.plan, planned.network, planned.cluster, planned.prediction.seconds, self.wanted_backups
        )

    def replanner(self, planned: PlannedRun, strategy: str) -> Guide:
        """Return the object that makes a plan when workers change."""
        return Replanner(
            self.session, self.graph, planned.cluster, planned.profile, strategy, self.workload.optimizer,
            planned.prediction.seconds, self.wanted_backups,
        )  # fmt: skip

    def controller(self) -> Controller | None:
        """Return the controller that changes the plan while the workers stay the same; None: the plan is fixed."""
        return None

    def tell(self, event: str, /, **facts: Any) -> None:
        """Record what happened to the workers in the folder, and show it to those who watch the run."""
        self.record.event(event, **facts)
        living = self.record.living
        if event == "replanned":
            write_document(self.folder / "plan.yaml", facts["plan"])
            if living is not None:
                living.replanned(Plan.from_dict(facts["plan"]))
        text = happened(event, facts)
        if living is not None and text:
            living.waits(text) if event == "waiting" else living.noted(text)
        if text and self.say is not None:
            self.say(text)

    def __post_init__(self) -> None:
        if self.record.living is not None:
            self.record.living.coordinated_by(self.session.coordinator)
        self._doing("measuring and planning")

    def _doing(self, text: str) -> None:
        if self.record.living is not None:
            self.record.living.noted(text)

    def _show(self, planned: PlannedRun) -> None:
        """Show other processes what will run, and on which devices."""
        living = self.record.living
        if living is not None:
            living.planned(planned.plan, planned.network, planned.cluster, planned.profile, planned.prediction)

    def _keep(self, state: RunState, facts: dict[str, Any] | None = None) -> None:
        check_finite(self.graph, state)
        workload, kept = self.workload, self.watch.facts_after(state.steps_done) if facts is None else facts
        self.checkpoint = self.record.checkpoint(
            workload.model, self.graph, state, workload.optimizer, workload.seed, kept
        )
        if workload.scheduling is not None:
            workload.scheduling.forget_before(state.steps_done)
        self.watch.saved(self.checkpoint, state.steps_done)

    def _result(self, planned: PlannedRun, outcome: JobOutcome) -> TrainResult:
        first, lengths = self.start.steps_done, self.lengths.graphs
        predicted = outcome.of_full_batches(first) if lengths is None else lengths.of_longest(outcome.step_seconds)
        seconds = statistics.median(predicted[WARM_UP_STEPS:] or predicted or outcome.step_seconds or [0.0])
        schedule = Schedule(planned.plan, planned.network)
        travels = plan_bytes({d: tuple(schedule.every_action(d)) for d in schedule.lowering.work}, planned.network)
        traffic = planned_traffic(schedule, self.graph, is_preloaded=self.workload.feed == "start")
        result = TrainResult(
            losses=self.record.losses(), grad_norms=self.record.grad_norms(), plan=planned.plan, folder=self.folder,
            throughput=outcome.throughput(self.workload.batch_size, first, WARM_UP_STEPS),
            predicted_seconds=planned.step_seconds, measured_seconds=seconds, logs=outcome.logs,
            planned_bytes=travels, traffic=traffic, checkpoint=self.checkpoint, steps=len(outcome.step_seconds),
            scale=self.session.scale, stands_in=self.session.stands_in, recoveries=unplanned(outcome.recoveries),
            staleness=outcome.staleness, skipped_steps=outcome.skipped_steps, bytes_between=dict(outcome.bytes_between),
            prediction_accuracy=compared(planned, schedule, outcome.logs, predicted),
            lengths=self.lengths.uses, ema=averaged_state(self.workload.model, self.graph, self.trained),
            data_wait_share=self.data_waits.share,
            validation=self.watch.results(), best_checkpoint=self.watch.best_checkpoint,
            stopped_because=self.watch.callbacks.stopped_because,
        )  # fmt: skip
        with Aftermath(result.problems, self.record, self.say).surviving("What each device did could not be written"):
            sent = traffic if lengths is None else traffic_of_all(lengths, planned.plan, outcome.logs)
            for text in sent.differences(outcome.logs, planned.plan, is_of_all_rounds=lengths is not None):
                self.record.event("note", text=text)
            self.record.devices(outcome.logs, travels, traffic.to_dict())
        return result

    def finish(self, planned: PlannedRun, result: TrainResult) -> None:
        """Evaluate held-out data and write pictures, after the last step. The weights are stored by now: a failure is
        only reported."""
        after = Aftermath(result.problems, self.record, self.say)
        self.data_waits.end()
        if peft_model_of(self.workload.model) is not None:
            with after.surviving("The adapter could not be written"):
                result.adapter = save_adapter(self.workload.model, self.folder / ADAPTER)
                if self.say is not None:
                    self.say(f"adapter, as PEFT writes it: {result.adapter}")
        if self.test is not None:
            self._doing("evaluating on held-out data")
            with after.surviving("The held-out data could not be evaluated"):
                result.test = self.evaluated(planned, self.test)
        if result.test is not None:
            with after.surviving("The accuracy could not be written to the run's folder"):
                self.record.event("evaluated", accuracy=result.test.accuracy, loss=result.test.loss)
        if result.prediction_accuracy is not None:
            with after.surviving("Predicted beside measured could not be written"):
                self._report_accuracy(planned, result, result.prediction_accuracy)
        self._doing("drawing pictures")
        with after.surviving("The pictures could not be written"):
            self.write_pictures(planned, result)
        with after.surviving("The end of the run could not be written to its folder"):
            self.record.event("finished", steps=result.steps)

    def _report_accuracy(self, planned: PlannedRun, result: TrainResult, accuracy: PredictionAccuracy) -> None:
        """Write the prediction's accuracy to the folder, correct stored profiles, and report where it was wrong."""
        steps = 0
        if not result.recoveries:
            steps = correct_profiles(self.session, self.graph, planned, self.workload.optimizer, accuracy)
        write_document(self.folder / "stages.json", {**accuracy.to_dict(), "corrected_from_steps": steps})
        learnt = f"The stored profile was corrected from {steps} steps." if steps else ""
        if text := sentence(accuracy, self.folder, learnt):
            self.record.event("note", text=text)
            if self.say is not None:
                self.say(text)

    def evaluated(self, planned: PlannedRun, test: Dataset[Any], *, keep_outputs: bool = False) -> EvaluateResult:
        """Evaluate held-out data on the devices that trained; if one of them is lost now, on one other alone."""
        trained, loss = self.trained.weights, self.workload.loss
        evaluate = partial(
            evaluate_in, self.session, self.graph, precision=self.workload.precision, keep_outputs=keep_outputs
        )
        try:
            return evaluate(planned.plan, trained, test, loss, planned.profile)
        except WorkerLost as error:
            names = [name for name in planned.plan.devices if not self.session.coordinator.members[name].is_lost]
            if not names:
                raise
            self.tell("lost", reason=f"{error.message} {names[0]} evaluates alone.")
            stage = Stage((0, len(self.graph.network.layers)), (names[0],))
            alone = msgspec.structs.replace(planned.plan, stages=(stage,), warm_up="2(P-p)-1", homes={})
            return evaluate(alone, trained, test, loss, planned.profile)

    def write_pictures(self, planned: PlannedRun, result: TrainResult) -> None:
        from manyhands.job.pictures import write_pictures  # imported late: a run need not wait for it

        note = write_pictures(self.folder, self.folder / PLOTS, planned, result, self.workload.order.steps_per_epoch)
        if note and self.say is not None:
            self.say(note)

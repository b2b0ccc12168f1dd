"""Validations, callbacks and checkpoints on request: how a job's owner watches and steers it while it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from manyhands.executor.checkpoint_files import keep_as
from manyhands.facts.errors import BadValue
from manyhands.job.callback_list import STATE, CallbackList, RunFacts, ValidationListener
from manyhands.job.metrics import text_of
from manyhands.job.opening import OpenedRun
from manyhands.job.validation import JobValidation, Validated
from manyhands.job.workload import Workload
from manyhands.observe.validation_log import COLUMNS, Row
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.outcome import JobHooks
from manyhands.runtime.validating import CheckpointRequests

BEST = "best"
"""The folder of a run that keeps the checkpoint with the best validation."""


class JobWatch:
    """The validations and callbacks of one job."""

    def __init__(
        self, workload: Workload, opened: OpenedRun, coordinator: Coordinator,
        listeners: tuple[ValidationListener, ...] = (),
    ) -> None:  # fmt: skip
        self.workload, self.opened, self.record, self.coordinator = workload, opened, opened.record, coordinator
        self.requests = CheckpointRequests()
        facts = RunFacts(
            opened.folder, opened.start.steps_done, opened.last_step, workload.order.steps_per_epoch,
            opened.metric_names, workload.learning_rate,
        )  # fmt: skip
        self.callbacks = CallbackList(workload.callbacks, listeners, facts, self.requests)
        self.callbacks.load(opened.facts.get(STATE), workload.config.say)

    def hooks(self, hooks: JobHooks) -> JobHooks:
        """Return a job's hooks with those of its validations and callbacks."""

        def should_stop() -> bool:
            return self.callbacks.is_stopping or hooks.should_stop()

        def stepped(step: int, loss: float | None, seconds: float) -> None:
            hooks.on_step(step, loss, seconds)
            self.callbacks.stepped(step, loss, seconds)

        def logged(event: str, /, **facts: Any) -> None:
            hooks.log_event(event, **facts)
            if event == "recovered":
                self.callbacks.recovered(facts)

        held_out, workload = self.workload.held_out, self.workload
        changed = dataclasses.replace(
            hooks, on_step=stepped, log_event=logged, should_stop=should_stop, requests=self.requests
        )
        if held_out is None:
            return changed
        validation = JobValidation(
            self.coordinator, held_out, self.opened.graph, workload.loss, steps=self.opened.last_step,
            steps_per_epoch=workload.order.steps_per_epoch, validated=self.callbacks.validated,
            report=self._validated, should_stop=should_stop, precision=workload.precision,
        )  # fmt: skip
        return dataclasses.replace(changed, validation=validation)

    def _validated(self, results: Validated, failure: BadValue | None) -> None:
        """Report the results of a validation everywhere: in the folder, to who watches, to listeners and callbacks."""
        if failure is not None:
            after = f", at the validation after step {results.steps_done - 1}"
            failure.message = f"{failure.message}{after}"
            self.callbacks.failure = self.callbacks.failure or failure
            return
        self.record.validated(
            {
                "step": results.steps_done, "epoch": results.epoch, "samples": results.samples,
                "seconds": results.seconds, **results.metrics,
            }
        )  # fmt: skip
        text = f"validation after {results.steps_done} steps: {text_of(results.metrics)} ({results.seconds:.2f} s)"
        if self.record.living is not None:
            self.record.living.noted(text)
        if self.workload.config.say is not None:
            self.workload.config.say(text)
        self.callbacks.validated_at(results.steps_done, results.metrics)

    def facts_after(self, steps_done: int) -> dict[str, Any]:
        """Return what a checkpoint after so many steps keeps beside the state: of callbacks, and of the workload."""
        return self.callbacks.document_after(steps_done) | self.workload.facts_at(steps_done)  # in this order

    def saved(self, checkpoint: Path, steps_done: int) -> None:
        """Keep a checkpoint that was written under the names that were asked for, too."""
        for name in self.requests.served_by(steps_done):
            keep_as(checkpoint, self.opened.folder / name)

    def check(self) -> None:
        """Raise the error of a callback or metric that has ended the job."""
        if self.callbacks.failure is not None:
            raise self.callbacks.failure

    @property
    def best_checkpoint(self) -> Path | None:
        path = self.opened.folder / BEST
        return path if path.is_dir() else None

    def results(self) -> list[Validated]:
        """Return every validation of the run, those before it was resumed too."""
        return [_result(row) for row in self.record.validations.rows]


def _result(row: Row) -> Validated:
    step, epoch, samples, seconds = (row.get(name, 0) for name in COLUMNS)
    metrics = {name: value for name, value in row.items() if name not in COLUMNS}
    return Validated(int(step), int(epoch), int(samples), seconds, metrics)

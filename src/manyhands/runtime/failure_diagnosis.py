"""Finds out why a run ended: the error of the device that caused it, instead of those of devices that only miss it.

A worker whose peer is lost fails too, and may be the first to report. Such an error is a symptom; before it is raised,
the root cause is looked for. Where numbers stopped being finite, the layer in which that began is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from manyhands.facts.errors import DataNotFinite, ManyhandsError, NotFinite, WorkerLost, error_named
from manyhands.facts.plan_check import layer_range
from manyhands.graph.tape import bind_inputs
from manyhands.runtime.control_messages import Diagnosis, Failed, Progress, Stop
from manyhands.runtime.member import Lost
from manyhands.runtime.root_cause import find_root_cause, is_symptom, lost

if TYPE_CHECKING:
    from manyhands.runtime.run import Run

_DIAGNOSIS_SECONDS = 5.0


class FailureDiagnosis:
    """Finds the error that explains why one run ended."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._cause: BaseException | None = None
        """The error that explains the end of the run, once it is known; other errors are examined."""

    def explained(self, error: BaseException) -> BaseException:
        """Return the root cause of an error that is only a symptom; any other error itself."""
        if error is self._cause or not is_symptom(error):
            return error
        return self._root_cause() or error

    def lost(self, name: str, reason: str) -> ManyhandsError:
        """Return the error of a run that has lost a device."""
        run = self._run
        step = run.steps.done.get(name, run.first - 1) + 1
        if not run.times.has_begun:
            when = "while it got ready"
        elif step < run.order.last_step:
            when = f"at step {step}"
        else:
            when = f"after its last step, {step - 1}, before everything was gathered"
        self._cause = error = lost(run.coordinator, name, when, reason)
        return error

    def parted(self, pairs: Sequence[tuple[str, str]]) -> ManyhandsError:
        """Return the error of a run whose devices are all there, some of which are to be connected in another way."""
        text = "; ".join(f"{first} and {second}" for first, second in pairs)
        self._cause = error = WorkerLost(f"{text} do not reach each other: they are connected in another way.")
        return error

    def failed(self, name: str, message: Failed) -> ManyhandsError:
        """Return the error for a failure that a worker reports.

        A worker that misses a peer reports a symptom: the loss of that peer is the cause, if it becomes known.
        """
        if is_symptom(message) and (cause := self._root_cause()) is not None:
            return cause
        error = error_named(message.kind, message.message, message.hint)
        if not isinstance(error, NotFinite):
            error = error_named(message.kind, f"Worker {name}: {message.message}", message.hint)
            self._cause = error
            return error
        self._receive_rounds_before(message.step)
        if (divergence := self._run.reports.agreement.divergence) is not None:
            error = type(error)(f"{_head(error)}; it began {divergence}.", hint=error.hint)
        elif len(self._run.order.plan.stages) > 1:
            error = self._in_data(error, message.step) or self._traced_back(error, message.step)
        self._cause = error
        return error

    def _root_cause(self) -> ManyhandsError | None:
        run = self._run
        cause = find_root_cause(run.coordinator, run.members, run.generation)
        if cause is None:
            return run.evict_suspect()
        name, report = cause
        return self.lost(name, report) if isinstance(report, str) else self.failed(name, report)

    def _receive_rounds_before(self, step: int) -> None:
        """Receive the reports of the rounds before a failure, since they may explain it.

        A gradient that is not finite makes the weights of all devices so, and the next loss on any of them. Raises the
        error of an eviction.
        """
        run, end = self._run, time.monotonic() + _DIAGNOSIS_SECONDS
        while min(run.steps.done.values()) < step - 1 and (seconds_left := end - time.monotonic()) > 0:
            event = run.coordinator.next_event(seconds_left)
            if event is None or isinstance(event[1], Lost):
                return
            name, message = event
            if isinstance(message, Progress) and message.generation == run.generation and name in run.names:
                run.reports.progressed(name, message)

    def _in_data(self, error: NotFinite, step: int) -> NotFinite | None:
        """Return the error for an input that is not finite; None where all are. Later stages do not see the data."""
        inputs = self._run.feed.inputs
        for name, tensor in bind_inputs(self._run.order.graph_at(step), inputs[step]).items() if step in inputs else ():
            if not bool(torch.isfinite(tensor).all()):
                where = f"the input '{name}': the data holds a number that is not finite"
                return DataNotFinite(f"{_head(error)}; it began in {where}.", hint="Fix the data of that step.")
        return None

    def _traced_back(self, error: NotFinite, step: int) -> NotFinite:
        """Return the error with the first layer whose numbers went wrong, which every stage is asked for.

        In a pipeline the loss is computed only in the last stage.
        """
        run = self._run
        for name in run.names:
            run.coordinator.send(name, Stop(run.generation, diagnose_step=step))
        began_in: dict[str, str] = {}
        end = time.monotonic() + _DIAGNOSIS_SECONDS
        while len(began_in) < len(run.names) and (seconds_left := end - time.monotonic()) > 0:
            event = run.coordinator.next_event(seconds_left)
            if event is None or isinstance(event[1], Lost):
                break
            if isinstance(event[1], Diagnosis):
                began_in[event[0]] = event[1].layer
        layers = [layer.name for layer in run.order.graph.network.layers]
        named = sorted((layer for layer in began_in.values() if layer in layers), key=layers.index)
        if not named:
            return error
        first = layers.index(named[0])
        stages = [stage for stage in run.order.plan.stages if first in range(*layer_range(stage))]
        devices = " or ".join(name for stage in stages for name in stage.devices)
        return NotFinite(f"{_head(error)}; it began in layer {named[0]}, on {devices}.", hint=error.hint)


def _head(error: NotFinite) -> str:
    return error.message.split("; it began in")[0]

"""The callbacks of one job: when each is called, the state of each at every step, and what they ask for."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, unknown
from manyhands.job.callback import Callback, CallbackContext
from manyhands.runtime.validating import CheckpointRequests

if TYPE_CHECKING:
    from torch import nn

STATE = "callbacks"
"""The fact of a checkpoint that holds the state of callbacks and listeners, and the step of the last validation."""


RUN_FOLDERS = ("checkpoints", "workers", "tensorboard", "plots", "adapter", "wandb")
"""Folders of a run that a callback's checkpoint may not replace."""


class ValidationListener(Protocol):
    """A part of manyhands that goes by the results of validations, such as a learning rate that falls on a plateau.

    It is told before any callback, when every step up to the validation is done everywhere and none after it has been
    fed. Each validation is reported once: a step that is run again after a loss has the rate that it had before.
    """

    @property
    def name(self) -> str:
        """The key of its state in checkpoints."""

    def on_validation(self, metrics: Mapping[str, float]) -> None:
        """Take the results of a validation, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state as plain data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that a checkpoint holds."""


class Stateful(Protocol):
    """An object whose state checkpoints hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunFacts:
    """The facts that are the same for a whole run."""

    folder: Path
    first_step: int
    steps: int
    steps_per_epoch: int
    metric_names: tuple[str, ...] = ()
    learning_rate: Callable[[int], float | None] = lambda step: None
    """The learning rate of a step that is done."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is no callback."""
    if not isinstance(callbacks, (list, tuple)):
        raise BadValue(
            f"callbacks is a {type(callbacks).__name__}; it must be a list of mh.Callback.",
            hint="Write callbacks=[mh.EarlyStopping()].",
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_class = isinstance(callback, type)
            kind = f"the class {callback.__name__}" if is_class else f"a {type(callback).__name__}"
            raise BadValue(
                f"callbacks has {kind}; each must be an object of a subclass of mh.Callback.",
                hint=f"Write {callback.__name__}()." if is_class else "A function of each step is on_step=.",
            )


def check_monitors(callbacks: Sequence[Callback], names: Sequence[str]) -> None:
    """Refuse callbacks that need a metric which no validation of this job gives."""
    for callback in callbacks:
        wanted = callback.monitor
        if wanted and not names:
            raise BadValue(
                f"{callback.name} goes by the metric '{wanted}' of a validation; this job has none.",
                hint="Give held-out data: validate=data_set.",
            )
        # an object may compute several numbers, which are known once it has
        if wanted and wanted not in names and wanted.partition("/")[0] not in names:
            raise unknown("metric", wanted, names)


class CallbackList:
    """Calls a job's callbacks, and keeps their state of each step until a checkpoint of it is written."""

    def __init__(
        self, callbacks: Sequence[Callback], listeners: Sequence[ValidationListener], facts: RunFacts,
        requests: CheckpointRequests,
    ) -> None:  # fmt: skip
        self.callbacks, self.listeners, self.facts, self.requests = callbacks, listeners, facts, requests
        self.stopped_because: str | None = None
        """Why a callback has asked to stop; None: none has."""
        self.failure: ManyhandsError | None = None
        """The error of a callback or metric that raised: the job stops, with a checkpoint, and raises it."""
        self.validated = 0
        """The steps done at the last validation that was reported."""
        self._states: list[tuple[int, str]] = []
        """(steps done, state from then on), as JSON; only where it has changed."""
        self._lock = threading.Lock()
        self._is_started = False
        self._context = CallbackContext(
            facts.first_step - 1, facts.steps, max(0, facts.first_step - 1) // facts.steps_per_epoch, None, 0.0, None,
            {}, facts.metric_names, facts.folder, control=self,
        )  # fmt: skip
        names: dict[str, int] = {}
        self._stateful: dict[str, Stateful] = {}
        named: list[tuple[str, Stateful]] = [(listener.name, listener) for listener in listeners]
        for name, each in (*named, *((callback.name, callback) for callback in callbacks)):
            names[name] = count = names.get(name, 0) + 1
            self._stateful[name if count == 1 else f"{name}-{count}"] = each

    @property
    def is_stopping(self) -> bool:
        return self.stopped_because is not None or self.failure is not None

    # What callbacks ask for

    def stop(self, reason: str) -> None:
        self.stopped_because = self.stopped_because or str(reason)

    def checkpoint(self, name: str = "") -> None:
        is_folder = name == Path(name).name and not name.startswith(".")
        is_taken = name in RUN_FOLDERS
        if name and (is_taken or not (is_folder and name.isprintable() and len(name) <= 100)):
            raise BadValue(f"{name!r} cannot be a folder of the run.", hint='Write checkpoint("best"), say.')
        self.requests.add(self._context.steps_done, name)

    # What happens

    def start(self) -> None:
        self._is_started = True
        self._call("on_start", self._context)
        self._note()
        if self.failure is not None:
            raise self.failure

    def stepped(self, step: int, loss: float | None, seconds: float) -> None:
        if not self._stateful:
            return
        per_epoch = self.facts.steps_per_epoch
        self._context = context = replace(
            self._context, step=step, epoch=step // per_epoch, loss=loss, seconds=seconds,
            learning_rate=self.facts.learning_rate(step),
        )  # fmt: skip
        self._call("on_step", context)
        if (step + 1) % per_epoch == 0:
            self._call("on_epoch", context)
        self._note()

    def validated_at(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        """Report the results of a validation: to the listeners first."""
        self.validated = steps_done
        self._context = replace(self._context, step=steps_done - 1, metrics=dict(metrics))
        try:
            check_monitors(self.callbacks, [*metrics])
        except ManyhandsError as error:
            self.failure = self.failure or error
        for listener in self.listeners:
            try:
                listener.on_validation(metrics)
            except Exception as error:
                self.failure = self.failure or _failure(listener.name, "on_validation", self._context, error)
        self._call("on_validation", self._context)
        self._note()

    def recovered(self, facts: Mapping[str, Any]) -> None:
        self._call("on_recovery", replace(self._context, recovery=dict(facts)))

    def end(self, model: nn.Module | None = None, error: BaseException | None = None) -> None:
        """Report the end, once. The error of a callback is raised, unless another has ended the run."""
        if not self._is_started:
            return
        self._is_started, before = False, self.failure
        self._call("on_end", replace(self._context, model=model, error=error, stopped_because=self.stopped_because))
        if error is None and before is None and self.failure is not None:
            raise self.failure

    def _call(self, event: str, context: CallbackContext) -> None:
        """Call a method of every callback; the first that raises ends the job."""
        for callback in self.callbacks:
            if self.failure is not None and event != "on_end":
                return
            try:
                getattr(callback, event)(context)
            except Exception as error:
                if self.failure is None:
                    self.failure = _failure(callback.name, event, context, error)

    # State

    def _note(self) -> None:
        """Keep the state after the last step, to go into a checkpoint of that step."""
        states: dict[str, Any] = {}
        for name, each in self._stateful.items():
            try:
                state = each.state_dict()
                json.dumps(state)
            except Exception as error:
                self.failure = self.failure or BadValue(
                    f"The state_dict of the callback {name} cannot be stored as JSON: {error!s:.300}",
                    hint="Return numbers, text, lists and dicts of them.",
                )
                continue
            if state:
                states[name] = state
        text = json.dumps({"validated": self.validated, "states": states})
        with self._lock:
            if not self._states or self._states[-1][1] != text:
                self._states.append((self._context.steps_done, text))

    def document_after(self, steps_done: int) -> dict[str, Any]:
        """Return the state after so many steps, as a fact of the checkpoint, which is written on another thread; empty
        where there is none. No earlier state is asked for after that."""
        with self._lock:
            place = sum(step <= steps_done for step, _ in self._states) - 1
            if place < 0:
                return {}
            del self._states[:place]
            document = json.loads(self._states[0][1])
        return {STATE: document} if document["validated"] or document["states"] else {}

    def load(self, document: Any, say: Callable[[str], None] | None) -> None:
        """Take the state of a checkpoint from which the run goes on."""
        if not isinstance(document, Mapping):
            return
        validated, states = document.get("validated", 0), document.get("states", {})
        if not isinstance(validated, int) or not isinstance(states, Mapping):
            raise BadFile("The checkpoint's state of callbacks is not one that manyhands wrote.")
        self.validated = validated
        for name, state in states.items():
            each = self._stateful.get(name)
            if each is None:
                if say is not None:
                    say(f"The run had a callback {name}, which it now goes on without.")
                continue
            try:
                each.load_state_dict(state)
            except Exception as error:
                raise BadFile(
                    f"{name} cannot go on from the checkpoint's state of it: {type(error).__name__}: {error!s:.300}",
                    hint="Give the same callbacks as before, or leave it out.",
                ) from error


def _failure(name: str, event: str, context: CallbackContext, error: Exception) -> ManyhandsError:
    after = f"after step {context.step}" if context.step >= 0 else "before the first step"
    if isinstance(error, ManyhandsError):
        error.message = f"The callback {name} in {event}, {after}: {error.message}"
        return error
    failure = BadValue(f"The callback {name} raised in {event}, {after}: {type(error).__name__}: {error!s:.300}")
    failure.__cause__ = error
    return failure


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether a metric is better than the best so far by more than `min_delta`; NaN never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta

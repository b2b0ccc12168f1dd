"""`mh.Callback`: what a user's own code may do while a training goes on, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


class Control(Protocol):
    """The requests of a callback to its job."""

    def stop(self, reason: str) -> None: ...

    def checkpoint(self, name: str = "") -> None: ...


@dataclass(frozen=True)
class CallbackContext:
    """The state of the run at a callback's call. It is read-only, but for `stop` and `checkpoint`."""

    step: int
    """The last step that is done, counted from 0; -1: none is."""
    steps: int
    """Steps of the whole run."""
    epoch: int
    """The epoch of that step, counted from 0."""
    loss: float | None
    """The loss of that step."""
    seconds: float
    """Seconds that the step took."""
    learning_rate: float | None
    """The learning rate of that step, of the first group; None: it is not known."""
    metrics: Mapping[str, float]
    """The results of the last validation, by name: loss, accuracy, and those of `metrics=`; empty before the first."""
    metric_names: tuple[str, ...]
    """The names that `metrics` has after a validation, as far as they are known beforehand; empty: there is none."""
    folder: Path
    """The run's folder."""
    model: nn.Module | None = None
    """The module with its trained weights, in `on_end` of a run that was not broken off."""
    stopped_because: str | None = None
    """The reason that a callback gave to stop."""
    error: BaseException | None = None
    """The error that ended the run, in `on_end`."""
    recovery: Mapping[str, Any] = field(default_factory=dict)
    """In `on_recovery`: how the run went on (`how`), with which `devices`, from which step, after how many seconds."""
    control: Control | None = field(default=None, repr=False)

    @property
    def steps_done(self) -> int:
        return self.step + 1

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after the round under way, with a checkpoint; `result.stopped_because` is the reason."""
        if self.control is not None:
            self.control.stop(reason)

    def checkpoint(self, name: str = "") -> None:
        """Write a checkpoint after the round under way, at a validation of exactly the weights that were validated.

        With a name a copy stays in RUN/NAME, in place of an earlier one, however many checkpoints follow.
        """
        if self.control is not None:
            self.control.checkpoint(name)


class Callback:
    """The base of callbacks: each method is called on the coordinator, from the loop that feeds the devices.

    While a method runs the devices work off the batches that they have, and then wait. One that raises ends the run,
    with a checkpoint. State that is to outlive a resumed run is plain data: `state_dict` returns what JSON can hold.
    """

    monitor: str = ""
    """The metric that it needs at every validation; a run that has none of that name is refused before it starts."""

    @property
    def name(self) -> str:
        """The name of this callback in errors and in checkpoints."""
        return type(self).__name__

    def on_start(self, context: CallbackContext) -> None:
        """Called before the first step, and before the first one of a resumed run."""

    def on_step(self, context: CallbackContext) -> None:
        """Called after every step, once each, in order."""

    def on_epoch(self, context: CallbackContext) -> None:
        """Called after the last step of every epoch."""

    def on_validation(self, context: CallbackContext) -> None:
        """Called after every validation, before the next step begins."""

    def on_recovery(self, context: CallbackContext) -> None:
        """Called when the run has gone on after workers were lost, joined or left."""

    def on_end(self, context: CallbackContext) -> None:
        """Called once at the end, also where the run was stopped or has failed (`context.error`)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that a checkpoint holds; called before `on_start`."""

"""Validations at certain steps and checkpoints on request: what an elastic job does between two rounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from manyhands.runtime.order import Order


class Validation(Protocol):
    """An evaluation of held-out data at certain steps, when all devices are done with every step before.

    The job's loop calls it between two generations: no step is under way, and the weights are where the order says.
    """

    def next_after(self, steps_done: int) -> int | None:
        """Return the first step after this one at which it is due; None: there is none."""

    def is_due(self, steps_done: int) -> bool:
        """Return whether it is due with the weights after so many steps; once it is done it no longer is."""

    def evaluate(self, order: Order, since: int) -> None:
        """Evaluate with the weights that `order` begins with, on its plan's devices, and report the results.

        `since`: the generation with which the job began. Raises WorkerLost where a device is lost meanwhile: it is then
        called again.
        """


class NoValidation:
    """A job without held-out data."""

    def next_after(self, steps_done: int) -> int | None:
        return None

    def is_due(self, steps_done: int) -> bool:
        return False

    def evaluate(self, order: Order, since: int) -> None:
        raise AssertionError("it is never due")


@dataclass
class CheckpointRequests:
    """Checkpoints that were requested while a job runs, each with the folders that are to keep it besides."""

    is_pending: bool = False
    """Whether one was requested that no order includes yet."""
    _names: dict[int, set[str]] = field(default_factory=dict)
    """Steps done when checkpoints were requested -> the names under which these are kept."""

    def add(self, steps_done: int, name: str = "") -> None:
        """Request a checkpoint of the state after `steps_done` steps, or the next that can be had."""
        self.is_pending = True
        names = self._names.setdefault(steps_done, set())
        if name:
            names.add(name)

    def ordered(self) -> None:
        """Note that the next generation begins with a checkpoint."""
        self.is_pending = False

    def served_by(self, steps_done: int) -> Collection[str]:
        """Return the names of the requests that a checkpoint after so many steps serves, which are over then."""
        served = [step for step in self._names if step <= steps_done]
        return sorted({name for step in served for name in self._names.pop(step)})

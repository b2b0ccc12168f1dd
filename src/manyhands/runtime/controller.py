"""The sources of an elastic job's next plan: re-planning when members change, or a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.runtime.control_parts import Arrival


@dataclass(frozen=True)
class Change:
    """The plan with which a job goes on, and how it was made."""

    plan: Plan
    kernels: Mapping[str, Mapping[str, Kernel]]
    how: str
    reason: str = ""
    backup_every: int | None = None
    """None: as before."""


class Replan(Protocol):
    """A function that returns a plan for the workers that have joined."""

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change: ...


class Controller(Protocol):
    """Steers a job while its workers stay. The coordinator's loop calls it, so it must answer at once."""

    def stop_at(self, step: int) -> int | None:
        """Return the first step after this one at which another plan is needed in any case; None: there is none."""

    def should_change(self, steps_done: int) -> bool:
        """Return whether the round under way is to be the last by this plan."""

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        """Note what a device has received from others, and how long that took."""

    def began(self, plan: Plan, steps_done: int) -> None:
        """Note that the first round by a plan is complete."""

"""Where the next plan of an elastic job comes from: re-planning when members change, or a controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from manyhands.facts.plan import Plan
from manyhands.facts.profile import Kernel
from manyhands.runtime.control_parts import Arrival


@dataclass(frozen=True)
class Change:
    """How a job goes on with other workers."""

    plan: Plan
    kernels: Mapping[str, Mapping[str, Kernel]]
    how: str
    reason: str = ""
    backup_every: int | None = None
    """None: as before."""


class Replan(Protocol):
    """Asked for a plan for those who are there."""

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change: ...


class Controller(Protocol):
    """Steers a job while its workers stay: asked from the coordinator's loop, so it answers at once."""

    def stop_at(self, step: int) -> int | None:
        """The first step after this one at which another plan is wanted, whatever happens; None: none."""

    def should_change(self, steps_done: int) -> bool:
        """Whether the round under way is to be the last by this plan."""

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        """What a device has got from others, and how long that took."""

    def began(self, plan: Plan, steps_done: int) -> None:
        """The first round by a plan is done."""

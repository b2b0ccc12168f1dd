"""A plan that is about to run, with what the simulator predicts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan, plan_line
from manyhands.facts.profile import Profile
from manyhands.facts.summary import Summarized
from manyhands.facts.units import format_seconds
from manyhands.simulator.result import Simulation


@dataclass(frozen=True, repr=False)
class PlannedRun(Summarized):
    """The plan of a run, and what the simulator predicts for it."""

    plan: Plan
    network: Network
    cluster: Cluster
    profile: Profile
    prediction: Simulation
    steps: int
    folder: Path
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """Other plans that `auto` priced -> predicted seconds of a step."""

    def summary(self) -> dict[str, str]:
        return {
            "plan": plan_line(self.plan), "predicted": f"{format_seconds(self.step_seconds)} a step",
            "steps": f"{self.steps:,}" if self.steps else "as many as there will be batches",
            "folder": str(self.folder),
        }  # fmt: skip

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of one step of the optimiser."""
        return self.prediction.seconds / self.plan.steps_per_round

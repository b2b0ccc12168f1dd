"""A plan that is about to run, with what the simulator predicts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile
from manyhands.simulator.result import Simulation


@dataclass(frozen=True)
class PlannedRun:
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

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of one step of the optimiser."""
        return self.prediction.seconds / self.plan.steps_per_round

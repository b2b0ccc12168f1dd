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
    """What is about to run, and what the simulator expects of it."""

    plan: Plan
    network: Network
    cluster: Cluster
    profile: Profile
    prediction: Simulation
    steps: int
    folder: Path
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """What else `auto` looked at -> predicted seconds of a step."""

    @property
    def step_seconds(self) -> float:
        """Predicted, of one step of the optimiser."""
        return self.prediction.seconds / self.plan.steps_per_round

"""The outcome of planning: the chosen plan and its alternatives."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.facts.plan import Plan, plan_line
from manyhands.facts.summary import Summarized
from manyhands.facts.units import format_seconds
from manyhands.planner.pricing import Objective
from manyhands.planner.task import Best, PlanCandidate


@dataclass(frozen=True, repr=False)
class Planned(Summarized):
    """A plan, and the other candidates: the fastest first."""

    plan: Plan
    candidates: list[PlanCandidate]
    runners_up: tuple[Plan, ...] = ()
    """Others of the same strategy, the next fastest first: worth a trial (`train(tune=...)`)."""
    objective: Objective | None = None
    """The objective of a plan for inference; candidates' seconds are those of a sample. None: training."""
    is_partial: bool = False
    """Whether there was no time for every strategy."""
    best: Best = "throughput"
    """The objective of a plan for training."""

    def summary(self) -> dict[str, str]:
        priced = [candidate.seconds for candidate in self.candidates if candidate.plan is not None]
        facts = {"plan": plan_line(self.plan)}
        if priced:
            facts["predicted"] = f"{format_seconds(min(priced))}, the best of {len(priced)}"
        return facts

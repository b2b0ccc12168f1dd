"""Pipelines whose layers run forward again in the backward pass, for networks that fit no other way."""

from __future__ import annotations

import numpy

from manyhands.facts.errors import ManyhandsError, OutOfMemory
from manyhands.facts.plan_check import resolve
from manyhands.planner.context import Batch
from manyhands.planner.hybrid import pipelines
from manyhands.planner.recomputing import within_memory
from manyhands.planner.shares import Counts, Numbers
from manyhands.planner.steps import Steps
from manyhands.planner.task import PlanCandidate, Price, Task

MOST_TRIED = 4


class RecomputingSteps(Steps):
    """Steps of stages of which each layer keeps only what enters it. Their times are those of stages that keep all:
    every layer takes about as much longer."""

    def memory(self, first: Counts, last: Counts, ahead: int) -> tuple[Numbers, Numbers]:
        """Return the bytes of stages as `Steps.memory` does, with the activations of one layer at a time."""
        b = self.bytes
        entering = numpy.concatenate([[0.0], numpy.cumsum(b.crossing)])
        fixed = b.held(first, last) + numpy.diff(b.fixed).max()
        fixed = fixed + max(self.batch.count > 1, self.batch.optimizer_slots) * b.heaviest[first, last]
        each = b.held_at_once(last, ahead) * (entering[last] - entering[first]) + numpy.diff(b.saved).max()
        return fixed, each + numpy.maximum(b.widest[first, last], b.returning[last])


def recomputed_pipelines(task: Task, price: Price, refusal: OutOfMemory) -> list[PlanCandidate]:
    """Return pipelines that fit with recomputation, simulated, the best first; raise `refusal`, the reason why none
    fits without it, where none does."""
    like = Batch(
        1, 1, task.optimizer_slots, is_synchronised=task.batch_norm == "synchronised", warm_up=task.warm_up
    )  # fmt: skip
    try:
        planned = pipelines(
            task.network, task.cluster, task.profile, task.batch_size, micro_batches=task.micro_batches, like=like,
            may_be_alone=False, pricing=RecomputingSteps,
        )  # fmt: skip
    except OutOfMemory:
        raise refusal from None
    candidates: list[PlanCandidate] = []
    for pipeline in planned:
        if len(candidates) == MOST_TRIED:
            break
        try:
            plan = resolve(pipeline.plan(task.network), task.network, task.cluster)
            candidates.append(PlanCandidate("pipeline", *within_memory(plan, task.network, price)))
        except ManyhandsError:
            continue
    if not candidates:
        raise refusal
    return sorted(candidates, key=lambda candidate: candidate.seconds)

"""Refinements after a search: a plan improved by small changes, and a fast price for ranking plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import layer_range, resolve
from manyhands.planner.task import PlanCandidate, Price, Task

MANY = 16
"""With more micro-batches than this, a round is not simulated whole for ranking."""
FEW = (8, 12)
MOVES = (-1, 1, -2, 2)
"""Layers by which a cut is moved."""
MOST_TRIALS = 24


def quick_price(price: Price) -> Price:
    """Return a faster price for ranking: it extrapolates a long round from two shorter ones, because every micro-batch
    adds the same once the pipeline is full. The chosen plan is priced whole."""

    def extrapolated(plan: Plan) -> float:
        if plan.micro_batches <= MANY:
            return price(plan)
        less, more = (price(shortened(plan, count)) for count in FEW)
        return more + (plan.micro_batches - FEW[1]) * (more - less) / (FEW[1] - FEW[0])

    return extrapolated


def shortened(plan: Plan, most: int) -> Plan:
    """Return the plan with a smaller batch of at most `most` micro-batches."""
    count = min(most, plan.micro_batches)
    return msgspec.structs.replace(plan, batch_size=plan.micro_batch_size * count, micro_batches=count)


def refined(candidate: PlanCandidate, task: Task, price: Price) -> PlanCandidate:
    """Return the plan with its cuts moved by a layer or two, as long as that makes it better."""
    best, trials = candidate, 0
    is_better = True
    while is_better and trials < MOST_TRIALS:
        is_better = False
        assert best.plan is not None
        for plan in moved_cuts(best.plan):
            trials += 1
            try:
                plan = resolve(plan, task.network, task.cluster)
                moved = PlanCandidate(best.name, plan, price(plan))
            except ManyhandsError:
                continue
            if moved.seconds < best.seconds * (1 - 1e-6):
                best, is_better = moved, True
                break
    return best


def moved_cuts(plan: Plan, moves: Sequence[int] = MOVES) -> Iterator[Plan]:
    """Yield the resolved plan with one of its cuts moved by some layers."""
    ranges = [layer_range(stage) for stage in plan.stages]
    for place, ((first, cut), (_, last)) in enumerate(pairwise(ranges)):
        for by in moves:
            if first < cut + by < last:
                before = msgspec.structs.replace(plan.stages[place], layers=(first, cut + by))
                other = msgspec.structs.replace(plan.stages[place + 1], layers=(cut + by, last))
                yield msgspec.structs.replace(
                    plan, stages=(*plan.stages[:place], before, other, *plan.stages[place + 2 :])
                )

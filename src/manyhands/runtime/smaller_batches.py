"""Batches that are smaller than those a job's plan is for: each is a generation of its own, by a plan for its size.

step   0    1    2  |   3   |  4    5    6  |   7   |  8 ...
       by the plan    5 of    by the plan     5 of
                      12                      12
"""

from __future__ import annotations

import dataclasses

from manyhands.data.batch_errors import too_small
from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.runtime.order import Order
from manyhands.schedule.smaller_batch import for_smaller_batch


def plan_for(plan: Plan, network: Network, samples: int, step: int | None) -> Plan:
    """Return the plan for a smaller batch. One that cannot be trained as one device would is refused, with its step;
    None: it is the last of any epoch."""
    try:
        return for_smaller_batch(plan, network, samples)
    except BadPlan as error:
        raise too_small(step, samples, plan.step_size, error.message) from error


def order_of_next(order: Order, samples: int | None) -> Order:
    """Return the order as it is, or where the next batch has fewer samples, of that one step.

    The step is neither traced nor watched: what is recorded is the plan that all others go by. What is to be saved of
    it is saved while the next generation goes on, if there is one. `samples`: those of the next batch; None: it is not
    known yet, or as large as all.
    """
    first = order.first_step
    if samples is None or samples == order.plan.step_size or first == order.last_step:
        return order
    plan, is_last = plan_for(order.plan, order.graph.network, samples, first), first + 1 == order.last_step
    return dataclasses.replace(
        order, plan=plan, last_step=first + 1,
        snapshots=tuple(step for step in order.snapshots if step <= first or is_last),
        backup_every=order.backup_every if len(plan.devices) > 1 else 0, trace_steps=range(0), memory_step=-1,
        watch_every=0,
    )  # fmt: skip

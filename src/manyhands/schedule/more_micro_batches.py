"""The plan with twice as many micro-batches, each half as large: what a device holds of them takes half the memory."""

from __future__ import annotations

from manyhands.facts.errors import BadPlan
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.schedule.smaller_batch import divided_anew


def with_twice_the_micro_batches(plan: Plan, network: Network) -> Plan:
    """Return a resolved plan with its micro-batches halved; refuse, with BadPlan, what would compute something else."""
    if plan.steps_per_round > 1 or not plan.is_training:
        raise BadPlan(f"order is {plan.order}: its micro-batches are not parts of one batch")
    if any(op.statistics for op in network.ops):
        raise BadPlan("batch norm computes its statistics over each micro-batch: smaller ones would change the result")
    if plan.micro_batch_size % 2:
        raise BadPlan(f"a micro-batch has {plan.micro_batch_size} sample(s), which cannot be halved")
    halved = divided_anew(plan, plan.batch_size, 2 * plan.micro_batches)
    if halved.devices != plan.devices:
        raise BadPlan("a device would be left without samples")
    return resolve(halved, network)

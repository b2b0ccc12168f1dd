"""The bytes that a plan of a split sends: what runs are compared with."""

from __future__ import annotations

import msgspec

from manyhands.executor.messages import plan_bytes
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.schedule.policy import Schedule


def bytes_of_step(plan: Plan, network: Network) -> dict[tuple[str, str], int]:
    """(from, to) -> bytes that a plan of a split sends for one mini-batch."""
    one = msgspec.structs.replace(plan, batch_size=plan.step_size, micro_batches=1)
    schedule = Schedule(resolve(one, network), network)
    return plan_bytes({name: tuple(schedule.every_action(name)) for name in schedule.lowering.work}, network)

"""A job whose GPU runs out of memory tries once more, with twice as many micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.facts.errors import BadPlan, GpuOutOfMemory, ManyhandsError
from manyhands.runtime.controller import Change
from manyhands.runtime.order import Order
from manyhands.schedule.more_micro_batches import with_twice_the_micro_batches


class MemoryRetry:
    """Decides, once in a job, how it goes on after a GPU ran out of memory."""

    def __init__(self, log_event: Callable[..., Any]) -> None:
        self._log_event = log_event
        self._is_spent = False

    def change(self, order: Order, error: ManyhandsError) -> Change | None:
        """Return the plan to go on with; None for any other error, and where nothing can be done about this one."""
        if not isinstance(error, GpuOutOfMemory) or self._is_spent:
            return None
        self._is_spent = True
        try:
            plan = with_twice_the_micro_batches(order.plan, order.graph.network)
        except BadPlan as refusal:
            self._log_event("out of memory", reason=error.message, why_not=refusal.message)
            return None
        reason = (
            f"{error.message} Going on with {plan.micro_batches} micro-batches in place of {order.plan.micro_batches}."
        )
        self._log_event("out of memory", reason=reason, micro_batches=plan.micro_batches)
        return Change(plan, order.kernels, "more micro-batches", reason)

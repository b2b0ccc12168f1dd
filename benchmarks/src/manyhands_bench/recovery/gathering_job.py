"""Heavy rescheduling as ASTEROID describes it, for comparison: everything is gathered, planned again, given out again.

    devices that are left  --state-->  the most powerful of them  (plans again)  --state-->  all others

Our own full re-planning (`how="heavy"`) sends each device only what it lacks. The paper's baseline (section 3.4 and
5.5) aggregates the stages' models on the most powerful remaining device and redistributes the weights. It uses the same
engine: the two transfers are runs without a step.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.runtime.controller import Change
from manyhands.runtime.elastic_job import ElasticJob
from manyhands.runtime.order import Order
from manyhands.runtime.run import Run
from manyhands.runtime.state import Located


@dataclass(frozen=True)
class Gathered:
    """The first of the two transfers: where to, and what it took."""

    home: str
    """The device on which everything was gathered."""
    bytes: int
    seconds: float


class GatheringJob(ElasticJob):
    """An elastic job that gathers all state on one device after a loss, and gives all of it out again."""

    gathered: Gathered | None = None

    def _next(
        self, order: Order, since: float, error: ManyhandsError, lost: str = "", change: Change | None = None
    ) -> Order:
        begin = time.monotonic()
        located = self._surveyed(error)
        home = max(self._membership.available(), key=lambda member: member.device.gflops).name
        run = Run(self.coordinator, self._gathering(order, located, home), since=self._since)
        moved = run.handout.moving_bytes()
        run.prepare()
        run.run(self.batches.from_step(run.first))
        self.gathered = Gathered(home, moved, time.monotonic() - begin)
        after = super()._next(order, since, error, lost, change)
        assert after.located is not None
        return dataclasses.replace(after, located=_all_from(after.located, home))

    def _gathering(self, order: Order, located: Located, home: str) -> Order:
        """Return the order by which one device gets everything, and computes nothing."""
        stage = Stage((0, len(order.graph.network.layers)), (home,))
        plan = _alone(order.plan, stage)
        return dataclasses.replace(
            order, plan=resolve(plan, order.graph.network), located=located, start=self.saved,
            kernels={home: order.kernels.get(home, {})}, last_step=located.steps_done, snapshots=(), backup_every=1,
            trace_steps=range(0), memory_step=-1, watch_every=0,
        )  # fmt: skip


def _alone(plan: Plan, stage: Stage) -> Plan:
    """Return a plan of one stage with the same batch and settings."""
    return Plan(
        plan.network, plan.batch_size, (stage,), micro_batches=plan.micro_batches, optimizer_slots=plan.optimizer_slots,
        batch_norm=plan.batch_norm,
    )  # fmt: skip


def _all_from(located: Located, home: str) -> Located:
    """Return the same state as if this device alone had it: every other device is sent all that it needs."""
    holders = {
        name: (home,) if home in places else tuple(place for place in places if place == COORDINATOR) or places
        for name, places in located.holders.items()
    }
    return dataclasses.replace(located, holders=holders)

"""The order of a job: what its elastic job is to run, from a state on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.job.collectives_config import CollectivesConfig
from manyhands.runtime.living import rounds_between_looks
from manyhands.runtime.order import Order, RunState, snapshot_steps

if TYPE_CHECKING:
    from manyhands.job.base import Guide, Job

WARM_UP_STEPS = 2
TRACED_STEPS = 3


def order_of(job: Job, planned: PlannedRun, guide: Guide, start: RunState, last: int) -> Order:
    """Return the order of the steps from a state up to step `last`."""
    sums = job.config if isinstance(job.config, CollectivesConfig) else CollectivesConfig()
    first, plan, seconds = start.steps_done, planned.plan, planned.prediction.seconds
    traced = range(min(first + WARM_UP_STEPS, last - 1), min(first + WARM_UP_STEPS + TRACED_STEPS, last))
    return Order(
        graph=job.graph, plan=plan, start=start, last_step=last, optimizer=job.workload.optimizer,
        rates=job.workload.scheduling, seed=job.workload.seed, kernels=guide.kernels(plan),
        snapshots=snapshot_steps(first, last, job.checkpoint_every(planned)), trace_steps=traced,
        memory_step=min(first + 1, last - 1), wait_limit_seconds=job.config.limit_seconds,
        backup_every=job.backup_every(planned), predicted_seconds=seconds,
        watch_every=rounds_between_looks(seconds, (last - first) // plan.steps_per_round),
        clipping=job.config.clipping, scales_loss=job.workload.scales_loss, ema=job.config.ema,
        collectives=sums.collectives, trusts_network=sums.trusted_network,
    )  # fmt: skip


def cuts_statistics(plan: Plan, network: Network) -> bool:
    """Return whether batch norm computes its statistics over less than a batch."""
    return plan.micro_batches > plan.steps_per_round and any(op.statistics for op in network.ops)

"""Plans that need no search: one device alone, all by samples, one device per stage."""

from __future__ import annotations

from manyhands.facts.errors import BadPlan
from manyhands.facts.plan import BySamples, Plan, Stage
from manyhands.planner.context import by_memory
from manyhands.planner.task import Task


def single(task: Task, device: str = "") -> Plan:
    """Return the plan with one device alone."""
    stage = Stage((0, len(task.network.layers)), (device or task.fastest(),))
    return task.plan([stage], task.micro_batches or 1)


def proportional(total: int, weights: list[float]) -> list[int]:
    """Return whole numbers in proportion to weights that add up to `total` (largest remainders)."""
    scale = total / sum(weights)
    exact = [weight * scale for weight in weights]
    counts = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: exact[i] - counts[i], reverse=True)
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def samples(task: Task) -> Plan:
    """Return the data-parallel plan with shares by speed: at least one sample of every micro-batch for each device."""
    micro_batches = task.micro_batches or 1
    size = task.batch_size // micro_batches
    names = task.cluster.names
    if size < len(names):
        raise BadPlan(
            f"A micro-batch of {size} sample(s) cannot be shared by {len(names)} devices: each takes at least one.",
            hint="Use a larger batch, fewer micro-batches or fewer devices, or let strategy 'auto' (--share auto) "
            "leave some out.",
        )
    speeds = [1.0 / task.step_seconds(name, max(1, size // len(names))) for name in names]
    counts = proportional(size, speeds)
    while min(counts) < 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    stage = Stage((0, len(task.network.layers)), names, BySamples(tuple(counts)))
    return task.plan([stage], micro_batches)


def divisor_near(number: int, target: int) -> int:
    """Return the divisor of `number` closest to `wanted`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - target), d))


def balanced_cuts(costs: list[list[float]]) -> list[int]:
    """Return the stage ends that make the slowest stage fastest, by dynamic programming. costs[p][l] is layer l on
    stage p."""
    stages, layers = len(costs), len(costs[0])
    sums = [[0.0] for _ in range(stages)]
    for p in range(stages):
        for cost in costs[p]:
            sums[p].append(sums[p][-1] + cost)
    best = [[float("inf")] * (layers + 1) for _ in range(stages + 1)]
    back = [[0] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for p in range(1, stages + 1):
        for end in range(p, layers - (stages - p) + 1):
            for start in range(p - 1, end):
                slowest = max(best[p - 1][start], sums[p - 1][end] - sums[p - 1][start])
                if slowest < best[p][end]:
                    best[p][end], back[p][end] = slowest, start
    ends = [layers]
    for p in range(stages, 1, -1):
        ends.append(back[p][ends[-1]])
    return ends[::-1]


def usual_micro_batches(task: Task, stages: int) -> int:
    """Return the usual number of micro-batches: about four per stage, unless the task fixes it."""
    if task.micro_batches:
        return task.micro_batches
    most = task.batch_size
    if any(op.statistics for op in task.network.ops):  # statistics of one sample are none
        most = max(1, task.batch_size // 2)
    count = divisor_near(task.batch_size, min(4 * stages, most))
    return count if count <= most else 1


def one_each(task: Task) -> Plan:
    """Return the plan with one device per stage in order of memory (ASTEROID §3.3), the slowest stage as fast as
    possible."""
    layers = len(task.network.layers)
    names = by_memory(task.cluster)[:layers]
    micro_batches = usual_micro_batches(task, len(names))
    size = task.batch_size // micro_batches
    costs = [[sum(task.profile.of(name).layer_seconds(layer, size)) for layer in range(layers)] for name in names]
    ends = balanced_cuts(costs)
    starts = [0, *ends[:-1]]
    stages = [Stage((start, end), (name,)) for name, start, end in zip(names, starts, ends)]
    return task.plan(stages, micro_batches)

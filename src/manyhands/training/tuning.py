"""Tries plans for a few steps on the session's workers: where simulations are close, a trial decides."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from manyhands.data.preload import Preload
from manyhands.executor.messages import runs_here
from manyhands.executor.schedules import at_start
from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan, Single, Stage
from manyhands.facts.plan_check import op_range, resolve
from manyhands.facts.profile import Kernel
from manyhands.graph.graph import Graph
from manyhands.job.ordering import cuts_statistics
from manyhands.planner.refining import moved_cuts
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.run import Run

WARM_UP, STEPS = 2, 4
"""Steps of one turn: those that do not count, and those that do."""


class Turns(NamedTuple):
    """The number of turns: at least `least` and at most `most`, until the steps of a plan have taken `seconds`. A
    disturbance lasts equally long whether steps are long or short."""

    least: int
    most: int
    seconds: float


FIRST, LAST = Turns(2, 6, 3.0), Turns(3, 8, 6.0)
"""Turns of all plans; turns of the final trial of those that are close, which decides."""
PRUNED_RATIO = 1.5
"""A plan whose steps take more than this many times as long as those of the best has no further turn."""
CLEARLY_FASTER = 0.95
"""A plan is preferred to one that the simulation ranks before it only if it takes less than this part of its time."""
FINALISTS, CLOSE = 4, 1.2
"""The most plans that are tried once more, and the most time that they may have taken relative to the best: the fastest
of many in a short trial was also lucky."""

Trials = list[tuple[Plan, float]]


def fastest_in_trial(
    coordinator: Coordinator,
    graph: Graph,
    plans: Sequence[Plan],
    optimizer: Optimizer,
    kernels: Mapping[str, Mapping[str, Kernel]],
    batch: Preload,
    *,
    is_preloaded: bool,
) -> Trials:
    """Return plans with the seconds of a step, the one to choose first; `plans` are ordered by simulated time.

    Plans take turns, as a machine's speed drifts. The same batch is trained on repeatedly, from the graph's own
    weights, which do not change; `is_preloaded`: the devices hold it beforehand. Then the plans nearest to the best of
    several take turns with it: a simulation may be wrong by more than a layer. Plans that are close to the best then
    have a longer trial, which decides, again for the one that the simulation ranks first unless another is clearly
    faster. If the best adds up gradients in buckets during the backward pass, it is tried in one bucket too: where
    links are fast and every core computes, work beside computing slows it down by more than it takes.
    """

    def tried(some: Sequence[Plan], turns: Turns) -> Trials:
        step_seconds: dict[int, list[float]] = {number: [] for number in range(len(some))}
        racing, usual = list(step_seconds), dict[int, float]()
        for turn in range(1, turns.most + 1):
            for number in racing:
                step_seconds[number] += _steps(
                    coordinator, graph, some[number], optimizer, kernels, batch, is_preloaded
                )
            usual = {number: statistics.median(steps) for number, steps in step_seconds.items() if steps}
            best = min(usual, key=lambda number: usual[number], default=0)
            racing = [number for number in racing if number in usual and usual[number] <= PRUNED_RATIO * usual[best]]
            if len(racing) < 2 or (turn >= turns.least and sum(step_seconds[best]) >= turns.seconds):
                break
        return [(some[number], seconds) for number, seconds in usual.items()]

    ranked = _ranked(tried(plans, FIRST))
    if len(ranked) > 1 and (near := nearest(ranked[0][0], plans, graph.network)):
        around = tried([ranked[0][0], *near], FIRST)
        ranked = [*_sorted(around), *ranked[1:]]
    close = [plan for plan, seconds in _sorted(ranked) if seconds <= CLOSE * ranked[0][1]][:FINALISTS]
    if len(close) > 1:
        close.sort(key=lambda plan: plans.index(plan) if plan in plans else len(plans))
        ranked = [*_ranked(tried(close, LAST)), *(trial for trial in ranked if trial[0] not in close)]
    if ranked and (whole := in_one_bucket(ranked[0][0], graph.network)) is not None:
        trials = tried([ranked[0][0], whole], LAST)
        return [*_sorted(trials), *ranked[1:]]
    return ranked


def _sorted(trials: Trials) -> Trials:
    return sorted(trials, key=lambda trial: trial[1])


def nearest(plan: Plan, candidates: Sequence[Plan], network: Network) -> list[Plan]:
    """Return plans that differ in one cut by one layer, or have half or twice as many micro-batches, and are not among
    `candidates`.

    The number of micro-batches varies only if the candidates differ in it too; else the user has fixed it.
    """
    neighbours = list(moved_cuts(plan, (-1, 1)))
    if len({candidate.micro_batches for candidate in candidates}) > 1 and all(
        isinstance(candidate.share, Single) for candidate in plan.stages
    ):
        counts = (plan.micro_batches // 2, 2 * plan.micro_batches)
        neighbours += [msgspec.structs.replace(plan, micro_batches=count) for count in counts if count]
    near = []
    for neighbour in neighbours:
        with contextlib.suppress(BadPlan):
            neighbour = resolve(neighbour, network)
            runs_here(neighbour, network)
            if neighbour not in candidates and cuts_statistics(neighbour, network) == cuts_statistics(plan, network):
                near.append(neighbour)
    return near


def in_one_bucket(plan: Plan, network: Network) -> Plan | None:
    """Return the plan with all gradients of a stage added up at once; None: they already are, or none are added up."""
    shared = [stage for stage in plan.stages if len(stage.devices) > 1 and stage.reduce == "allreduce"]
    most = max((_gradient_bytes(stage, network) for stage in shared), default=0)
    return msgspec.structs.replace(plan, bucket_bytes=most) if most > plan.bucket_bytes else None


def _gradient_bytes(stage: Stage, network: Network) -> int:
    weights = (network.weights[name] for name in network.weights_of(*op_range(stage, network)))
    return sum(weight.bytes for weight in weights if weight.trainable)


def _ranked(trials: Trials) -> Trials:
    """Return the trials with the plan to choose first, then from the fastest to the slowest."""
    best = 0
    for number, (_, seconds) in enumerate(trials):
        if seconds < CLEARLY_FASTER * trials[best][1]:
            best = number
    return [*trials[best : best + 1], *_sorted(trials[:best] + trials[best + 1 :])]


def _steps(
    coordinator: Coordinator,
    graph: Graph,
    plan: Plan,
    optimizer: Optimizer,
    kernels: Mapping[str, Mapping[str, Kernel]],
    batch: Preload,
    is_preloaded: bool,
) -> list[float]:
    """Return the seconds of each of a few steps; empty if a worker lacks the memory."""
    order = Order(
        graph=graph, plan=plan, start=RunState(dict(graph.state)), last_step=WARM_UP + STEPS,
        optimizer=at_start(optimizer), kernels={name: kernels.get(name, {}) for name in plan.devices},
        preload=batch if is_preloaded else None,
    )  # fmt: skip
    run = Run(coordinator, order)
    try:
        run.prepare()
    except OutOfMemory:
        return []
    return run.run(same_batches(batch, WARM_UP + STEPS, is_preloaded=is_preloaded)).step_seconds[WARM_UP:]


def same_batches(batch: Preload, steps: int, *, is_preloaded: bool) -> Iterator[tuple[int, Any, Any]]:
    """Return an iterator that repeats one batch, or only its sample numbers if the devices hold the samples."""
    fed = batch.numbers() if is_preloaded else (batch.inputs, batch.targets)
    return ((step, *fed) for step in range(steps))

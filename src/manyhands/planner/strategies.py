"""Plans by name; `auto` takes the fastest of them.

single     the fastest device alone
samples    one stage, each device takes samples in proportion to its speed
pipeline   stages of one or more devices each, as ASTEROID plans them; devices that would only slow it are left out
tiles      the maps cut into a grid in proportion to speed, up to global pooling; the tail on the fastest device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from manyhands.facts.errors import ManyhandsError, OutOfMemory, unknown
from manyhands.facts.plan import Plan, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.planner.hybrid import pipelines
from manyhands.planner.rivals import SYNCHRONOUS
from manyhands.planner.simple import samples, single
from manyhands.planner.steps import Batch
from manyhands.planner.task import Candidate, Price, Task, fitting
from manyhands.planner.tile_plans import tiles

STRATEGIES = ("auto", "single", "samples", "pipeline", "tiles")
MEMORY_SAVING: WarmUp = "2(P-p)-1"
FURTHER_AHEAD: tuple[WarmUp, ...] = ("2(P-p)", "2(P-p)+1")
WORTH_MEMORY = 0.99
"""A plan that holds more micro-batches must be that much faster."""
MOST_SIMULATED = 16
"""Pipelines that are simulated: those with the least predicted time."""


def plan_by_name(strategy: str, task: Task, price: Price) -> list[Candidate]:
    """The plan of a named strategy (all but `auto`, which chooses), within every device's memory; of pipelines, the
    best of each shape, the fastest first."""
    if strategy == "pipeline":
        return ranked_pipelines(task, price)
    makers: dict[str, Callable[[Task], Plan]] = {
        "single": single, "samples": samples, "tiles": partial(tiles, price=price),
    }  # fmt: skip
    if strategy not in makers:
        raise unknown("strategy", strategy, STRATEGIES)
    return [fitting(strategy, makers[strategy], task, price)]


def pipeline(task: Task, price: Price) -> Plan:
    """Of the planner's best pipelines and those of its rivals, the one that simulates fastest."""
    best = ranked_pipelines(task, price)[0].plan
    assert best is not None
    return best


def ranked_pipelines(task: Task, price: Price) -> list[Candidate]:
    """The planner's best pipelines and those of its rivals, simulated: the best of each shape, the fastest first."""
    like = Batch(
        1, 1, task.optimizer_slots, is_synchronised=task.batch_norm == "synchronised", warm_up=task.warm_up
    )  # fmt: skip
    found = pipelines(
        task.network, task.cluster, task.profile, task.batch_size, micro_batches=task.micro_batches, like=like,
        may_be_alone=False,
    )  # fmt: skip
    plans = [one.plan(task.network) for one in found[:MOST_SIMULATED]]
    for make in SYNCHRONOUS.values():
        try:
            plans.append(make(task, price))
        except ManyhandsError:
            continue  # a rival that cannot run is no candidate
    best: dict[tuple[object, ...], Candidate] = {}
    refusal: ManyhandsError | None = None
    for plan in plans:
        try:
            plan = resolve(plan, task.network, task.cluster)
            seconds = price(plan)
        except ManyhandsError as error:
            refusal = error
            continue
        shape = (plan.order, plan.micro_batches, *(stage.devices for stage in plan.stages))
        if shape not in best or seconds < best[shape].seconds:
            best[shape] = Candidate("pipeline", plan, seconds)
    if not best:
        assert refusal is not None
        raise refusal
    ranked = sorted(best.values(), key=lambda one: one.seconds)
    return [_running_ahead(task, ranked[0], price), *ranked[1:]]


def _running_ahead(task: Task, best: Candidate, price: Price) -> Candidate:
    """The same plan with more forward passes before the first backward, where memory allows and links are slow."""
    plan = best.plan
    assert plan is not None
    if len(plan.stages) == 1 or plan.order != "1f1b" or task.warm_up != MEMORY_SAVING:
        return best
    for policy in FURTHER_AHEAD:
        other = msgspec.structs.replace(plan, warm_up=policy)
        try:
            seconds = price(other)
        except OutOfMemory:
            break
        if seconds < WORTH_MEMORY * best.seconds:
            best = Candidate(best.name, other, seconds)
    return best


def candidates(task: Task, price: Price) -> Iterator[tuple[str, Callable[[Task], Plan]]]:
    """Everything `auto` looks at: devices alone (the fastest of each kind), and every strategy over all of them."""
    kinds: dict[str, str] = {}
    for device in sorted(task.cluster.devices, key=lambda one: task.step_seconds(one.name, task.batch_size)):
        kinds.setdefault(f"{device.kind} {device.gflops} {device.memory_bytes}", device.name)
    for name in list(kinds.values())[:8]:
        yield f"single on {name}", partial(single, device=name)
    if len(task.cluster.devices) > 1:
        yield "samples", samples
        yield "pipeline", partial(pipeline, price=price)
        yield "tiles", partial(tiles, price=price)


def choose(task: Task, price: Price) -> list[Candidate]:
    """Price every candidate; the fastest first, those that cannot run last with the reason."""
    found = []
    for name, make in candidates(task, price):
        try:
            found.append(fitting(name, make, task, price))
        except ManyhandsError as error:
            found.append(Candidate(name, None, float("inf"), error.message))
    return sorted(found, key=lambda candidate: candidate.seconds)

"""Plans by name; `auto` takes the best of them.

single     the fastest device alone that can hold it
samples    one stage, each device takes samples in proportion to its speed
pipeline   stages of one or more devices each, as ASTEROID plans them; devices that would only slow it down are left out
tiles      the maps cut into a grid in proportion to speed, up to global pooling; the tail on the fastest device;
           without a grid, on the fastest few devices where more would only slow it down
sites      the whole network in every site, as a pipeline or by samples; only where the cluster has sites
mixed      plans in none of these corners: tiles, then samples, then one device, on the same devices or on others

Another package may add a strategy (`register_strategy`): it proposes plans, and the simulator prices them like these.

Prices are simulated. The caller decides what is priced: seconds of a step, peak bytes, joules. The searches look for
short steps; where the objective is memory they run on devices with less of it, and where it is energy, on fewer
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

import msgspec

from manyhands.facts.errors import BadPlan, BadValue, ManyhandsError, OutOfMemory, unknown
from manyhands.facts.extensions import load_extensions
from manyhands.facts.plan import ByTiles, Plan, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.planner.baselines import SYNCHRONOUS
from manyhands.planner.context import Batch, sizes
from manyhands.planner.hybrid import pipelines
from manyhands.planner.mixed import mixed_plans, promising_tiles
from manyhands.planner.pricing import subcluster
from manyhands.planner.recomputed_pipelines import recomputed_pipelines
from manyhands.planner.refining import FEW, quick_price, refined, shortened
from manyhands.planner.simple import samples, single
from manyhands.planner.singles import kinds, singles
from manyhands.planner.sites import ranked_sites
from manyhands.planner.task import PlanCandidate, Price, Task, fitting
from manyhands.planner.tile_plans import tiles, with_best_groups

CORNERS = ("single", "samples", "pipeline", "tiles")
STRATEGIES = ("auto", *CORNERS, "sites", "mixed")
QUICK = ("samples", "pipeline")
"""Strategies that are planned in a small part of the time that the others take."""
MEMORY_SAVING: WarmUp = "2(P-p)-1"
FURTHER_AHEAD: tuple[WarmUp, ...] = ("2(P-p)", "2(P-p)+1")
WORTH_MEMORY = 0.99
"""A plan that holds more micro-batches must be faster by this factor."""
MOST_SIMULATED = 16
FEW_SIMULATED = 4
MOST_WHOLE = 8
"""The number of pipelines that are simulated, those with the least predicted time; the number where a simulation takes
long; and the number that are simulated with all their micro-batches."""
MOST_LINES = 1_000_000
"""The most stages, of any layers on any group of devices, for which the baselines' plans are tried too: they are in the
same space, rarely better, and take as long to plan."""
MOST_MIXED = 3
WORTH = 1.25
"""The number of mixed plans that are refined, and how close to the best they must be."""
MOST_SEARCHED = 128
"""The most devices of a cluster with sites among which stages and tiles are searched freely, across sites."""
LESS_MEMORY = 0.85
"""With objective memory: the fraction of the least so far that is tried next."""
Propose = Callable[[Task], Iterable[Plan]]
"""A strategy of another package: plans for a task, in any order. Raises ManyhandsError, with the reason, if there is
none."""
_registered: dict[str, Propose] = {}


def register_strategy(name: str, propose: Propose) -> None:
    """Add a strategy: its plans can be requested by name, and `auto` compares them with all others."""
    if name in STRATEGIES or name in _registered:
        raise BadValue(f"A strategy called '{name}' is registered already.", hint="Give it another name.")
    _registered[name] = propose


def unregister_strategy(name: str) -> None:
    """Undo `register_strategy`."""
    _registered.pop(name, None)


def is_strategy_name(name: str) -> bool:
    """Return whether plans can be requested by this name; packages are only searched where it is not a built-in
    name."""
    return name in STRATEGIES or name in strategy_names()


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, including those that installed packages bring."""
    load_extensions()
    return (*STRATEGIES, *_registered)


def plan_by_name(strategy: str, task: Task, price: Price) -> list[PlanCandidate]:
    """Return the plans of a named strategy (all but `auto`, which chooses), within every device's memory, the best
    first.

    They are searched where and how `auto` searches its own row of that name: a strategy requested by name gets what
    `auto` would have compared.
    """
    if strategy == "auto" or not is_strategy_name(strategy):
        raise unknown("strategy", strategy, strategy_names())
    if task.best == "memory":  # how much less is tried next depends on what all strategies need
        rows = [
            candidate
            for candidate in _every_plan(task, price)
            if candidate.plan is not None and candidate.name.split()[0] == strategy
        ]
        return sorted(rows, key=lambda candidate: candidate.seconds) or _named(strategy, task, price)
    candidates: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    for subtask in _places(task, candidates):
        if subtask is not task and len(subtask.cluster.devices) == 1 and strategy != "single":
            continue  # fewer devices save energy, but a strategy of several needs two
        try:
            candidates += _named(strategy, subtask, price)
        except ManyhandsError as error:
            refusal = refusal or error
    if not candidates:
        assert refusal is not None
        raise refusal
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _named(strategy: str, task: Task, price: Price, is_over: Callable[[], bool] = lambda: False) -> list[PlanCandidate]:
    """Return the plans of one strategy on one cluster, the best first; raise the reason if there is none. `is_over`
    tells when there is no more time for plans that are rarely better."""
    if strategy == "single":
        return singles(task, price)
    if strategy == "pipeline":
        try:
            return ranked_pipelines(task, price, is_over)
        except OutOfMemory as error:
            return recomputed_pipelines(task, price, error)
    if strategy == "sites":
        return ranked_sites(task, price)
    if strategy == "mixed":
        return ranked_mixed(task, price)
    if strategy in _registered:
        return _proposed(strategy, task, price)
    makers: dict[str, Callable[[Task], Plan]] = {"samples": samples, "tiles": partial(fewer_tiles, price=price)}
    return [fitting(strategy, makers[strategy], task, price)]


def _proposed(strategy: str, task: Task, price: Price) -> list[PlanCandidate]:
    """Return the plans of a registered strategy, simulated, the best first; raise the first refusal where none fits."""
    candidates: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    for proposal in _registered[strategy](task):
        try:
            plan = resolve(proposal, task.network, task.cluster)
            candidates.append(PlanCandidate(strategy, plan, price(plan)))
        except ManyhandsError as error:
            refusal = refusal or error
    if not candidates:
        raise refusal or BadPlan(f"Strategy '{strategy}' proposes no plan of {task.network.name} for this cluster.")
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def pipeline(task: Task, price: Price) -> Plan:
    """Return the fastest, as simulated, of the planner's best pipelines and the baselines'."""
    best = ranked_pipelines(task, price)[0].plan
    assert best is not None
    return best


def ranked_pipelines(task: Task, price: Price, is_over: Callable[[], bool] = lambda: False) -> list[PlanCandidate]:
    """Return the planner's best pipelines and the baselines', simulated: the best of each shape, the fastest first.
    Once `is_over`, only the few that are predicted to be the fastest are simulated, and no baselines tried."""
    like = Batch(
        1, 1, task.optimizer_slots, is_synchronised=task.batch_norm == "synchronised", warm_up=task.warm_up
    )  # fmt: skip
    planned = pipelines(
        task.network, task.cluster, task.profile, task.batch_size, micro_batches=task.micro_batches, like=like,
        may_be_alone=False,
    )  # fmt: skip
    most = MOST_SIMULATED if lines(task) <= MOST_LINES else FEW_SIMULATED
    plans = [pipeline.plan(task.network) for pipeline in planned[:most]]
    for make in SYNCHRONOUS.values() if lines(task) <= MOST_LINES else ():
        if is_over():
            break
        try:
            plans.append(make(task, price))
        except ManyhandsError:
            continue  # a baseline that cannot run is no candidate
    best: dict[tuple[object, ...], PlanCandidate] = {}
    refusal: ManyhandsError | None = None
    for number, plan in enumerate(plans):
        if number >= FEW_SIMULATED and best and is_over():
            break
        try:
            plan = resolve(plan, task.network, task.cluster)
            if len(plan.devices) == 1:
                continue  # a baseline's that leaves out all others: that is strategy 'single'
            seconds = quick_price(price)(plan)
        except ManyhandsError as error:
            refusal = error
            continue
        shape = (plan.order, plan.micro_batches, *(frozenset(stage.devices) for stage in plan.stages))
        if shape not in best or seconds < best[shape].seconds:
            best[shape] = PlanCandidate("pipeline", plan, seconds)
    ranked: list[PlanCandidate] = []
    for candidate in sorted(best.values(), key=lambda candidate: candidate.seconds)[:MOST_WHOLE]:
        assert candidate.plan is not None
        try:
            ranked.append(replace(candidate, seconds=price(candidate.plan)))
        except ManyhandsError as error:
            refusal = error
    if not ranked:
        raise refusal or BadPlan(f"A pipeline of {task.network.name} needs two devices or more.")
    ranked.sort(key=lambda candidate: candidate.seconds)
    return [_running_ahead(task, ranked[0], price), *ranked[1:]]


def lines(task: Task) -> int:
    """Return how many stages of any layers on any run of devices there are."""
    layers, devices = len(task.network.layers), len(task.cluster.devices)
    return layers * (layers + 1) // 2 * (devices * (devices + 1) // 2)


def _running_ahead(task: Task, best: PlanCandidate, price: Price) -> PlanCandidate:
    """Return the plan with more forward passes before the first backward, where memory allows that and it is faster."""
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
            best = PlanCandidate(best.name, other, seconds)
    return best


def ranked_mixed(task: Task, price: Price) -> list[PlanCandidate]:
    """Return plans outside the corners, simulated, the best first; the groups of the best few's tiles are chosen
    too."""
    ranked: list[PlanCandidate] = []
    refusal: ManyhandsError | None = None
    is_large = lines(task) > MOST_LINES
    plans = mixed_plans(task)
    for plan in [*plans[:2], *plans[2:][-2:]] if is_large else plans:  # of both searches
        try:
            plan = resolve(plan, task.network, task.cluster)
            ranked.append(PlanCandidate("mixed", plan, quick_price(price)(plan)))
        except ManyhandsError as error:
            refusal = refusal or error
    ranked.sort(key=lambda candidate: candidate.seconds)
    candidates: list[PlanCandidate] = []
    for candidate in ranked:
        if len(candidates) == (1 if is_large else MOST_MIXED) or (
            candidates and candidate.seconds > WORTH * ranked[0].seconds
        ):
            break
        try:
            candidates.append(
                _finished(candidate if is_large else refined(candidate, task, quick_price(price)), task, price)
            )
        except ManyhandsError as error:
            refusal = refusal or error
    if not candidates:
        raise refusal or BadPlan(
            f"There is no mixed plan of {task.network.name} for cluster {task.cluster.name} with batches of "
            f"{task.batch_size}: it takes two devices, and layers that can be shared in two ways.",
            hint="Leave the choice to strategy 'auto' (--share auto).",
        )
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _finished(candidate: PlanCandidate, task: Task, price: Price) -> PlanCandidate:
    """Return the plan with the best exchanges of boundary data in each of its tiled stages, priced whole."""
    plan = candidate.plan
    assert plan is not None
    seconds = price(plan)
    for number, stage in enumerate(plan.stages):
        if isinstance(stage.share, ByTiles) and len(stage.devices) > 1:
            grouped, _ = with_best_groups(shortened(plan, FEW[0]), number, task, price)
            regrouped = msgspec.structs.replace(plan, stages=grouped.stages)
            if price(regrouped) < seconds:
                plan, seconds = regrouped, price(regrouped)
    return PlanCandidate(candidate.name, plan, seconds)


def fewer_tiles(task: Task, price: Price) -> Plan:
    """Return tiles on all devices, or on the fastest few where that is better and can be tried."""
    if task.tiles.grid is not None or lines(task) > MOST_LINES:
        return tiles(task, price)
    names = sorted(task.cluster.names, key=lambda name: task.step_seconds(name, task.batch_size))
    best: tuple[float, Plan] | None = None
    refusal: ManyhandsError | None = None
    for count in promising_tiles(task, names):
        subtask = task if count == len(names) else replace(task, cluster=subcluster(task.cluster, names[:count]))
        try:
            plan = tiles(subtask, price)
            seconds = price(plan)
        except ManyhandsError as error:
            refusal = refusal or error
            continue
        if best is None or seconds < best[0]:
            best = (seconds, plan)
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def choose(
    task: Task, price: Price, *, corners_only: bool = False, is_over: Callable[[], bool] = lambda: False
) -> list[PlanCandidate]:
    """Price every candidate. Return the best first, and last those that cannot run, with the reason. Once there is a
    plan, the strategies that are not QUICK, and the baselines' pipelines, are begun only until `is_over`."""
    if not corners_only:
        load_extensions()
    best: dict[str, PlanCandidate] = {}
    every = _every_plan(task, price, corners_only, is_over)
    for candidate in sorted(every, key=lambda candidate: candidate.seconds):
        best.setdefault(candidate.name, candidate)
    return list(best.values())


def _every_plan(
    task: Task, price: Price, corners_only: bool = False, is_over: Callable[[], bool] = lambda: False
) -> list[PlanCandidate]:
    """Return every strategy's plans, on every cluster that is tried."""
    candidates: list[PlanCandidate] = []
    for subtask in _places(task, candidates):
        try:
            candidates += _all(subtask, price, corners_only, is_over)
        except ManyhandsError:
            continue
    return candidates


def _places(task: Task, candidates: list[PlanCandidate]) -> Iterator[Task]:
    """Yield the task on each cluster that is tried: the cluster as it is; with objective memory, with ever less memory
    as long as there are `candidates`; with objective energy, with fewer devices, the thriftiest of them."""
    yield task
    if task.best == "memory":
        least = inf
        while candidates and min(candidate.seconds for candidate in candidates) < LESS_MEMORY * least:
            least = min(candidate.seconds for candidate in candidates)
            budget = int(LESS_MEMORY * least)
            devices = tuple(
                msgspec.structs.replace(device, memory_bytes=min(budget, device.memory_bytes))
                for device in task.cluster.devices
            )
            yield replace(task, cluster=msgspec.structs.replace(task.cluster, devices=devices))
    elif task.best == "energy":
        watts = {device.name: device.watts_active for device in task.cluster.devices}
        names = sorted(watts, key=lambda name: watts[name] * task.step_seconds(name, task.batch_size))
        for count in sizes(len(names))[:-1]:
            yield replace(task, cluster=subcluster(task.cluster, names[:count]))


def _all(task: Task, price: Price, corners_only: bool, is_over: Callable[[], bool]) -> list[PlanCandidate]:
    """Return every strategy's best plan, or the reason why it has none; of mixed plans the best few."""
    candidates = []
    for name, device in kinds(task):
        try:
            candidates.append(fitting(name, partial(single, device=device), task, price))
        except ManyhandsError as error:
            candidates.append(PlanCandidate(name, None, inf, error.message, error.hint))
    if len(task.cluster.devices) == 1:
        return candidates
    searches = [*CORNERS[1:], *([] if corners_only else ["mixed"])]
    if task.cluster.sites:  # with very many devices the others would take hours
        searches = ["sites", *(searches if len(task.cluster.devices) <= MOST_SEARCHED else [])]
    for strategy in [*searches, *([] if corners_only else _registered)]:
        if strategy not in QUICK and any(candidate.plan is not None for candidate in candidates) and is_over():
            break
        try:
            ranked = _named(strategy, task, price, is_over)
        except ManyhandsError as error:
            candidates.append(PlanCandidate(strategy, None, inf, error.message, error.hint))
            continue
        if strategy == "mixed":
            candidates += [
                replace(candidate, name=f"mixed {n}" if n > 1 else "mixed") for n, candidate in enumerate(ranked, 1)
            ]
        else:
            candidates.append(ranked[0])
    return candidates

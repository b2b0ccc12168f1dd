"""Explains a plan: what limits it, why other plans lost, and what more hardware would give.

All seconds are simulated. A claim that something limits the plan has been tried: the same plan is simulated with that
part twice as fast; for memory, the task is planned again with twice the memory where it is full. What-ifs are planned
again too.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.explaining import what_if
from manyhands.explaining.bottleneck import Limit, checked, limits_of, percent
from manyhands.explaining.explanation import Explanation, RunnerUp, WhatIf
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.facts.units import format_bytes, format_seconds
from manyhands.planner.strategies import CORNERS
from manyhands.planner.task import PlanCandidate
from manyhands.plans.inference import plan_to_show, sample_seconds
from manyhands.plans.planned import Planned
from manyhands.plans.planning import plan
from manyhands.plans.simulating import cluster_of, network_of
from manyhands.plans.simulating import simulate as simulate_plan
from manyhands.simulator.result import Simulation

MOST_SECONDS = 10.0
"""Processor seconds: planning again is not started if all of it would take longer than this."""
QUICK_SECONDS, LONG_SECONDS = 2.0, 20.0
"""A task that took longer to plan is planned again only by the strategy that came first, or not at all."""
NEARLY_FULL, HALF_FULL = 0.9, 0.5
"""Fractions of a memory. Where half is used, micro-batches of twice the size may not fit, which is checked if that is
quick."""
ALSO = 0.25
"""A second part of another plan's step that is worth naming."""
TEN_TIMES = 10.0
SAME = 1.02
MEMORY_FIRST = 1.05
"""Full memory is named before what the devices spend their time on, if a plan with more memory is that much faster."""


def faster_text(times: float) -> str:
    """Return '1.3 times as fast', or 'about the same' within noise."""
    return f"{times:.3g} times as fast" if times >= SAME else "about the same"


def explain(
    planned: Planned,
    network: Network | str,
    cluster: Cluster | str | Path,
    profile: Profile | None = None,
    *,
    with_what_if: bool | None = None,
    planning_seconds: float = 0.0,
    **options: Any,
) -> Explanation:
    """Explain `planned`. `options` are the other arguments that `plan` was given (strategy, micro_batches, best ...),
    so that other clusters can be planned with them.

    `with_what_if`: False leaves out whatever must be planned again; None does what takes a few seconds, if need be by
    the strategy that came first here only; True does all of it. `planning_seconds`: what one planning took of the
    processor.
    """
    network, cluster = network_of(network), cluster_of(cluster)
    profile = profile or estimate_cluster(network, cluster)
    return _Explainer(planned, network, cluster, profile, with_what_if, planning_seconds, options).explanation()


class _Explainer:
    def __init__(
        self, planned: Planned, network: Network, cluster: Cluster, profile: Profile, with_what_if: bool | None,
        planning_seconds: float, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.planned, self.network, self.cluster, self.profile = planned, network, cluster, profile
        self.asked = {"batch_size": planned.plan.batch_size, "best": planned.best, **options}
        self.best = planned.best
        if planned.objective is not None:
            self.asked["objective"] = planned.objective
            del self.asked["batch_size"], self.asked["best"]
        self.skipped: list[str] = []
        self._allowed = with_what_if
        self._planning, self._spent, self._last = planning_seconds, 0.0, 0.0
        self.searched = self._searches()

    @property
    def _what(self) -> str:
        """The name of what the seconds measure: a step, a stream or an answer."""
        return "step" if self.planned.objective is None else "stream" if self._is_stream else "answer"

    @property
    def _is_stream(self) -> bool:
        return self.planned.objective == "throughput"

    def explanation(self) -> Explanation:
        result = self._simulated(self.planned.plan)
        limits = limits_of(result, self._timed(self.planned.plan), self.network, self.cluster, self._what)
        limits = checked(limits, result, self._timed(self.planned.plan), self.network, self.cluster, self.profile)
        seconds, score = self._worth(self.planned, self.cluster, self.profile)
        full = self._full(result, seconds)
        changes = self._what_ifs(seconds, score)
        return Explanation(
            seconds=seconds,
            binding=self._binding(result, limits, full),
            limits=tuple(limits),
            runners_up=tuple(self._runners_up(limits)),
            what_if=tuple(changes),
            searched=self.searched,
            skipped=tuple(self.skipped),
            full=tuple(full),
        )

    # ---- What limits it

    def _binding(self, result: Simulation, limits: list[Limit], full: list[Limit]) -> Limit | None:
        if self.best == "memory":
            return _fullest(result)
        if self.best == "energy" and result.joules:
            return _hungriest(result)
        helping = [limit for limit in full if limit.part >= NEARLY_FULL and (limit.speed_up or 0.0) >= MEMORY_FIRST]
        return next(iter([*helping, *limits]), None)

    def _full(self, result: Simulation, seconds: float) -> list[Limit]:
        """Return the devices that are nearly full. Planning again with twice the memory there shows whether memory
        limits the speed."""
        parts = {name: device.peak_bytes / device.memory_bytes for name, device in result.devices.items()}
        enough = HALF_FULL if self._allowed or self._planning <= QUICK_SECONDS else NEARLY_FULL
        names = tuple(name for name in parts if parts[name] >= max(enough, 0.9 * max(parts.values())))
        refused = [
            candidate.name
            for candidate in self.planned.candidates
            if candidate.plan is None and "memory" in candidate.reason
        ]
        if names:
            first = max(names, key=lambda name: parts[name])
            fullest = result.devices[first]
            is_full = parts[first] >= NEARLY_FULL
            others = f", {len(names) - 1} other{'s' * (len(names) > 2)} nearly so" if len(names) > 1 else ""
            held = f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)}{others}"
            text = f"{first} is full: {held}" if is_full else f"larger parts do not fit: {first} holds {held}"
            limit = Limit("memory", parts[first], text, devices=names, bytes=fullest.peak_bytes)
            relaxed = f"twice the memory on {' and '.join(names) if len(names) <= 3 else f'{len(names)} devices'}"
        elif refused:
            names = self.cluster.names
            text = f"memory rules out {' and '.join(refused)}"
            limit = Limit("memory", max(parts.values()), text, devices=names)
            relaxed = "twice the memory on all devices"
        else:
            return []
        again = self._planned_again(what_if.with_memory(self.cluster, names, 2.0), self.profile, relaxed, is_first=True)
        if again is None:
            return [limit] if limit.part >= NEARLY_FULL else []
        times = _ratio(seconds, again[0][0])
        if limit.part < NEARLY_FULL and times < SAME:
            return []
        return [replace(limit, relaxed=relaxed, relaxed_seconds=again[0][0], speed_up=times)]

    # ---- Why others lost

    def _runners_up(self, limits: list[Limit]) -> list[RunnerUp]:
        ranked, began = self.planned.candidates, time.process_time()
        runners_up = []
        for candidate in ranked[1:]:
            if candidate.plan is not None and time.process_time() - began > MOST_SECONDS:  # very many devices
                times = _ratio(_score(candidate), _score(ranked[0]))
                runners_up.append(
                    RunnerUp(candidate.name, candidate.seconds, times, "not looked into: simulating it takes long")
                )
            else:
                runners_up.append(self._runner_up(candidate, ranked[0], limits))
        return runners_up

    def _runner_up(self, candidate: PlanCandidate, best: PlanCandidate, chosen: list[Limit]) -> RunnerUp:
        """Explain a runner-up by where it spends more than the chosen plan."""
        if candidate.plan is None:
            return RunnerUp(candidate.name, None, None, candidate.reason.split("\n")[0])
        timed = self._timed(candidate.plan)
        result = self._simulated(candidate.plan)
        limits = limits_of(result, timed, self.network, self.cluster, self._what)
        if self.best in ("memory", "energy"):
            reason = (_fullest if self.best == "memory" or not result.joules else _hungriest)(result).text
        else:
            reason = self._where_it_loses(limits, chosen, timed)
        return RunnerUp(
            candidate.name, candidate.seconds, _ratio(_score(candidate), _score(best)), reason, tuple(limits[:3])
        )

    def _where_it_loses(self, limits: list[Limit], chosen: list[Limit], timed: Plan) -> str:
        own_limits, chosen_limits = _by_use(limits), _by_use(chosen)
        lost = sorted(((sum(m.seconds for m in limits_of_use) - sum(m.seconds for m in chosen_limits.get(use, ())), use)
                       for use, limits_of_use in own_limits.items()), reverse=True)  # fmt: skip
        losses = []
        for more, use in lost[:2]:
            if more <= 0 or more < ALSO * lost[0][0]:
                break
            limits_of_use, old = own_limits[use], sum(limit.seconds for limit in chosen_limits.get(use, ()))
            subject = f"{timed.devices[0]} computes alone" if len(timed.devices) == 1 else limits_of_use[0].subject
            losses.append(
                f"{subject}: {format_seconds(sum(limit.seconds for limit in limits_of_use))}"
                + (f" in place of {format_seconds(old)}" if old else "")
            )  # fmt: skip
        return "; ".join(losses) or limits[0].text

    # ---- Other clusters

    def _what_ifs(self, seconds: float, score: float) -> list[WhatIf]:
        network_changes: list[WhatIf] = []
        if len(self.cluster.devices) > 1:
            faster = what_if.with_network(self.cluster, rate=TEN_TIMES)
            network_changes += self._what_if(
                "links and ports ten times as fast", faster, self.profile, seconds, score, is_first=True
            )
        grown: list[WhatIf] = []
        for number, like in enumerate(what_if.kinds(self.cluster)):
            cluster, profile = what_if.one_more(self.cluster, self.profile, like)
            change = f"one more {_called(like.kind, like.name)}"
            grown += self._what_if(change, cluster, profile, seconds, score, is_first=number == 0)
        return [*sorted(grown, key=lambda change: change.score), *network_changes]

    def _what_if(
        self, change: str, cluster: Cluster, profile: Profile, seconds: float, score: float, *, is_first: bool
    ) -> list[WhatIf]:
        again = self._planned_again(cluster, profile, change, is_first=is_first)
        if again is None:
            return []
        (new_seconds, new_score), plan = again
        return [
            WhatIf(
                change, new_seconds, _ratio(seconds, new_seconds), new_score, _ratio(score, new_score), plan,
                is_device=len(cluster.devices) > len(self.cluster.devices),
            )
        ]  # fmt: skip

    def _planned_again(
        self, cluster: Cluster, profile: Profile, change: str, *, is_first: bool
    ) -> tuple[tuple[float, float], Plan] | None:
        """Return the best of the new plans and the old one on another cluster, or None if there is no time for it. The
        first change of each sort has time unless planning alone takes long."""
        if self._allowed is False:
            return None
        expected = self._spent if is_first else self._spent + self._last
        if self._allowed is None and (self._planning > LONG_SECONDS or expected > MOST_SECONDS):
            self.skipped.append(change)
            return None
        began = time.process_time()
        plans = [(self._worth(replace(self.planned, candidates=[]), cluster, profile), self.planned.plan)]
        for strategy in self.searched:
            with suppress(ManyhandsError):  # there is no such plan; the old one still runs there
                planned = plan(self.network, cluster, profile=profile, **{**self.asked, "strategy": strategy})
                plans.append((self._worth(planned, cluster, profile), planned.plan))
        self._last = time.process_time() - began
        self._spent += self._last
        return min(plans, key=lambda entry: entry[0][1])

    def _searches(self) -> tuple[str, ...]:
        """Return the strategies to plan with again: those asked for, or where that takes long, the one that came first;
        and pipelines, which are found quickly."""
        strategy = str(self.asked.get("strategy", "auto"))
        if strategy != "auto" or self._allowed or self._planning <= QUICK_SECONDS:
            return (strategy,)
        names = (*CORNERS, "mixed", "channels")
        ran = [
            word
            for candidate in self.planned.candidates
            if candidate.plan
            for word in candidate.name.split()
            if word in names
        ]
        shared = [name for name in ran if name != "single"]
        return tuple(dict.fromkeys([*ran[:1], *shared[:1], "pipeline"]))

    # ---- Simulations

    def _worth(self, planned: Planned, cluster: Cluster, profile: Profile) -> tuple[float, float]:
        """Return the seconds of a plan, and what plans are compared by."""
        if planned.candidates:
            return planned.candidates[0].seconds, _score(planned.candidates[0])
        if planned.objective is not None:
            seconds = sample_seconds(planned.plan, self.network, cluster, profile, planned.objective)
            return seconds, seconds
        result = simulate_plan(planned.plan, self.network, cluster, profile, keep_spans=False)
        if self.best == "memory":
            return result.seconds, max(device.peak_bytes for device in result.devices.values())
        return result.seconds, result.joules_per_sample if self.best == "energy" else result.seconds

    def _timed(self, plan: Plan) -> Plan:
        """Return the plan to simulate: a step; for inference one answer alone, or a stream."""
        if self.planned.objective is None:
            return plan
        return plan_to_show(plan, self.planned.objective)

    def _simulated(self, plan: Plan) -> Simulation:
        return simulate_plan(self._timed(plan), self.network, self.cluster, self.profile)


def _score(candidate: PlanCandidate) -> float:
    """Return what a candidate was ranked by: seconds, unless there is another objective."""
    return candidate.seconds if candidate.score is None else candidate.score


def _by_use(limits: list[Limit]) -> dict[str, list[Limit]]:
    """Group limits: computing of all stages together, transfers by their use, delays; the largest part first."""
    by_use: dict[str, list[Limit]] = {}
    for limit in limits:
        by_use.setdefault(limit.use or limit.kind, []).append(limit)
    return by_use


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("inf")


def _called(kind: str, name: str) -> str:
    """Return a readable kind: the catalogue's name, or 'device like laptop'."""
    return f"device like {name}" if kind in ("custom", "local") else kind


def _fullest(result: Simulation) -> Limit:
    fullest = max(result.devices.values(), key=lambda device: device.peak_bytes)
    part = fullest.peak_bytes / fullest.memory_bytes
    text = f"{fullest.device} holds most: {format_bytes(fullest.peak_bytes)}, {percent(part)} of its memory"
    return Limit("memory", part, text, devices=(fullest.device,), bytes=fullest.peak_bytes)


def _hungriest(result: Simulation) -> Limit:
    hungriest = max(result.devices.values(), key=lambda device: device.joules)
    part = hungriest.joules / result.joules
    busy = format_seconds(hungriest.busy_seconds)
    text = (
        f"{hungriest.device} uses {percent(part)} of the energy: {hungriest.joules:.3g} of {result.joules:.3g} J, "
        f"computing {busy}"
    )
    return Limit("energy", part, text, devices=(hungriest.device,), seconds=hungriest.busy_seconds)

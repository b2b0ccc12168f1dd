"""Drawn scenarios, simulated: the plans of `auto` beside the best plan of every corner of the plan space.

Times are estimated from the device catalogue and simulated: only the seconds of planning are measured here.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from manyhands.facts.errors import ManyhandsError
from manyhands.facts.plan import Plan
from manyhands.facts.profile import estimate_cluster
from manyhands.planner.mixed import is_mixed
from manyhands.planner.strategies import CORNERS
from manyhands.plans import planning as public
from manyhands.plans.networks import load_network
from manyhands.plans.planned import Planned
from manyhands.plans.simulating import simulate
from manyhands.runtime.processes import end_with
from manyhands.schedule.tileable import tileable_layers
from manyhands_bench.auto.scenarios import SEED, PlanningScenario
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE

BEATS = 1.001
"""A plan beats another if it is this many times as fast: less is rounding."""
CLEARLY = 1.1


@dataclass(frozen=True)
class ScenarioResult:
    """The results for a scenario: seconds of a step, infinite if nothing fits."""

    number: int
    text: str
    corners: dict[str, float]
    seconds: float
    mixed: bool
    """Whether auto's plan belongs to no corner."""
    stages: str
    corner_plan_seconds: float
    plan_seconds: float
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def best_corner(self) -> str:
        return min(self.corners, key=self.corners.__getitem__)

    @property
    def corner_seconds(self) -> float:
        return self.corners[self.best_corner]

    @property
    def fits(self) -> bool:
        return math.isfinite(self.seconds)

    @property
    def only_mixed_fits(self) -> bool:
        return self.fits and not math.isfinite(self.corner_seconds)

    @property
    def gain(self) -> float:
        """The seconds of the best corner over auto's; only if a corner fits."""
        return self.corner_seconds / self.seconds

    @property
    def mixed_wins(self) -> bool:
        return self.mixed and (self.only_mixed_fits or self.gain > BEATS)


def answered(scenario: PlanningScenario) -> ScenarioResult:
    """Plan a scenario with `auto` and with each corner separately."""
    network = load_network(scenario.model, scenario.shape)
    cluster, profile = scenario.cluster, estimate_cluster(network, scenario.cluster)
    corners: dict[str, float] = {}
    reasons: dict[str, str] = {}

    def seconds_of(strategy: str) -> tuple[float, Planned | None]:
        try:
            planned = public.plan(network, cluster, batch_size=scenario.batch_size, strategy=strategy, profile=profile)
            result = simulate(planned.plan, network, cluster, profile, keep_spans=False, within_memory=True)
        except ManyhandsError as error:
            reasons[strategy] = error.message
            return math.inf, None
        return result.seconds, planned

    begin = time.perf_counter()
    seconds, planned = seconds_of("auto")
    between = time.perf_counter()
    for corner in CORNERS:
        simulated = (
            [candidate.seconds for candidate in planned.candidates if candidate.name.startswith(corner)]
            if planned is not None
            else []
        )
        # what auto planned by the very same call need not be planned twice
        corners[corner] = min(simulated) if simulated and corner in ("single", "pipeline") else seconds_of(corner)[0]
    end = time.perf_counter()
    mixed = planned is not None and is_mixed(planned.plan, tileable_layers(network)[0])
    return ScenarioResult(
        scenario.number, str(scenario), corners, seconds, mixed,
        stages_text(planned.plan) if planned is not None else "", end - between, between - begin, reasons,
    )  # fmt: skip


def stages_text(plan: Plan) -> str:
    """Return each stage's share and its number of devices: 'tiles x4 | single x1'."""
    named = {"BySamples": "samples", "ByTiles": "tiles", "Single": "single", "ByChannels": "channels"}
    return " | ".join(f"{named[type(stage.share).__name__]} x{len(stage.devices)}" for stage in plan.stages)


def bench_simulated(
    scenarios: Sequence[PlanningScenario], say: Progress, at_once: int | None = None
) -> tuple[Figures, list[ScenarioResult]]:
    """Plan and simulate all scenarios, as many at a time as there are cores."""
    for model, shape in dict.fromkeys((scenario.model, scenario.shape) for scenario in scenarios):
        say(f"network {model} {'x'.join(map(str, shape))}")
        load_network(model, shape)  # captured once, kept for all
    begin = time.perf_counter()
    results: list[ScenarioResult] = []
    for answer in _each(answered, scenarios, at_once or len(os.sched_getaffinity(0))):
        results.append(answer)
        say(f"simulated scenarios, {len(results)} of {len(scenarios)}")
    results.sort(key=lambda result: result.number)
    return figures_of(results, time.perf_counter() - begin), results


def _each(
    act: Callable[[PlanningScenario], ScenarioResult], scenarios: Sequence[PlanningScenario], at_once: int
) -> Iterator[ScenarioResult]:
    if at_once < 2 or len(scenarios) < 2:
        yield from map(act, scenarios)
        return
    with ProcessPoolExecutor(at_once, get_context("spawn"), initializer=end_with, initargs=(os.getpid(),)) as pool:
        for future in as_completed([pool.submit(act, scenario) for scenario in scenarios]):
            yield future.result()


def geometric_mean(numbers: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, numbers))) if numbers else 1.0


def figures_of(results: Sequence[ScenarioResult], seconds: float) -> Figures:
    fitting = [result for result in results if result.fits]
    compared = [result for result in fitting if not result.only_mixed_fits]
    gains = [result.gain for result in compared]
    mixed = [result for result in fitting if result.mixed_wins]
    clear = [result for result in mixed if result.only_mixed_fits or result.gain > CLEARLY]
    winners = Counter(_winner(result) for result in fitting)
    return {
        "count": len(results),
        "mixed_share": len(mixed) / len(fitting) if fitting else 0.0,
        "gain_geomean": geometric_mean(gains),
        "gain_geomean_mixed": geometric_mean([result.gain for result in mixed if not result.only_mixed_fits]),
        "gain_min": min(gains, default=1.0),
        "gain_max": max(gains, default=1.0),
        "mixed_share_by_a_tenth": len(clear) / len(fitting) if fitting else 0.0,
        "count_compared": len(compared),
        "count_nothing_fits": len(results) - len(fitting),
        "count_only_mixed_fits": sum(result.only_mixed_fits for result in fitting),
        **{f"wins_{name}": winners[name] for name in (*CORNERS, "mixed", "other")},
        "scenario_seconds": seconds / max(1, len(results)),
        "scenario_plan_seconds": statistics.median(result.plan_seconds for result in results) if results else 0.0,
        "scenario_plan_seconds_most": max((result.plan_seconds for result in results), default=0.0),
        PROFILE_MACHINE: ESTIMATED,
        "simulated_setting": f"{len(results)} scenarios drawn with seed {SEED}; times estimated from the device "
        "catalogue and simulated, nothing measured; gain: seconds of a step of the best corner (single, samples, "
        "pipeline, tiles, each planned by itself) over those of auto's plan; a mixed plan wins where it is at least "
        f"{BEATS:g} times as fast as every corner, or fits where none does; shares are of scenarios where a plan fits",
        "scenarios": "\n  " + "\n  ".join(map(line, results)),
    }


def _winner(answer: ScenarioResult) -> str:
    """Return 'mixed', or the corner that auto is no faster than, or 'other'."""
    if answer.mixed_wins:
        return "mixed"
    return answer.best_corner if not answer.only_mixed_fits and answer.gain <= BEATS else "other"


def line(answer: ScenarioResult) -> str:
    """Return one scenario's results as a line of text."""
    if not answer.fits:
        return f"{answer.number}. {answer.text}: nothing fits"
    corners = ", ".join(f"{name} {_seconds(value)}" for name, value in answer.corners.items())
    gain = "only this fits" if answer.only_mixed_fits else f"gain {answer.gain:.3f}"
    return f"{answer.number}. {answer.text}: {corners}; auto {_seconds(answer.seconds)} ({answer.stages}), {gain}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if math.isfinite(seconds) else "does not fit"

"""The seconds that the executor adds to bare computing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from manyhands.facts.errors import BadValue
from manyhands.facts.plan import Plan
from manyhands.schedule.orders import passes
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.measured import QUICK, SETTING, listed, two_cores
from manyhands_bench.pipeline.ours import plan_text
from manyhands_bench.pipeline.torch_setting import BareRound
from manyhands_bench.pipeline.torch_tuning import splits


def critical_path(plan: Plan, stages: Sequence[BareRound]) -> float:
    """Return the seconds of a round in the plan's order if nothing had to be sent."""
    orders = [list(passes(plan, stage)) for stage in range(len(stages))]
    ended: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * len(stages)
    while any(orders):
        before = len(ended)
        for stage, order in enumerate(orders):
            while order:
                direction, micro_batch = order[0]
                source = stage - 1 if direction == "forward" else stage + 1
                ready = ended.get((source, direction, micro_batch)) if 0 <= source < len(stages) else 0.0
                if ready is None:
                    break
                begin = max(clocks[stage], ready)
                seconds = stages[stage].forward if direction == "forward" else stages[stage].backward
                clocks[stage] = ended[stage, direction, micro_batch] = begin + seconds[micro_batch]
                order.pop(0)
        assert len(ended) > before, "an order in which every stage waits"
    return max(clock + stage.step for clock, stage in zip(clocks, stages, strict=True))


def executor_overhead(say: Progress, quick: bool) -> Figures:
    """Measure a round of two stages on two cores over the critical path of their bare computing, found in the same run.

    Both are medians of several rounds, each with whatever held it up.
    """
    setting, blocks, steps, seconds = (QUICK, 1, 3, 0.3) if quick else (SETTING, 11, 5, 1.2)
    micro_batch = setting.samples // setting.micro_batches
    with two_cores(setting) as (ours, group):
        units = group.units(micro_batch)
        if len(units) != len(ours.graph.network.layers):
            raise BadValue(f"{setting}: PyTorch's units are not our layers, so their stages cannot be compared.")
        bounds = splits(units, (1.0, 1.0), float("inf"), 1)[0]
        plan = ours.two_stages(bounds[1])
        rounds, paths = [], []
        bare: list[list[BareRound]] = [[] for _ in plan.stages]
        for block in range(blocks):
            say(f"executor overhead, block {block + 1} of {blocks}")
            rounds.append(ours.seconds(plan, steps))
            bare_rounds = group.bare(bounds, micro_batch, seconds)
            paths.append(statistics.median(critical_path(plan, by_stage) for by_stage in zip(*bare_rounds)))
            for rounds_of_stage, new in zip(bare, bare_rounds, strict=True):
                rounds_of_stage += new
    stages = "; ".join(
        f"stage {number}: forward {_usual(seconds for bare_round in stage for seconds in bare_round.forward)}, "
        f"backward {_usual(seconds for bare_round in stage for seconds in bare_round.backward)} a micro-batch, "
        f"optimiser {_usual(bare_round.step for bare_round in stage)}"
        for number, stage in enumerate(bare)
    )
    return {
        "executor_overhead": statistics.median(
            rounds_of_stage / path for rounds_of_stage, path in zip(rounds, paths, strict=True)
        ),
        "executor_round_seconds": statistics.median(rounds),
        "executor_bare_seconds": statistics.median(paths),
        "executor_setting": f"{setting}, {plan_text(plan)}, a core each; {stages}; rounds {listed(rounds)} s, bare "
        f"{listed(paths)} s",
    }


def _usual(seconds: Iterable[float]) -> str:
    """Return the median as text, in milliseconds."""
    return f"{1e3 * statistics.median(seconds):.3g} ms"

"""Figures of `manyhands bench auto`: the gains of one planner over tiles, samples and stages beside its corners.

simulated      drawn scenarios: auto beside every corner, by the device catalogue and the simulator
scale          seconds of planning and simulating as networks and clusters grow
lab            mixed plans beside the best corner, trained in the lab
segmentation   a U-Net at 1024x1024 on four devices of 1.5 GB, and on one of them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands_bench.auto import lab as bench_auto_lab
from manyhands_bench.auto import memory as bench_auto_memory
from manyhands_bench.auto import scale as bench_auto_scale
from manyhands_bench.auto.plots import Gain, Sides, draw_gains, draw_sides
from manyhands_bench.auto.scenarios import COUNT, SEED, drawn_scenarios
from manyhands_bench.auto.simulated import ScenarioResult, bench_simulated
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import check_asked, measure_parts


@dataclass(frozen=True)
class AutoScope:
    """The amount of measuring."""

    scenarios: int
    scale: bench_auto_scale.ScaleExtent
    lab: bench_auto_lab.AutoLabExtent
    memory: bench_auto_memory.MemoryExtent


DEFAULT = AutoScope(
    COUNT, bench_auto_scale.ScaleExtent(), bench_auto_lab.AutoLabExtent(), bench_auto_memory.MemoryExtent()
)
QUICK = AutoScope(
    6, bench_auto_scale.ScaleExtent(60, (4, 8), each=5),
    bench_auto_lab.AutoLabExtent(bench_auto_lab.TRIALS[:1], blocks=1, steps=3, measure_seconds=3.0),
    bench_auto_memory.MemoryExtent(16, 512, memory_bytes=500_000_000, steps=2, measure_seconds=3.0),
)  # fmt: skip
FULL = AutoScope(
    4 * COUNT, replace(DEFAULT.scale, repeats=3),
    bench_auto_lab.AutoLabExtent(bench_auto_lab.MORE_TRIALS, blocks=5, steps=5, measure_seconds=20.0),
    replace(DEFAULT.memory, steps=6),
)  # fmt: skip


@dataclass
class AutoBench:
    """The parts of the benchmark, by name; each gives figures and may draw a picture."""

    scope: AutoScope
    out: Path | None
    say: Progress

    def simulated(self) -> Figures:
        figures, results = bench_simulated(drawn_scenarios(self.scope.scenarios), self.say)
        if self.out is not None:
            title = f"auto beside the best corner, {len(results)} scenarios drawn with seed {SEED}, simulated"
            draw_gains([_gain(result) for result in results if result.fits], self.out / "gains.png", title)
        return figures

    def scale(self) -> Figures:
        return bench_auto_scale.bench_scale(self.scope.scale, self.say)

    def lab(self) -> Figures:
        figures, comparisons = bench_auto_lab.bench_lab(self.scope.lab, self.say)
        if self.out is not None and comparisons:
            sides = [
                Sides(
                    str(comparison.trial), {name: comparison.measured(name) for name in comparison.blocks},
                    {name: comparison.predicted[name] for name in comparison.blocks},
                )
                for comparison in comparisons
            ]  # fmt: skip
            draw_sides(sides, self.out / "lab.png", "Mixed plans and the best corners, measured in the lab")
        return figures

    def segmentation(self) -> Figures:
        return bench_auto_memory.bench_memory(self.scope.memory, self.say)


def _gain(answer: ScenarioResult) -> Gain:
    kind = "mixed" if answer.mixed_wins else answer.best_corner
    return Gain(answer.text, kind, None if answer.only_mixed_fits else answer.gain)


PARTS: Mapping[str, Callable[[AutoBench], Figures]] = {
    "simulated": AutoBench.simulated, "scale": AutoBench.scale, "lab": AutoBench.lab,
    "segmentation": AutoBench.segmentation,
}  # fmt: skip


def bench_auto(
    *,
    quick: bool = False,
    full: bool = False,
    only: Sequence[str] = (),
    out: Path | None = None,
    on_progress: Progress | None = None,
) -> Figures:
    """Return every figure of `manyhands bench auto`, flat."""
    check_asked(PARTS, only, quick, full)
    say = on_progress or (lambda text: None)
    bench = AutoBench(QUICK if quick else FULL if full else DEFAULT, out, say)
    return measure_parts(PARTS, bench, only=only, quick=quick, out=out, say=say)

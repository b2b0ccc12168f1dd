"""Mixed plans measured against the best corner: real training on devices that this machine plays.

Each trial has a cluster of the catalogue's devices, slower than in real time by the lab's time scale, and a profile
that these devices have measured themselves. All sides are planned and predicted from it, and then take turns, block by
block: the median of the blocks' ratios counts. All corners whose prediction comes near the best are run in the first
block; the fastest of them, as measured, is the corner to beat.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.executor.optimizers import slots
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import LabError, ManyhandsError
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile
from manyhands.lab.removal import missing
from manyhands.planner.strategies import CORNERS
from manyhands.plans import planning as public
from manyhands.session.opening import open_session
from manyhands_bench.auto.simulated import stages_text
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.ours import OPTIMIZER, WARM_UP_STEPS, Ours
from manyhands_bench.pipeline.torch_setting import TorchSetting

MIXED = "mixed"
NEAR = 2.5
"""Corners predicted to take longer than this many times the best are not measured. Less would be unfair: in the lab
tiles have taken twice as long as predicted, while one device alone took as long as predicted."""
MOST_CORNERS = 2


@dataclass(frozen=True)
class LabTask:
    """A network and a batch on devices of the catalogue, all behind ports of one rate."""

    model: str
    shape: tuple[int, ...]
    batch_size: int
    kinds: tuple[str, ...]
    rate_mbit: int

    def __str__(self) -> str:
        counts = {kind: self.kinds.count(kind) for kind in dict.fromkeys(self.kinds)}
        devices = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        shape = "x".join(map(str, self.shape))
        return f"{self.model} {shape} batch {self.batch_size} on {devices}, {self.rate_mbit} Mbit/s"

    def cluster(self, name: str) -> Cluster:
        rate = f"{self.rate_mbit} Mbit/s"
        devices = [{"name": f"d{place}", "kind": kind, "port": rate} for place, kind in enumerate(self.kinds, 1)]
        return Cluster.from_dict({"name": name, "devices": devices, "link": {"rate": rate, "delay": "0.3 ms"}})


TRIALS = (
    LabTask("unet", (3, 128, 128), 1, ("pi5",) * 4, 1000),
    LabTask("yolov2", (3, 416, 416), 1, ("pi5",) * 4, 1000),
    LabTask("resnet18", (3, 448, 448), 1, ("pi5",) * 4, 1000),
)
"""The trials, of one sample each, so that nothing can be shared by samples. Maps are large at one end or at both, and
weights at the other."""
MORE_TRIALS = (
    *TRIALS,
    LabTask("unet", (3, 128, 128), 1, ("pi5", "pi5", "pi4", "pi4"), 1000),
    LabTask("unet", (3, 160, 160), 1, ("pi5",) * 3, 1000),
    LabTask("vgg16", (3, 64, 64), 12, ("pi5",) * 3, 600),
)


@dataclass(frozen=True)
class AutoLabExtent:
    """The amount of measuring."""

    trials: tuple[LabTask, ...] = TRIALS
    blocks: int = 2
    steps: int = 3
    measure_seconds: float = 6.0


@dataclass
class PlanComparison:
    """One trial: the seconds of a step by side, predicted and in every block."""

    trial: LabTask
    scale: float
    stands_in: bool
    plans: dict[str, Plan]
    predicted: dict[str, float]
    blocks: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best_corner(self) -> str:
        """The fastest corner, as measured in the first block."""
        return min((name for name in self.blocks if name != MIXED), key=lambda name: self.blocks[name][0])

    def measured(self, name: str) -> float:
        return statistics.median(self.blocks[name])

    @property
    def gain(self) -> float:
        pairs = zip(self.blocks[self.best_corner], self.blocks[MIXED], strict=True)
        return statistics.median(corner / mixed for corner, mixed in pairs)

    @property
    def predicted_gain(self) -> float:
        return self.predicted[self.best_corner] / self.predicted[MIXED]

    def error(self, name: str) -> float:
        return abs(self.predicted[name] / self.measured(name) - 1)


def bench_lab(extent: AutoLabExtent, say: Progress) -> tuple[Figures, list[PlanComparison]]:
    """Run every trial in a lab of its own; without root, on plain processes behind shaped links."""
    comparisons: list[PlanComparison] = []
    refused: dict[str, str] = {}
    for number, trial in enumerate(extent.trials, 1):
        say(f"lab, {trial}")
        try:
            comparisons.append(_compared(trial, f"auto{os.getpid()}.{number}", extent, say))
        except LabError as error:
            return {"lab_skipped": error.message}, []
        except ManyhandsError as error:  # the other trials are still of use
            refused[f"lab_{number}_failed"] = f"{trial}: {error.message} {error.hint}".strip()
    return figures_of(comparisons) | refused, comparisons


def _compared(trial: LabTask, name: str, extent: AutoLabExtent, say: Progress) -> PlanComparison:
    with open_session(LabCluster(trial.cluster(name)), say=say) as session:
        ours = Ours(session, TorchSetting(trial.model, trial.shape, trial.batch_size, 1))
        say(f"lab, measuring {trial}")
        cluster, profile = ours.measure(extent.measure_seconds)
        plans = _plans(ours, cluster, profile)
        predicted = {name: ours.predicted(plan, cluster, profile) for name, plan in plans.items()}
        sides = worth_measuring(predicted)
        comparison = PlanComparison(
            trial, session.scale or 1.0, session.stands_in, plans, predicted, {side: [] for side in sides}
        )
        for block in range(extent.blocks):
            for side in sides if block == 0 else (MIXED, comparison.best_corner):
                say(f"lab, {trial}: {side}, block {block + 1} of {extent.blocks}")
                comparison.blocks[side].append(ours.seconds(plans[side], extent.steps))
    return comparison


def _plans(ours: Ours, cluster: Cluster, profile: Profile) -> dict[str, Plan]:
    """Return the plan of every corner that fits, and the best mixed plan."""
    plans: dict[str, Plan] = {}
    for strategy in (MIXED, *CORNERS):
        try:
            plans[strategy] = public.plan(
                ours.graph.network, cluster, batch_size=ours.setting.samples, strategy=strategy, profile=profile,
                optimizer_slots=slots(OPTIMIZER),
            ).plan  # fmt: skip
        except ManyhandsError:
            if strategy == MIXED:
                raise
    return plans


def worth_measuring(predicted: Mapping[str, float]) -> list[str]:
    """Return the names of the sides to measure: the mixed plan, and the corners near the best of them."""
    corners = sorted((name for name in predicted if name != MIXED), key=predicted.__getitem__)
    return [MIXED, *(name for name in corners[:MOST_CORNERS] if predicted[name] <= NEAR * predicted[corners[0]])]


def figures_of(comparisons: Sequence[PlanComparison]) -> Figures:
    if not comparisons:
        return {}
    errors = [comparison.error(name) for comparison in comparisons for name in (MIXED, comparison.best_corner)]
    figures: Figures = {
        "lab_gain_min": min(comparison.gain for comparison in comparisons),
        **{f"lab_gain_{number}": comparison.gain for number, comparison in enumerate(comparisons, 1)},
        **{
            f"lab_predicted_gain_{number}": comparison.predicted_gain
            for number, comparison in enumerate(comparisons, 1)
        },
        "lab_prediction_error": statistics.median(errors),
        "lab_prediction_error_worst": max(errors),
        "lab_count": len(comparisons),
        "lab_stands_in": int(any(comparison.stands_in for comparison in comparisons)),
    }
    for number, comparison in enumerate(comparisons, 1):
        figures[f"lab_mixed_seconds_{number}"] = comparison.measured(MIXED)
        figures[f"lab_corner_seconds_{number}"] = comparison.measured(comparison.best_corner)
        figures[f"lab_{number}"] = _text(comparison)
    figures["lab_setting"] = (
        "real training, seconds of a step; gain: best corner over mixed, median of the blocks' ratios, all sides in "
        f"turns in one lab; a block: median of its steps after {WARM_UP_STEPS} that do not count; predicted: simulated "
        "from what these devices measured themselves; SGD with momentum, PyTorch's default kernels"
    )
    if why := missing():
        figures["lab_stand_in"] = (
            f"no lab here ({why}): plain processes behind shaped links, whose speed and memory are this machine's"
        )
    return figures


def _text(comparison: PlanComparison) -> str:
    sides = [
        f"{name} [{stages_text(comparison.plans[name])}] {_listed(row)} s (predicted {comparison.predicted[name]:.4g})"
        for name, row in comparison.blocks.items()
    ]
    others = [
        f"{name} {seconds:.4g}" for name, seconds in comparison.predicted.items() if name not in comparison.blocks
    ]
    beside = f"; predicted only: {', '.join(others)}" if others else ""
    return f"{comparison.trial}, time scale {comparison.scale:g}: {'; '.join(sides)}{beside}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)

"""The effect of running ahead and packing on accuracy, with real pictures: three seeds, and SPLIT Fig. 4 and 6-8.

Trainings are rehearsed in one process (executor/rehearsal.py), which computes what edge and server would and is checked
against them; a gradient is always as late as K allows. All trainings see the same batches of the same pictures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from manyhands.data.order import BatchOrder
from manyhands.data.sets import load
from manyhands.executor.rehearsal import Rehearsal
from manyhands.facts.errors import ManyhandsError
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Codec, Replay, ReplayMode
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.models.registry import build
from manyhands.planner.split_profile import candidate_cuts
from manyhands.profiler.threads import with_threads
from manyhands.split.calibration import CalibrationSet
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.split.plots import Study, draw_lines, draw_studies
from manyhands_bench.split.site import MODE, K
from manyhands_bench.split.weight_changes import weight_change_rates

BATCH = 32
WIDTH = 16
SHAPE = (3, 16, 16)
"""Pictures are scaled down, so that trainings long enough to settle take seconds."""
LEARNING_RATE = 0.01
CUT = 2
SCORED_BATCH = 500
CHANGES_OF = (1, 2, 3, 5, 8, 12)
MODES: dict[str, ReplayMode] = {"window": "window", "grouped": "grouped"}


@dataclass(frozen=True)
class SplitAccuracyExtent:
    """The amount of training."""

    samples: int
    """Pictures to train on."""
    scored: int
    """Pictures to score on."""
    steps: int
    """Steps of a training that counts towards the accuracy figures."""
    seeds: int
    study_steps: int
    """Steps of a training of the studies; 0: no studies."""
    ks: Sequence[int] = (1, 3, 5, 8, 12)
    bits: Sequence[int] = (2, 4, 8, 16)


@dataclass(frozen=True)
class SplitVariant:
    """A way of training: the cut, the lateness of gradients (K) and the packing of features."""

    k: int = 0
    bits: int = 32
    feeds_back: bool = True
    cut: int = CUT
    mode: str = MODE


OTHER_MODE = next(mode for mode in MODES if mode != MODE)
WAYS = {
    "normal": SplitVariant(cut=0),
    "pipeline": SplitVariant(K),
    f"pipeline_{OTHER_MODE}": SplitVariant(K, mode=OTHER_MODE),
    "8bit": SplitVariant(K, 8),
    f"8bit_{OTHER_MODE}": SplitVariant(K, 8, mode=OTHER_MODE),
    "8bit_no_feedback": SplitVariant(K, 8, feeds_back=False),
}


@dataclass
class Trainings:
    """Pictures in memory, and trainings on them. Every seed has its own weights and its own order of pictures."""

    name: str
    train: CalibrationSet
    test: CalibrationSet
    graphs: dict[int, Graph]
    cuts: tuple[int, ...]
    norms: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    """The training loss of the last training: the mean over its last tenth."""

    @classmethod
    def of(cls, path: Path, extent: SplitAccuracyExtent) -> Trainings:
        sets = load(path, input_shape=SHAPE)
        graphs = {seed: _graph(seed, sets.num_classes, sets.input_shape) for seed in range(extent.seeds)}
        train = CalibrationSet.of(graphs[0], sets.train, extent.samples)
        test = CalibrationSet.of(graphs[0], sets.train if sets.test is None else sets.test, extent.scored)
        return cls(sets.name, train, test, graphs, candidate_cuts(graphs[0].network))

    def optimizer(self, steps: int) -> Optimizer:
        return Optimizer("SGD", lr=LEARNING_RATE, momentum=0.9, schedule=("CosineAnnealingLR", {"T_max": steps}))

    def score(self, way: SplitVariant, seed: int, steps: int, *, keeps_norms: bool = False) -> float:
        """Train, and return the accuracy on held-out pictures; 0 if a loss was not finite."""
        order = BatchOrder(self.train.count, BATCH, shuffle=True, seed=seed)
        rehearsal = Rehearsal(
            self.graphs[seed], self.optimizer(steps), way.cut, codec=Codec(way.bits, way.feeds_back),
            replay=Replay(way.k, MODES[way.mode]), seed=seed,
        )  # fmt: skip
        if keeps_norms:
            self.norms = [rehearsal.norm()]
        for step in range(steps):
            loss = rehearsal.train(*self.train.batch(order.indices(step)))
            if not math.isfinite(loss):
                return 0.0
            if keeps_norms:
                self.norms.append(rehearsal.norm())
        rehearsal.drain()
        self.last_loss = statistics.fmean(rehearsal.losses[-max(1, steps // 10) :])
        return rehearsal.score(self.test.batches(SCORED_BATCH)).accuracy or 0.0


def _graph(seed: int, classes: int, shape: tuple[int, ...]) -> Graph:
    torch.manual_seed(seed)
    module = build("tiny", num_classes=classes, channels=shape[0], width=WIDTH)
    return capture(module, torch.zeros(BATCH, *shape), loss=cross_entropy, target=torch.zeros(BATCH, dtype=torch.long))


def bench_accuracy(path: Path, extent: SplitAccuracyExtent, out: Path | None, say: Progress) -> Figures:
    """Compare normal training with pipelines, packed and not, and draw the studies."""
    try:
        trainings = Trainings.of(path, extent)
    except ManyhandsError as error:
        return {"accuracy_skipped": error.message}
    with with_threads(1):  # operators are too small to be shared
        scores: dict[str, list[float]] = {name: [] for name in WAYS}
        losses: dict[str, list[float]] = {name: [] for name in WAYS}
        for seed in range(extent.seeds):
            for name, way in WAYS.items():
                say(f"accuracy, {name}, seed {seed + 1} of {extent.seeds}")
                scores[name].append(trainings.score(way, seed, extent.steps, keeps_norms=name == "normal" and not seed))
                losses[name].append(trainings.last_loss)
        figures = _accuracy_figures(scores, trainings, extent)
        figures |= {f"training_loss_{name}": statistics.mean(by_seed) for name, by_seed in losses.items()}
        if out is not None:
            _draw_changes(trainings.norms, out)
            if extent.study_steps:
                figures |= _studies(trainings, extent, out, say)
    return figures


def _accuracy_figures(scores: dict[str, list[float]], trainings: Trainings, extent: SplitAccuracyExtent) -> Figures:
    mean = {name: statistics.mean(by_seed) for name, by_seed in scores.items()}
    return {
        **{f"accuracy_{name}": value for name, value in mean.items()},
        **{f"accuracy_drop_{name}": mean["normal"] - value for name, value in mean.items() if name != "normal"},
        "accuracy_setting": f"tiny of width {WIDTH} on {trainings.name} (CIFAR-10, JPEG copy, at "
        f"{'x'.join(map(str, SHAPE))}), {trainings.train.count} pictures to train on, {trainings.test.count} held out, "
        f"{extent.steps} steps of {BATCH}, SGD lr={LEARNING_RATE} momentum 0.9, cosine; {MODE}, K={K}, cut before "
        f"layer {CUT} of {len(trainings.graphs[0].network.layers)}; {extent.seeds} seed(s), each with weights and "
        "order of its own; rehearsed in one process as edge and server compute it, gradients as late as K allows; the "
        "drop depends on how far training has come: see training_loss, which running ahead raises",
        "accuracy_each": "; ".join(
            f"{name} {', '.join(f'{score:.4f}' for score in by_seed)}" for name, by_seed in scores.items()
        ),
    }  # fmt: skip


def _draw_changes(norms: Sequence[float], out: Path) -> None:
    """Draw how far weights move in K steps (Eq. 6), early and late in training."""
    third = max(1, len(norms) // 3)
    parts = {"first third": norms[:third], "second third": norms[third : 2 * third], "last third": norms[2 * third :]}
    lines = {
        name: [(float(k), statistics.fmean(weight_change_rates([*part], k))) for k in CHANGES_OF if len(part) > k]
        for name, part in parts.items()
    }
    draw_lines(
        {name: line for name, line in lines.items() if line}, out / "eq_6.png", across="K", up="change of ‖w‖₁, %",
        title="Eq. 6: how far weights move in K steps, mean over normal training",
    )  # fmt: skip


def _studies(trainings: Trainings, extent: SplitAccuracyExtent, out: Path, say: Progress) -> Figures:
    """Draw Fig. 6-8: accuracy against K, the cut, and bits."""
    steps, seeds = extent.study_steps, extent.seeds if extent.study_steps >= extent.steps else 1
    figures: Figures = {}

    def score(name: str, way: SplitVariant) -> float:
        say(f"study, {name}")
        mean = statistics.mean(trainings.score(way, seed, steps) for seed in range(seeds))
        figures[f"study_{name}"] = mean
        return mean

    normal = score("normal", WAYS["normal"])
    by_k = [score(f"k_{k}", SplitVariant(k)) for k in extent.ks]
    cuts = trainings.cuts
    by_cut = [score(f"cut_{cut}", SplitVariant(K, cut=cut)) for cut in cuts]
    fed = [score(f"bits_{bits}", SplitVariant(K, bits)) for bits in extent.bits]
    not_fed = [score(f"bits_{bits}_no_feedback", SplitVariant(K, bits, feeds_back=False)) for bits in extent.bits]
    draw_studies(
        [
            Study("K", [str(k) for k in extent.ks], {"32 bits": by_k}),
            Study("cut before layer", [str(cut) for cut in cuts], {f"K={K}, 32 bits": by_cut}),
            Study(
                "bits of a feature", [str(bits) for bits in extent.bits],
                {f"K={K}, error feedback": fed, f"K={K}, none": not_fed},
            ),
        ],
        normal, out / "fig_6_7_8.png",
        f"Fig. 6-8: tiny on CIFAR-10 (JPEG copy), {steps} steps of {BATCH}, {seeds} seed(s), {MODE}",
    )  # fmt: skip
    return figures

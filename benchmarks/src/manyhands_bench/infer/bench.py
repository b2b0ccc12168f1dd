"""Figures of `manyhands bench infer`: channels of a decoupled network over several devices beside one device and tiles.

Everything in DECNN's section 4: exchanges, speed over seven links, on two cores and in the lab, memory, and the effect
of decoupling on accuracy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyhands.graph.accelerators import check_gpu
from manyhands.session.joining import parse_compute
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.infer.accuracy import SHORT, WAYS, Accuracy, DecoupledVariant, bench_accuracy
from manyhands_bench.infer.drawn import draw_lab, draw_memory, draw_scores, draw_simulated
from manyhands_bench.infer.lab import InferLabExtent, bench_lab
from manyhands_bench.infer.local import bench_memory, bench_speedup
from manyhands_bench.infer.networks import RESNET50, SUBJECTS, DecnnNetwork, Library
from manyhands_bench.infer.simulated import FAST, PAIRS, SCALING, WEAK, bench_simulated
from manyhands_bench.infer.sync import bench_sync
from manyhands_bench.parts import check_asked, measure_parts

PICTURES = Path("../shared/data/cifar10_jpeg.npz")
TRAINED = replace(SHORT, blocks=(1, 1, 1), samples=3_000)
"""An extent of a minute or two: too short to tell networks apart by a per cent."""
LAB = InferLabExtent((FAST, SCALING), turns=8, at_once=10, measure_seconds=5.0)


@dataclass(frozen=True)
class InferScope:
    """The amount of measuring."""

    subjects: tuple[DecnnNetwork, ...] = SUBJECTS
    reference: DecnnNetwork = RESNET50
    """The network of all parts but the simulated one; its time on the paper's device sets the scale."""
    pairs: tuple[str, ...] = tuple(PAIRS)
    streams: int = 2
    """Plans of a method that are tried as streams."""
    measure_seconds: float = 8.0
    """Seconds for which a network is measured the first time."""
    blocks: int = 5
    samples: int = 12
    """Samples of a block when two cores are compared with one."""
    lab: InferLabExtent = LAB
    accuracy: Accuracy = TRAINED


_SMALL = DecnnNetwork("resnet18", 1.5, (3, 64, 64), paper_seconds=0.2)
DEFAULT = InferScope()
QUICK = InferScope(
    (_SMALL,), _SMALL, (FAST, SCALING, WEAK), streams=1, measure_seconds=0.2, blocks=1, samples=4,
    lab=InferLabExtent((SCALING,), turns=4, at_once=4, measure_seconds=0.5),
    accuracy=replace(TRAINED, samples=256, epochs=2, ways=(DecoupledVariant(), DecoupledVariant(1.5, 3))),
)  # fmt: skip
FULL = InferScope(
    streams=5, measure_seconds=45.0, blocks=15, samples=20,
    lab=InferLabExtent(tuple(PAIRS), turns=14, at_once=24, measure_seconds=20.0), accuracy=Accuracy(),
)  # fmt: skip
TRAINED_FULL = replace(TRAINED, samples=12_000, epochs=6, seeds=3, ways=WAYS)
"""The trainings of --full without a GPU: an hour or two."""
_AT_ONCE_ON_GPU = 4


@dataclass
class InferBench:
    """The parts of the benchmark, by name; each gives figures and may draw pictures."""

    scope: InferScope
    pictures: Path
    out: Path | None
    say: Progress
    library: Library = field(init=False)

    def __post_init__(self) -> None:
        self.library = Library(self.scope.measure_seconds, self.say)

    def sync(self) -> Figures:
        return bench_sync(self.library, self.scope.reference, self.say)

    def simulated(self) -> Figures:
        scope = self.scope
        figures, simulated = bench_simulated(
            self.library, scope.subjects, scope.reference, scope.pairs, scope.streams, self.say
        )
        if self.out is not None:
            draw_simulated(simulated, self.out)
        return figures

    def speedup(self) -> Figures:
        if len(os.sched_getaffinity(0)) < 2:
            return {"speedup_skipped": "there is one core here only"}
        return bench_speedup(self.library, self.scope.reference, self.scope.blocks, self.scope.samples, self.say)

    def memory(self) -> Figures:
        figures, peaks = bench_memory(self.library, self.scope.reference, self.say)
        if self.out is not None:
            draw_memory(peaks, str(self.scope.reference), self.out)
        return figures

    def lab(self) -> Figures:
        figures, measured = bench_lab(self.library, self.scope.reference, self.scope.lab, self.say)
        if self.out is not None and measured:
            draw_lab(measured, str(self.scope.reference), self.out)
        return figures

    def accuracy(self) -> Figures:
        figures, rows = bench_accuracy(self.scope.accuracy, self.pictures, self.out, self.say)
        if self.out is not None and rows:
            draw_scores(rows, self.scope.accuracy, self.out)
        return figures


PARTS: Mapping[str, Callable[[InferBench], Figures]] = {
    "sync": InferBench.sync, "simulated": InferBench.simulated, "speedup": InferBench.speedup,
    "memory": InferBench.memory, "lab": InferBench.lab, "accuracy": InferBench.accuracy,
}  # fmt: skip


def scope_of(quick: bool, full: bool, compute: str) -> InferScope:
    scope = QUICK if quick else FULL if full else DEFAULT
    if compute == "cpu":
        return replace(scope, accuracy=TRAINED_FULL) if full else scope
    return replace(scope, accuracy=replace(scope.accuracy, compute=compute, at_once=_AT_ONCE_ON_GPU))


def bench_infer(
    *,
    quick: bool = False,
    full: bool = False,
    only: Sequence[str] = (),
    compute: str = "cpu",
    pictures: Path = PICTURES,
    out: Path | None = None,
    on_progress: Progress | None = None,
) -> Figures:
    """Return every figure of `manyhands bench infer`, flat. `compute`: where accuracy is trained (`cpu`, `cuda`)."""
    check_asked(PARTS, only, quick, full)
    if parse_compute(compute) != "cpu":
        check_gpu(compute)
    say = on_progress or (lambda text: None)
    bench = InferBench(scope_of(quick, full, compute), pictures, out, say)
    return measure_parts(PARTS, bench, only=only, quick=quick, out=out, say=say)

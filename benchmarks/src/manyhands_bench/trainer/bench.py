"""Figures of `manyhands bench trainer`: what users of other trainers look at first.

clip         clipped training over devices beside plain PyTorch, float64
groups       groups of weights, several optimizers and schedules beside plain PyTorch, float64
validation   validations while training beside plain PyTorch, float64
noise        training in bfloat16 beside plain PyTorch under autocast, both by their distance to float64
bytes        bytes between two stages in bfloat16 over those in float32
gpu          bfloat16 over float32 on a GPU
loader       a folder of JPEGs, by a DataLoader, over tensors in memory
lines        lines that change in scripts that are ported
loop         a loop over mh.prepare over mh.train
start        seconds to the first step
together     four trainings that begin at once
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import check_asked, measure_parts
from manyhands_bench.trainer import precision
from manyhands_bench.trainer.at_once import AtOnceSetting, trainings_at_once
from manyhands_bench.trainer.clipping import clip_exact
from manyhands_bench.trainer.first_step import FirstStepSetting, first_step
from manyhands_bench.trainer.groups import groups_exact
from manyhands_bench.trainer.loading import LoadingSetting, on_two_cores
from manyhands_bench.trainer.own_loop import LoopSetting, lines_changed_max, loop_overhead
from manyhands_bench.trainer.validation import validation_figures

NOT_MEASURED = math.nan
"""The figure of what this machine cannot measure: null in the document of `--json`, and never an aim that is met."""


@dataclass(frozen=True)
class TrainerScope:
    """The amount of measuring."""

    seeds: int = 5
    """Of the distance to float64 in bfloat16."""
    start_repeats: int = 3
    start: FirstStepSetting = field(default_factory=FirstStepSetting)
    loader: LoadingSetting = field(default_factory=LoadingSetting)
    loop: LoopSetting = field(default_factory=LoopSetting)
    together: AtOnceSetting = field(default_factory=AtOnceSetting)


DEFAULT = TrainerScope()
_SMALL = FirstStepSetting("tiny", (1, 16, 16), batch_size=8, steps=4)
QUICK = TrainerScope(
    seeds=1, start_repeats=1, start=_SMALL, loader=LoadingSetting(steps=4, repeats=1, width=4),
    loop=LoopSetting(repeats=1, steps=10, width=8, size=8, batch_size=8),
    together=replace(DEFAULT.together, models=("tiny", "tiny"), shape=(1, 16, 16)),
)  # fmt: skip


@dataclass
class TrainerBench:
    """The parts of the benchmark, by name; each gives figures, and its setting as a text."""

    scope: TrainerScope
    say: Progress

    def clip(self) -> Figures:
        setting = "clip_norm, 3 devices of one thread; plain PyTorch with clip_grad_norm_ on one, float64"
        return {"clip_setting": setting} | clip_exact()

    def groups(self) -> Figures:
        import torch

        if not hasattr(torch.optim, "Muon"):
            return {"groups_exact": NOT_MEASURED, "groups_skipped": f"PyTorch {torch.__version__} has no Muon."}
        setting = "AdamW in groups with OneCycleLR; Muon and AdamW, each with a schedule; plain PyTorch on one, float64"
        return {"groups_setting": setting} | groups_exact()

    def validation(self) -> Figures:
        figures = validation_figures()
        return {
            "validation_difference": figures.largest_difference,
            "validation_weights_equal": int(figures.weights_are_equal), "validation_seconds": figures.seconds,
        }  # fmt: skip

    def noise(self) -> Figures:
        seeds = self.scope.seeds
        setting = f"median of {seeds} seed(s); plain PyTorch under autocast on one device, both against float64"
        return {"noise_setting": setting} | precision.bf16_noise_ratio(seeds)

    def bytes(self) -> Figures:
        return {"bf16_bytes_ratio": precision.bf16_bytes_ratio()}

    def gpu(self) -> Figures:
        speedup = precision.bf16_speedup_gpu()
        if speedup is None:
            return {"bf16_speedup_gpu": NOT_MEASURED, "gpu_skipped": "it needs a GPU; this machine has none."}
        return {"bf16_speedup_gpu": speedup, "gpu_setting": precision.gpu_setting()}

    def loader(self) -> Figures:
        if importlib.util.find_spec("PIL") is None:
            return {"loader_ratio": NOT_MEASURED, "loader_skipped": "it needs Pillow."}
        setting = self.scope.loader
        return {"loader_setting": f"two cores, {setting}"} | on_two_cores(setting)

    def lines(self) -> Figures:
        return {"lines_changed_max": lines_changed_max()}

    def loop(self) -> Figures:
        setting = self.scope.loop
        text = f"{setting}, interleaved pairs; both a pipeline of two workers of one thread, self-check off"
        return {"loop_setting": text} | loop_overhead(setting, self.say)

    def start(self) -> Figures:
        setting, repeats = self.scope.start, self.scope.start_repeats
        figures = first_step(setting, repeats, self.say)
        return {"start_setting": f"median of {repeats} process(es) with empty caches, {setting}"} | figures

    def together(self) -> Figures:
        setting = self.scope.together
        return {"together_setting": str(setting)} | trainings_at_once(setting, self.say)


PARTS: Mapping[str, Callable[[TrainerBench], Figures]] = {
    "clip": TrainerBench.clip, "groups": TrainerBench.groups, "validation": TrainerBench.validation,
    "noise": TrainerBench.noise, "bytes": TrainerBench.bytes, "gpu": TrainerBench.gpu, "loader": TrainerBench.loader,
    "lines": TrainerBench.lines, "loop": TrainerBench.loop, "start": TrainerBench.start,
    "together": TrainerBench.together,
}  # fmt: skip


def bench_trainer(
    *, quick: bool = False, only: Sequence[str] = (), out: Path | None = None, on_progress: Progress | None = None
) -> Figures:
    """Return every figure of `manyhands bench trainer`, flat; `out`: the folder in which those so far are stored."""
    check_asked(PARTS, only, quick, False)
    say = on_progress or (lambda text: None)
    bench = TrainerBench(QUICK if quick else DEFAULT, say)
    return measure_parts(PARTS, bench, only=only, quick=quick, out=out, say=say)

"""Figures of `manyhands bench gpu`: what manyhands takes of a GPU's speed.

ratio      a step of plain PyTorch over ours, one GPU alone, in PyTorch's default float32
bf16       the same under bfloat16 autocast
exact      a step with exact=True over one without: what deterministic kernels without TF32 cost
shared     the bytes of tensors that two workers on one GPU exchange through the machine's memory
mixed      the speed of a GPU, slowed to a Jetson's, beside workers on processors over that of the GPU alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyhands.facts.errors import ManyhandsError
from manyhands.session.session import usable_cores
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.gpu.alone import busy_seconds, our_seconds, step_ratio
from manyhands_bench.gpu.networks import NETWORKS
from manyhands_bench.gpu.several import MOST_CPU_WORKERS, SHARED_WAYS, jetson_slowdown, mixed_gain, shared_gpu
from manyhands_bench.parts import check_asked, measure_parts


@dataclass(frozen=True)
class GpuScope:
    """The amount of measuring."""

    steps: int = 50
    repeats: int = 1
    networks: tuple[str, ...] = tuple(NETWORKS)


DEFAULT = GpuScope()
QUICK = GpuScope(steps=20, networks=("resnet50", "resnet18"))
EXACT_NETWORK = "resnet50"
SHARED_NETWORK = "resnet18"
MIXED_BATCH, MIXED_TITLE = 16, "ResNet-50, 224x224, batch 16"
"""What a Jetson's memory holds, and what it computes in less than a second."""
NOT_MEASURED = math.nan
"""The figure of a network that cannot be measured here."""


@dataclass
class GpuBench:
    """The parts of the benchmark, by name; each gives figures, and its setting as a text."""

    scope: GpuScope
    say: Progress

    def ratio(self) -> Figures:
        return self._ratios("float32", "gpu_ratio")

    def bf16(self) -> Figures:
        return self._ratios("bf16", "gpu_ratio_bf16")

    def exact(self) -> Figures:
        network, steps = NETWORKS[EXACT_NETWORK], self.scope.steps
        usual, exact = our_seconds(network, "float32", steps), our_seconds(network, "float32", steps, exact=True)
        return {"exact_price": exact / usual, "exact_step_seconds": exact, "exact_setting": network.title}

    def shared(self) -> Figures:
        figures: Figures = {"shared_gpu_setting": f"{NETWORKS[SHARED_NETWORK].title}, two workers on one GPU"}
        for way in SHARED_WAYS:
            figures |= shared_gpu(NETWORKS[SHARED_NETWORK], way)
        return figures | {"bytes_through_host": sum(int(figures[f"bytes_through_host_{way}"]) for way in SHARED_WAYS)}

    def mixed(self) -> Figures:
        network = replace(NETWORKS[EXACT_NETWORK], title=MIXED_TITLE, batch_size=MIXED_BATCH)
        slowdown = jetson_slowdown(network, busy_seconds(network, self.scope.steps))
        return mixed_gain(network, slowdown, min(MOST_CPU_WORKERS, max(1, usable_cores() - 1)), self.say)

    def _ratios(self, precision: str, key: str) -> Figures:
        figures: Figures = {
            f"{key}_setting": f"{torch.cuda.get_device_name()}, {precision}, {self.scope.steps} steps after warm-up, "
            f"{self.scope.repeats} run(s) each in turns; plain PyTorch with pinned batches and no loss fetched, TF32 "
            f"for convolutions {'on' if torch.backends.cudnn.allow_tf32 else 'off'}"
        }
        for name in self.scope.networks:
            self.say(f"{precision}, {NETWORKS[name].title}")
            try:
                ratio, plain, ours = step_ratio(NETWORKS[name], precision, self.scope.steps, self.scope.repeats)
            except ManyhandsError as error:
                figures |= {f"{key}_{name}": NOT_MEASURED, f"{key}_{name}_failed": error.message}
                continue
            figures |= {
                f"{key}_{name}": ratio, f"{key}_{name}_plain_seconds": plain, f"{key}_{name}_our_seconds": ours,
            }  # fmt: skip
        ratios = [float(figures[f"{key}_{name}"]) for name in self.scope.networks]
        return figures | {f"{key}_min": NOT_MEASURED if any(map(math.isnan, ratios)) else min(ratios)}


PARTS: Mapping[str, Callable[[GpuBench], Figures]] = {
    "ratio": GpuBench.ratio, "bf16": GpuBench.bf16, "exact": GpuBench.exact,
    "shared": GpuBench.shared, "mixed": GpuBench.mixed,
}  # fmt: skip


def bench_gpu(
    *, quick: bool = False, only: Sequence[str] = (), out: Path | None = None, on_progress: Progress | None = None
) -> Figures:
    """Return every figure of `manyhands bench gpu`, flat; `out`: the folder in which those so far are stored."""
    check_asked(PARTS, only, quick, False)
    if not torch.cuda.is_available():
        return {"gpu_skipped": "it needs a GPU; torch finds none on this machine."}
    bench = GpuBench(QUICK if quick else DEFAULT, on_progress or (lambda text: None))
    return measure_parts(PARTS, bench, only=only, quick=quick, out=out, say=bench.say)

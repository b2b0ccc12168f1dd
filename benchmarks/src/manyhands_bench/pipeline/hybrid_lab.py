"""A hybrid pipeline by the clock: one of ASTEROID's environments, played slower than in real time.

The devices measure themselves. Our plan, of which a stage is shared by several devices, and those of data parallel,
pipeline parallel and DAPPLE are made from that profile, and then take turns on the same devices, block by block: the
median of the blocks' ratios counts. Every run is stored as it ends, and the same folder goes on where it was
interrupted, with the same plans.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.explaining.comparison import OURS, compare
from manyhands.facts.cluster import LabCluster, preset
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile, BadPlan
from manyhands.facts.plan import Plan
from manyhands.files.documents import read_document, write_document
from manyhands.lab.removal import missing
from manyhands.models.registry import ZOO
from manyhands.session.lab_session import play_here
from manyhands.session.opening import open_session
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.pipeline.ours import Ours, plan_text
from manyhands_bench.pipeline.torch_setting import TorchSetting

BASELINES = ("data parallel", "pipeline parallel", "DAPPLE")
"""What a hybrid plan is to beat, by the names of a comparison's rows."""
STORED = "hybrid-lab.json"
FAR = 2.5
"""A side that is predicted to take so many times as long as ours is not the closest: it is run in one block."""


@dataclass(frozen=True)
class HybridTask:
    """A network and a mini-batch on one of the paper's environments."""

    model: str
    batch_size: int
    environment: str
    scale: float
    """How many times slower than in real time devices and links are: more than what the machine's cores allow at
    least."""
    micro_batches: int | None = None
    """None: every plan has as many as suit it best."""

    @property
    def shape(self) -> tuple[int, ...]:
        return ZOO[self.model].input_shape

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{self.model} {size}, batch {self.batch_size}, {self.environment}"


TASK = HybridTask("mobilenetv2-32", 256, "env-c", 14.0)
QUICK_TASK = HybridTask("tiny", 16, "env-c", 40.0)


@dataclass(frozen=True)
class HybridExtent:
    """The amount of measuring."""

    task: HybridTask = TASK
    blocks: int = 2
    steps: int = 2
    warm_up_steps: int = 1
    measure_seconds: float = 15.0
    ladder: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


QUICK_EXTENT = HybridExtent(QUICK_TASK, blocks=1, steps=1, measure_seconds=2.0, ladder=(1, 2, 4))


class SideRun(msgspec.Struct, frozen=True):
    """One run of one side's plan: the seconds of its steps, in the lab's time."""

    block: int
    side: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class StoredHybrid(msgspec.Struct):
    """The plans, predictions and runs of one task, as far as they were measured."""

    task: str
    scale: float
    plans: dict[str, dict[str, Any]]
    predicted: dict[str, float]
    """Side -> seconds of a step by the simulator, from the profile that the devices measured."""
    runs: list[SideRun] = []

    def plan(self, side: str) -> Plan:
        return Plan.from_dict(self.plans[side])

    def missing(self, blocks: int) -> list[tuple[int, str]]:
        """Return the runs that are still to be made; each block begins with another side, and one that is far behind
        runs in the first block only."""
        done, sides = {(run.block, run.side) for run in self.runs}, list(self.plans)
        near = [side for side in sides if self.predicted[side] <= FAR * self.predicted[OURS]]
        turns = [(0, side) for side in sides]
        for block in range(1, blocks):
            turns += [(block, near[(block + place) % len(near)]) for place in range(len(near))]
        return [turn for turn in turns if turn not in done]

    def medians(self, side: str) -> dict[int, float]:
        """Return the median step of every block."""
        return {run.block: run.median for run in self.runs if run.side == side}

    def ratios(self, baseline: str) -> list[float]:
        """Return how many times as fast ours is, block by block."""
        ours = self.medians(OURS)
        return [seconds / ours[block] for block, seconds in self.medians(baseline).items() if block in ours]


def bench_hybrid(extent: HybridExtent, out: Path | None, say: Progress) -> Figures:
    """Measure what is still missing of all blocks, and return the figures; the reason if there can be no lab."""
    if why := missing():
        return {"hybrid_lab_skipped": why}
    task = extent.task
    cluster = LabCluster(msgspec.structs.replace(preset(task.environment), name=f"hy{os.getpid()}"), scale=task.scale)
    play_here(cluster)  # refuses a scale for which this machine is too slow
    stored = _stored(out, task)
    if stored is None or stored.missing(extent.blocks):
        with open_session(cluster, say=say) as session:
            ours = Ours(session, TorchSetting(task.model, task.shape, task.batch_size, 1))
            stored = stored or _planned(ours, extent, say)
            for block, side in stored.missing(extent.blocks):
                say(f"hybrid in the lab: {side}, block {block + 1} of {extent.blocks}")
                seconds = ours.step_seconds(stored.plan(side), extent.steps, extent.warm_up_steps)
                stored.runs.append(SideRun(block, side, list(seconds)))
                _store(out, stored)
    return figures_of(stored, extent)


def _planned(ours: Ours, extent: HybridExtent, say: Progress) -> StoredHybrid:
    """Measure the devices, and return the plans of all sides from this profile, with what they should take."""
    task = extent.task
    say(f"hybrid in the lab: measuring {task}")
    cluster, profile = ours.measure(extent.measure_seconds, extent.ladder)
    table = compare(
        ours.graph.network, cluster, batch_size=task.batch_size, micro_batches=task.micro_batches, batch_norm="local",
        profile=profile,
    )  # fmt: skip
    plans, predicted = {}, {}
    for side in (OURS, *BASELINES):
        row = table.row(side)
        if row.plan is None or not row.runs:
            raise BadPlan(f"{task}: {side} has no plan that runs: {row.problem}.")
        plans[side], predicted[side] = row.plan.to_dict(), row.seconds
    return StoredHybrid(str(task), task.scale, plans, predicted)


def _stored(out: Path | None, task: HybridTask) -> StoredHybrid | None:
    """Return what an interrupted run has left in the folder; None: nothing."""
    path = None if out is None else out / STORED
    if path is None or not path.exists():
        return None
    stored = decode(read_document(path), StoredHybrid, str(path))
    if (stored.task, stored.scale) != (str(task), task.scale):
        raise BadFile(
            f"{path}: holds runs of {stored.task} at scale {stored.scale:g}, not of {task} at {task.scale:g}.",
            hint="Name another folder with --out.",
        )
    return stored


def _store(out: Path | None, stored: StoredHybrid) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_document(out / STORED, msgspec.to_builtins(stored))


def figures_of(stored: StoredHybrid, extent: HybridExtent) -> Figures:
    """Return the gains over every baseline, and every side's seconds beside the prediction."""
    plan = stored.plan(OURS)
    shared = sum(len(stage.devices) > 1 for stage in plan.stages)
    ratios = {baseline: stored.ratios(baseline) for baseline in BASELINES}
    gains = {baseline: statistics.median(column) for baseline, column in ratios.items()}
    closest = min(gains, key=gains.__getitem__)
    measured = {side: statistics.median(stored.medians(side).values()) for side in stored.plans}
    errors = [abs(stored.predicted[side] / seconds - 1) for side, seconds in measured.items()]
    figures: Figures = {
        "hybrid_lab_gain": gains[closest] if shared and len(plan.stages) > 1 else float("nan"),
        "hybrid_lab_gain_least": min(ratios[closest]),
        "hybrid_lab_gain_most": max(ratios[closest]),
        "hybrid_lab_predicted_gain": stored.predicted[closest] / stored.predicted[OURS],
        "hybrid_lab_prediction_error": statistics.median(errors),
        "hybrid_lab_prediction_error_worst": max(errors),
        "hybrid_lab_stages": len(plan.stages),
        "hybrid_lab_shared_stages": shared,
        "hybrid_lab_scale": stored.scale,
        "hybrid_lab_blocks": len(ratios[closest]),
        "hybrid_lab_step_spread": max(max(run.seconds) / min(run.seconds) for run in stored.runs),
    }
    for side in stored.plans:
        key = _key(side)
        figures[f"hybrid_lab_seconds_{key}"] = measured[side]
        figures[f"hybrid_lab_predicted_seconds_{key}"] = stored.predicted[side]
        if side != OURS:
            figures[f"hybrid_lab_over_{key}"] = gains[side]
    figures["hybrid_lab_sides"] = "; ".join(_text(stored, side) for side in stored.plans)
    figures["hybrid_lab_setting"] = (
        f"{stored.task}, {stored.scale:g} times slower than in real time, all seconds in the lab's time; every side "
        f"planned from what these devices measured themselves; a block: the median of {extent.steps} steps after "
        f"{extent.warm_up_steps} that does not count, sides in turns; gain: over the closest of "
        f"{', '.join(BASELINES)}; batch norm local, SGD with momentum"
    )
    return figures


def _text(stored: StoredHybrid, side: str) -> str:
    blocks: Mapping[int, float] = stored.medians(side)
    return (
        f"{side} [{plan_text(stored.plan(side))}] {_listed([blocks[block] for block in sorted(blocks)])} s "
        f"(predicted {stored.predicted[side]:.4g})"
    )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _key(side: str) -> str:
    return side.lower().replace(" ", "_")

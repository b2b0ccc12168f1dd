"""Writes the pictures of a run: trace.json and the files in plots/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.explaining.tile_report import is_tiled, write_tile_map
from manyhands.files.documents import write_document
from manyhands.observe.figures import NO_PLOTS, are_plots_here
from manyhands.observe.plots import draw_losses, draw_memory, draw_predicted_beside_measured, draw_utilisation
from manyhands.observe.stage_plots import draw_stages
from manyhands.observe.trace import combined_trace
from manyhands.runtime.record import one_step
from manyhands.schedule.policy import Schedule

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun
    from manyhands.explaining.prediction_accuracy import PredictionAccuracy
    from manyhands.job.result import TrainResult


def write_pictures(folder: Path, plots: Path, planned: PlannedRun, result: TrainResult, epoch_steps: int) -> str:
    """Draw measured beside predicted, the loss, and memory peaks; the pipeline and the tiles if there are any.

    Returns a note for the user: empty, or why there are no pictures.
    """
    spans = [span for log in result.logs.values() for span in log.spans]
    step = max((span.step for span in spans), default=0)
    measured = one_step(spans, step)
    plan, devices = planned.plan, list(planned.plan.devices)
    end = max((span.end for span in measured), default=0.0)
    title = f"{planned.network.name} on {planned.cluster.name}"
    write_document(folder / "trace.json", combined_trace(planned.prediction.spans, measured, title=title))
    if not are_plots_here():
        return NO_PLOTS
    busy = {
        name: sum(s.end - s.start for s in measured if s.device == name and s.kind in ("forward", "backward"))
        / (end or 1.0)
        for name in devices
    }
    expected = {name: 1 - planned.prediction.idle_part(name) for name in devices}
    busy_in = [name for stage in plan.stages for name in stage.devices]
    is_pipeline = len(plan.stages) > 1 and len(set(busy_in)) == len(busy_in)  # else stages take turns on a device
    names = ["timeline.png", "pipeline.png"] if is_pipeline else ["timeline.png"]
    for name in names:
        draw_predicted_beside_measured(
            planned.prediction.spans, measured, devices, plots / name, title=f"{title}, step {step}",
            predicted_seconds=planned.prediction.seconds, measured_seconds=end,
            notes=(_bubbles(planned, expected), _bubbles(planned, busy)) if name == "pipeline.png" else ({}, {}),
        )  # fmt: skip
    draw_utilisation(busy, expected, plots / "utilisation.png", title=f"{title}: part of a step computing")
    if result.prediction_accuracy is not None:
        _write_stages(result.prediction_accuracy, plots / "stages.png", f"{title}: a step, predicted and measured")
    draw_losses(result.losses, plots / "loss.png", title=f"{planned.network.name}: loss", epoch_steps=epoch_steps)
    if peaks := result.peaks:
        budgets = {name: planned.cluster.device(name).memory_bytes for name in peaks}
        draw_memory(peaks, budgets, plots / "memory.png", title=f"{title}: peak of tensor bytes in a step")
    if is_tiled(plan):
        write_tile_map(Schedule(plan, planned.network), plots / "tiles.png", title=title)
    return ""


def _write_stages(accuracy: PredictionAccuracy, path: Path, title: str) -> None:
    """Draw each stage's predicted and measured seconds, beside the rest of its device's step."""
    rows = []
    for times in accuracy.stages:
        others = accuracy.rest(times.device)
        bars = ((times.predicted_seconds, others[0]), (times.measured_seconds, others[1]))
        rows.append((f"stage {times.stage}, {times.device}", *bars))
    draw_stages(rows, path, title=title)


def _bubbles(planned: PlannedRun, busy: Mapping[str, float]) -> dict[str, str]:
    """Return for each device its stages, and the part of the step in which it computes nothing."""
    stages = {
        name: ", ".join(str(n) for n, stage in enumerate(planned.plan.stages) if name in stage.devices) for name in busy
    }
    return {name: f"stage {stages[name] or 'none'}, bubble {1 - part:.0%}" for name, part in busy.items()}

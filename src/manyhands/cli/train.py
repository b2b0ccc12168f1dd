"""`manyhands train`: the main job. Without arguments, handwritten digits on four local workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli.config_options import is_unchanged, takes_options_of, with_token
from manyhands.cli.dashboard import dashboard_for
from manyhands.cli.following import Show, print_outcome
from manyhands.training.config import TrainConfig

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun
    from manyhands.explaining.prediction_accuracy import PredictionAccuracy
    from manyhands.job.result import TrainResult

MOST_ROWS = 16
"""Most rows of the table of predicted and measured times; with more devices, each stage shows the one farthest off."""


@takes_options_of(TrainConfig)
def train(**arguments: Any) -> None:
    """Train a network on several workers, exactly as one device would. Without arguments: a demonstration."""
    from manyhands.cli.show import print_json
    from manyhands.job.devices import devices_for
    from manyhands.training.arguments import train_config
    from manyhands.training.named import train_by_name

    config = train_config(with_token(arguments))
    is_demo = is_unchanged(TrainConfig, arguments) and not config.resume and not arguments["share"]
    with (
        _Show(quiet=config.json, is_demo=is_demo) as show,
        dashboard_for(config.dashboard, show.say, quiet=config.json) as page,
        devices_for(config, show.say) as devices,
    ):
        watched = replace(config, on_opened=page.show, on_planned=show.planned, on_step=show.step, say=show.say)
        result = train_by_name(watched, devices)
    if config.json:
        print_json(to_dict(result))
    else:
        show.finished(result)


def to_dict(result: TrainResult) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "accuracy": result.accuracy,
        "test_loss": result.test.loss if result.test is not None else None,
        "losses": result.losses,
        "grad_norms": result.grad_norms,
        "validation": [
            {"step": results.steps_done, "epoch": results.epoch, **results.metrics} for results in result.validation
        ],
        "plan": result.plan.to_dict(),
        "folder": str(result.folder),
        "checkpoint": str(result.checkpoint),
        "throughput": result.throughput,
        "predicted_seconds": result.predicted_seconds,
        "measured_seconds": result.measured_seconds,
        "steps": result.steps,
        "scale": result.scale,
        "stands_in": result.stands_in,
        "stages": result.prediction_accuracy.to_dict() if result.prediction_accuracy is not None else None,
        "problems": result.problems,
        "bytes_by_use": result.bytes_by_use,
        "bytes_by_use_of": result.traffic.by_device,
        "devices": {name: log.to_dict() for name, log in result.logs.items()},
    }


class _Show(Show):
    """Shows a training job; a demonstration says that it is one, and the outcome is compared with the prediction."""

    def __init__(self, *, quiet: bool, is_demo: bool) -> None:
        super().__init__("manyhands train", quiet=quiet)
        self.is_demo = is_demo

    def note(self, planned: PlannedRun) -> str:
        return _demo_note(planned) if self.is_demo else ""

    def finished(self, result: TrainResult) -> None:
        """Print the outcome beside the prediction."""
        from manyhands.cli.tables import print_peaks
        from manyhands.explaining.tile_report import is_tiled, traffic_text
        from manyhands.facts.lab import scale_text
        from manyhands.facts.units import format_seconds

        print_outcome(result)
        ratio = result.measured_seconds / result.predicted_seconds if result.predicted_seconds else float("inf")
        typer.echo(
            f"A step took {format_seconds(result.measured_seconds)} (median), predicted "
            f"{format_seconds(result.predicted_seconds)}: {ratio:.2f} times the prediction; "
            f"{result.throughput:,.0f} samples/s"
        )
        if result.prediction_accuracy is not None and len(result.prediction_accuracy.stages) > 1:
            print_prediction_accuracy(result.prediction_accuracy)
        if is_tiled(result.plan):
            print_peaks(result.peaks)
            typer.echo(traffic_text(result.bytes_by_use))
        if result.stands_in:
            typer.echo(
                "Not in a lab: plain processes stood in for its devices, at this machine's own speed; their links were "
                f"shaped, {scale_text(result.scale or 1)}."
            )
        elif result.scale is not None:
            typer.echo(f"In the lab, {scale_text(result.scale)}; all times here are the lab's.")
        links = {"plots/*.png": "pictures in plots/", "trace.json": "trace.json opens in Perfetto"}
        parts = [f"checkpoint: {result.checkpoint.name}"]
        parts += [text for pattern, text in links.items() if any(result.folder.glob(pattern))]
        typer.echo(f"Run folder: {result.folder} ({'; '.join(parts)})")


def print_prediction_accuracy(accuracy: PredictionAccuracy) -> None:
    """Print predicted beside measured seconds of every stage and device."""
    from manyhands.cli.show import print_table
    from manyhands.facts.units import format_seconds

    shown = list(accuracy.stages)
    if len(shown) > MOST_ROWS:
        numbers = sorted({times.stage for times in shown})
        shown = [
            max((times for times in shown if times.stage == n), key=lambda times: abs(times.ratio - 1)) for n in numbers
        ]
    rows = []
    for place, times in enumerate(shown):
        is_first = place == 0 or shown[place - 1].stage != times.stage
        others = accuracy.rest(times.device)
        rows.append(
            [str(times.stage) if is_first else "", f"{times.layers[0]}-{times.layers[1] - 1}" if is_first else "",
             times.device, format_seconds(times.predicted_seconds), format_seconds(times.measured_seconds),
             f"{times.ratio:.2f}",
             *map(format_seconds, others)]
        )  # fmt: skip
    headings = [
        "stage",
        "layers",
        "device",
        "computing: predicted",
        "measured",
        "ratio",
        "rest: predicted",
        "measured ",
    ]
    title = f"A step, predicted and measured (medians of {accuracy.steps}; the rest: waits, exchanges, updates)"
    if len(shown) < len(accuracy.stages):
        title += f"; of {len(accuracy.stages)} shares of stages those farthest off"
    print_table(title, headings, rows, numbers=headings[3:])


def _demo_note(planned: PlannedRun) -> str:
    from manyhands.session.session import usable_cores

    started, count, cores = len(planned.cluster.names), len(planned.plan.devices), usable_cores()
    if count < started:
        return (
            f"This demonstration starts {started} workers; {count} of them is what makes it fastest here.\n"
            "To see all of them work together: --share samples."
        )
    note = f"This demonstration asks for {count} workers so that you see them work together."
    if cores < count:
        note += f"\nThis machine has {cores} core(s): fewer would do better. Try --devices {cores}."
    return note

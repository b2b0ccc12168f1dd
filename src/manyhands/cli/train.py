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
"""Of the table of predicted beside measured; of more devices, each stage's that is farthest off is shown."""


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
    """What --json prints."""
    return {
        "accuracy": result.accuracy,
        "test_loss": result.test.loss if result.test is not None else None,
        "losses": result.losses,
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
    """The demonstration says what it is; the outcome stands beside what was predicted."""

    def __init__(self, *, quiet: bool, is_demo: bool) -> None:
        super().__init__("manyhands train", quiet=quiet)
        self.is_demo = is_demo

    def note(self, planned: PlannedRun) -> str:
        return _demo_note(planned) if self.is_demo else ""

    def finished(self, result: TrainResult) -> None:
        """How it went, beside what was predicted."""
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
        there = {"plots/*.png": "pictures in plots/", "trace.json": "trace.json opens in Perfetto"}
        found = [f"checkpoint: {result.checkpoint.name}"]
        found += [text for pattern, text in there.items() if any(result.folder.glob(pattern))]
        typer.echo(f"Run folder: {result.folder} ({'; '.join(found)})")


def print_prediction_accuracy(found: PredictionAccuracy) -> None:
    """Predicted beside measured, of every stage and device."""
    from manyhands.cli.show import print_table
    from manyhands.facts.units import format_seconds

    shown = list(found.stages)
    if len(shown) > MOST_ROWS:
        numbers = sorted({one.stage for one in shown})
        shown = [max((one for one in shown if one.stage == n), key=lambda one: abs(one.ratio - 1)) for n in numbers]
    rows = []
    for place, one in enumerate(shown):
        is_first = place == 0 or shown[place - 1].stage != one.stage
        rest = found.rest(one.device)
        rows.append(
            [str(one.stage) if is_first else "", f"{one.layers[0]}-{one.layers[1] - 1}" if is_first else "", one.device,
             format_seconds(one.predicted_seconds), format_seconds(one.measured_seconds), f"{one.ratio:.2f}",
             *map(format_seconds, rest)]
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
    title = f"A step, predicted and measured (medians of {found.steps}; the rest: waits, exchanges, updates)"
    if len(shown) < len(found.stages):
        title += f"; of {len(found.stages)} shares of stages those farthest off"
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

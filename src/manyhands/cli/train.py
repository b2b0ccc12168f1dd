"""`manyhands train`: the main job. Without arguments, handwritten digits on four local workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.dashboard import DashboardOption, dashboard_for
from manyhands.cli.following import Show, print_outcome
from manyhands.cli.options import (
    Data,
    Gpus,
    JobCluster,
    JobInput,
    JobModel,
    Json,
    Lab,
    Listen,
    MinDevices,
    Out,
    Resume,
    Scale,
    Seed,
    Slots,
    Steps,
    Token,
    Trace,
    batch_size_option,
    devices_option,
    epochs_option,
    optimizer_option,
)
from manyhands.cli.tokens import TokenFile, token_given

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun
    from manyhands.explaining.prediction_accuracy import PredictionAccuracy
    from manyhands.job.result import TrainResult

MOST_ROWS = 16
"""Of the table of predicted beside measured; of more devices, each stage's that is farthest off is shown."""


def train(
    devices: Annotated[
        str | None,
        devices_option("4 on this machine"),
    ] = None,
    min_devices: MinDevices = None,
    model: JobModel = None,
    data: Data = None,
    input: JobInput = None,
    epochs: Annotated[int | None, epochs_option(10)] = None,
    steps: Steps = None,
    batch_size: Annotated[int | None, batch_size_option(64)] = None,
    optimizer: Annotated[str | None, optimizer_option("SGD:lr=0.1,momentum=0.9")] = None,
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            "-s",
            help="How to share the work: auto (fastest), single, samples, pipeline, tiles or mixed. Default: samples.",
        ),
    ] = None,
    grid: Annotated[
        str | None, typer.Option("--grid", help="Of --share tiles: rows x columns, like 2x2. Default: the fastest.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", help="Relative heights of the tiles' rows, like 2,1. Default: by speed.")
    ] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Relative widths of their columns.")] = None,
    reduce: Annotated[
        str | None,
        typer.Option("--reduce", help="How gradients are added up: allreduce (default), or gateway (by one device)."),
    ] = None,
    feed: Annotated[
        str | None,
        typer.Option(
            "--feed",
            help="When samples travel. step: each step's before it (default); start: all of them at the start, then "
            "only their numbers do.",
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", "-p", help="A plan file (manyhands plan --out), in place of --share.")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option("--micro-batches", help="Parts of a batch.")] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            "--tune", help="Try so many of the best plans for a few steps each, and those nearest; take the fastest."
        ),
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option("--batch-norm", help="synchronised (exact) or local (per worker, as DDP).")
    ] = None,
    replan: Annotated[
        str | None,
        typer.Option(
            "--replan",
            help="When a worker is lost, joins or leaves: light (shares, tiles and cuts move), heavy (planned anew) or "
            "auto (default).",
        ),
    ] = None,
    backup_every: Annotated[
        int | None,
        typer.Option(
            "--backup-every",
            help="Rounds between two copies of all weights that workers keep for each other; 0: none. Default: so that "
            "it is hardly felt.",
        ),
    ] = None,
    silence: Annotated[
        float | None,
        typer.Option("--silence", help="Seconds after which a worker that says nothing is lost. Default: 2."),
    ] = None,
    seed: Seed = None,
    cluster: JobCluster = None,
    lab: Lab = None,
    scale: Scale = None,
    slots: Slots = None,
    trace: Trace = None,
    listen: Listen = "",
    token: Token = "",
    token_file: TokenFile = "",
    gpus: Gpus = None,
    resume: Resume = "",
    out: Out = "",
    dashboard: DashboardOption = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write logs for TensorBoard too: tensorboard --logdir runs.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a network on several workers, exactly as one device would. Without arguments: a demonstration."""
    from manyhands.cli.show import print_json
    from manyhands.job import named as jobs
    from manyhands.job.machines import machines_for
    from manyhands.job.resuming import is_typed_token
    from manyhands.training.named import train_job

    is_typed = is_typed_token(token)
    token = token_given(token, token_file)
    given = {
        "model": model, "data": data, "input": input, "epochs": epochs, "steps": steps, "batch_size": batch_size,
        "optimizer": optimizer, "micro_batches": micro_batches, "tune": tune, "batch_norm": batch_norm, "seed": seed,
        "devices": devices, "cluster": cluster, "gpus": gpus, "lab": lab, "scale": scale, "slots": slots,
        "traces": tuple(trace) if trace else None, "grid": grid, "rows": rows, "columns": columns, "reduce": reduce,
        "feed": feed, "replan": replan, "backup_every": backup_every, "silence": silence,
        "listen": listen or None, "min_devices": min_devices, "has_typed_token": is_typed,
    }  # fmt: skip
    wish = jobs.wish_for(given, share=share, plan=plan, resume=resume, out=out)
    is_demo = wish == jobs.Wish() and not (resume or share)
    with (
        _Show(quiet=json, is_demo=is_demo) as show,
        dashboard_for(dashboard, show.say, quiet=json) as page,
        machines_for(wish, token, show.say) as machines,
    ):
        result = train_job(
            wish, cluster=machines, folder=Path(out) if out else None, resume=Path(resume) if resume else None,
            on_opened=page.show, on_planned=show.planned, on_step=show.step, say=show.say, tensorboard=tensorboard,
        )  # fmt: skip
    if json:
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

    count, cores = len(planned.plan.devices), usable_cores()
    note = f"This demonstration asks for {count} workers so that you see them work together."
    if cores < count:
        note += f"\nThis machine has {cores} core(s): fewer would do better. Try --devices {cores}, or --share auto."
    return note

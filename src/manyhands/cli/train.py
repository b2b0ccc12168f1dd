"""`manyhands train`: the main job. Without arguments, handwritten digits on four local workers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.options import Json

if TYPE_CHECKING:
    from manyhands.api.training import Planned, TrainResult


def train(
    devices: Annotated[
        int | None, typer.Option("--devices", "-n", min=1, help="How many workers. Default: 4 on this machine.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A name from `manyhands models`, or module:factory. Default: tiny."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="digits, a folder of class folders of images, or file.npz. Default: digits."),
    ] = None,
    input: Annotated[str | None, typer.Option("--input", help="Shape of one sample, like 3x64x64.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", "-e", min=1, help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps, in place of epochs.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", min=1, help="Samples per step, over all devices.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", "-o", help="Like Adam:lr=1e-3 or SGD:lr=0.1,momentum=0.9; any of torch.optim."),
    ] = None,
    share: Annotated[
        str | None, typer.Option("--share", "-s", help="How to share the work: auto, single, samples or pipeline.")
    ] = None,
    plan: Annotated[str | None, typer.Option("--plan", "-p", help="A plan file, in place of --share.")] = None,
    micro_batches: Annotated[int | None, typer.Option("--micro-batches", min=1, help="Parts of a batch.")] = None,
    batch_norm: Annotated[
        str | None, typer.Option("--batch-norm", help="synchronised (exact) or local (per worker, as DDP).")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="For shuffling and dropout.")] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A cluster.yaml whose devices join by name, or local:N.")
    ] = "",
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT where other machines' workers join, e.g. 0.0.0.0:7077.")
    ] = "",
    token: Annotated[str, typer.Option("--token", envvar="MANYHANDS_TOKEN", help="What workers must know.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="How many of the local workers each use a GPU.")] = 0,
    resume: Annotated[str, typer.Option("--resume", help="Go on with the run in this folder.")] = "",
    out: Annotated[str, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")] = "",
    json: Json = False,
) -> None:
    """Train a network on several workers, exactly as one device would."""
    from manyhands.api import jobs
    from manyhands.cli.show import print_json
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.errors import BadValue

    if share and plan:
        raise BadValue("--share and --plan both say how to share the work.", hint="Give one of them.")
    given = {
        "model": model, "data": data, "input": input, "epochs": epochs, "steps": steps, "batch_size": batch_size,
        "optimizer": optimizer, "plan": plan or share, "micro_batches": micro_batches, "batch_norm": batch_norm,
        "seed": seed,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    wish = jobs.wish_of(Path(resume), given) if resume else jobs.Wish(**given)  # type: ignore[arg-type]
    is_demo = not given and devices is None and not cluster and not listen and not resume
    show = _Show(quiet=json, is_demo=is_demo)
    with contextlib.ExitStack() as stack:
        machines: Any = cluster or None
        if listen:
            machines = stack.enter_context(jobs.workers(listen, devices or 1, token, show.say))
        elif not cluster:
            machines = Cluster.local(devices or jobs.DEMO_DEVICES, gpus=gpus)
        stack.enter_context(show)
        result = jobs.train_job(
            wish, cluster=machines, folder=Path(out) if out else None, resume=Path(resume) if resume else None,
            on_planned=show.planned, on_step=show.step, say=show.say,
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
        "devices": {name: log.to_dict() for name, log in result.logs.items()},
    }


class _Show:
    """What a person sees while it runs: the plan, a bar, the outcome. Without a terminal, plain lines."""

    def __init__(self, *, quiet: bool, is_demo: bool) -> None:
        self.quiet, self.is_demo = quiet, is_demo
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Show:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        typer.echo(text, err=True)

    def planned(self, planned: Planned) -> None:
        """The plan as a table, then the bar."""
        if self.quiet:
            return
        import sys

        from manyhands.cli.tables import print_plan

        print_plan(planned.plan, planned.network, planned.cluster, planned.prediction)
        if self.is_demo:
            typer.echo(_demo_note(planned))
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._batch = planned.plan.batch_size
        self._task = self._bar.add_task("training", total=planned.steps, loss="-", rate="")
        self._bar.start()

    def step(self, step: int, loss: float, seconds: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"{loss:.4f}", rate=f"{self._batch / seconds:,.0f} samples/s")

    def finished(self, result: TrainResult) -> None:
        from manyhands.facts.units import format_seconds

        self._stop()
        ratio = result.measured_seconds / result.predicted_seconds if result.predicted_seconds else float("inf")
        typer.echo(f"{result.steps} steps, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
        if result.test is not None and result.accuracy is not None:
            typer.echo(f"Accuracy on {result.test.samples} held-out samples: {result.accuracy:.1%}")
        elif result.test is not None and result.test.loss is not None:
            typer.echo(f"Loss on {result.test.samples} held-out samples: {result.test.loss:.4f}")
        typer.echo(
            f"A step took {format_seconds(result.measured_seconds)} (median), predicted "
            f"{format_seconds(result.predicted_seconds)}: {ratio:.2f} times the prediction; "
            f"{result.throughput:,.0f} samples/s"
        )
        typer.echo(f"Run folder: {result.folder} (checkpoint: {result.checkpoint.name}; trace.json opens in Perfetto)")


def _demo_note(planned: Planned) -> str:
    from manyhands.api.session import usable_cores

    count, cores = len(planned.plan.devices), usable_cores()
    note = f"This demonstration runs on {count} workers so that you see them work"
    if cores < count:
        note += f", though this machine has {cores} core(s) and fewer workers would be faster (--share auto decides)"
    return note + "."

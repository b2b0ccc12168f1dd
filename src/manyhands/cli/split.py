"""`manyhands split`: an edge and a cloud train one network together. `serve` is for the cloud, `train` for the edge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.dashboard import DashboardOption, dashboard_for
from manyhands.cli.following import Show, print_outcome
from manyhands.cli.options import (
    Confine,
    Data,
    JobInput,
    JobModel,
    Json,
    Out,
    Resume,
    Seed,
    Steps,
    batch_size_option,
    epochs_option,
    optimizer_option,
)
from manyhands.cli.tokens import TokenFile, ask_for_token, token_given

if TYPE_CHECKING:
    from manyhands.explaining.planned_run import PlannedRun
    from manyhands.split.job import SplitResult

app = typer.Typer(
    help="An edge, where the data is, and a cloud train one network over a changing link.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
MOST_ROWS = 20


@app.command("serve")
def serve(
    host: Annotated[str, typer.Option("--host", help="The address to listen at; 127.0.0.1: this machine only.")] = (
        "0.0.0.0"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free. Default: 7078.")] = 7078,
    token: Annotated[
        str,
        typer.Option(
            "--token", envvar="MANYHANDS_TOKEN", help="What new edges must know. Default: this machine's shared token."
        ),
    ] = "",
    token_file: TokenFile = "",
    name: Annotated[str, typer.Option("--name", help="What the cloud is called in a run.")] = "server",
    compute: Annotated[str, typer.Option("--compute", help="cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads to compute with. 0: all cores.")] = 0,
    slowdown: Annotated[
        float, typer.Option("--slowdown", min=1.0, help="Take so many times as long as it must.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="End after one edge.")] = False,
    silo: Annotated[
        str, typer.Option("--silo", help="FILE.npz of samples that only the cloud has: id, and target or inputs.")
    ] = "",
    confine: Confine = True,
) -> None:
    """Listen for edges, and work for one at a time until Ctrl-C. Encrypted beyond this machine."""
    from manyhands.facts.device import NAME_HINT
    from manyhands.facts.errors import BadValue
    from manyhands.session.joining import DEVICE_NAME, parse_compute, reachable, token_text

    compute = parse_compute(compute)
    if not DEVICE_NAME.fullmatch(name):
        raise BadValue(f"--name '{name:.80}' cannot name a device.", hint=NAME_HINT)
    from manyhands.engine.security import is_loopback
    from manyhands.runtime.confinement import confined
    from manyhands.runtime.shared_token import made_config_folder, shared_token

    def say(text: str) -> None:
        typer.echo(text, err=True)

    def listening(address: tuple[str, int], secret: str) -> None:
        shown = reachable(address[0])
        shown = f"[{shown}]" if ":" in shown else shown
        typer.echo(f"On the edge: manyhands split train --cloud {shown}:{address[1]} ...")
        typer.echo(token_text(secret))
        sys.stdout.flush()

    token = token_given(token, token_file) or shared_token(say)
    writes = [made_config_folder()] if not is_loopback(host) else []
    with confined(is_wanted=confine, reads=[silo] if silo else [], writes=writes, compute=compute) as confinement:
        from manyhands.runtime.joining import Joining
        from manyhands.runtime.serving import listen, load_everything

        load_everything()
        if silo:
            from manyhands.data.silo import Silo

            Silo.read(silo)  # what is wrong with it is said now, not to the first edge
        say(confinement.sentence)
        joining = Joining(
            host, port, token, name, compute, threads, slowdown=slowdown, silo=silo, confinement=confinement
        )
        listen(joining, report=say, once=once, on_listening=listening)


@app.command("train")
def train(
    model: JobModel = None,
    data: Data = None,
    cloud: Annotated[
        str | None,
        typer.Option("--cloud", help="HOST:PORT of `manyhands split serve`. Default: a process of this machine."),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            "--token",
            envvar="MANYHANDS_TOKEN",
            help="The cloud's token, as it printed it; for the first time only. Default: asked for.",
        ),
    ] = "",
    token_file: TokenFile = "",
    cut: Annotated[
        str | None,
        typer.Option(
            "--cut",
            help="auto: as the link is (default); edge: nothing; or the layer to cut before, by number or name.",
        ),
    ] = None,
    bits: Annotated[
        str | None, typer.Option("--bits", help="Of a packed feature: auto (default), 2, 4, 8, 16 or 32 (as it is).")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            help="How many updates a gradient may be late: 5 (default); 0: exactly as one device; none: no bound; by "
            "epoch, like 4@0,5@8; auto: as a calibration found it.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="grouped (default): K+1 batches, then the next; window: at most K+1 under way."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", help="FILE of `seconds mbit_per_second` that the link follows, or UP_FILE,DOWN_FILE."),
    ] = None,
    delay: Annotated[str | None, typer.Option("--delay", help="Of --trace: one way, like 25 ms.")] = None,
    rival: Annotated[
        str | None,
        typer.Option("--rival", help="Decide as another would: edge-only, jointdnn, k0, uncompressed or unbounded."),
    ] = None,
    edge_slowdown: Annotated[
        float | None, typer.Option("--edge-slowdown", help="The edge takes so many times as long, like 8 for a Pi.")
    ] = None,
    server_slowdown: Annotated[
        float | None, typer.Option("--server-slowdown", help="The server of this machine, likewise.")
    ] = None,
    calibrate: Annotated[
        float | None,
        typer.Option("--calibrate", help="Find the fewest bits of each cut first, in so many seconds; it is kept."),
    ] = None,
    allowed_drop: Annotated[
        float | None, typer.Option("--allowed-drop", help="Of --calibrate: the accuracy it may cost. Default: 0.01.")
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Of the edge, like 512 MB. Default: no limit.")] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="Where the labels are: edge (default) or cloud.")
    ] = None,
    edge_side: Annotated[
        str | None,
        typer.Option("--edge-side", help="upstream (default): inputs stay at the edge; downstream: outputs do."),
    ] = None,
    silos: Annotated[
        str | None,
        typer.Option(
            "--silos", help="Who has which inputs, like edge-a=left,edge-b=right,server=target: a process each."
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", help="HOST:PORT where the devices of --silos join: manyhands worker --silo FILE."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Begin with these: a run's folder, or a .safetensors file.")
    ] = None,
    freeze: Annotated[
        str | None, typer.Option("--freeze", help="Do not train so many first layers, or those before a layer's name.")
    ] = None,
    input: JobInput = None,
    epochs: Annotated[int | None, epochs_option(4)] = None,
    steps: Steps = None,
    batch_size: Annotated[int | None, batch_size_option(32)] = None,
    optimizer: Annotated[str | None, optimizer_option("SGD:lr=0.05,momentum=0.9")] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="The learning rate, in place of the optimiser's.")] = None,
    preset: Annotated[
        bool | None, typer.Option("--preset", help="Train as the paper did, by model and data (SPLIT Table 2).")
    ] = None,
    seed: Seed = None,
    granularity: Annotated[
        str | None, typer.Option("--granularity", help="Where the network may be cut: blocks (default) or operators.")
    ] = None,
    resume: Resume = "",
    out: Out = "",
    dashboard: DashboardOption = None,
    json: Json = False,
) -> None:
    """Train with an edge and a server, cut where the link makes it fastest. Without arguments: a demonstration."""
    from manyhands.cli.show import print_json
    from manyhands.engine.keys import Role
    from manyhands.job.resuming import is_typed_token
    from manyhands.runtime.device_book import knows_any
    from manyhands.split import config as split_typed

    is_typed = is_typed_token(token)
    token = token_given(token, token_file)
    if cloud and not token and not knows_any(Role.WORKER):
        token = ask_for_token("the cloud")
    given = {
        "model": model, "data": data, "cloud": cloud, "cut": cut, "bits": bits, "k": k, "mode": mode, "trace": trace,
        "delay": delay, "rival": rival, "edge_slowdown": edge_slowdown, "server_slowdown": server_slowdown,
        "memory": memory, "labels": labels, "edge_side": edge_side, "silos": silos, "listen": listen,
        "weights": weights, "freeze": freeze, "input": input, "epochs": epochs, "steps": steps,
        "batch_size": batch_size, "optimizer": optimizer, "lr": lr, "preset": preset, "seed": seed,
        "granularity": granularity, "calibrate": calibrate, "allowed_drop": allowed_drop,
        "has_typed_token": is_typed,
    }  # fmt: skip
    wish = split_typed.split_wish(given, resume=resume, out=out)
    with _Show(quiet=json) as show, dashboard_for(dashboard, show.say, quiet=json) as page:
        result = split_typed.split_job(
            wish, token=token, folder=Path(out) if out else None, resume=Path(resume) if resume else None,
            on_opened=page.show, on_planned=show.planned, on_step=show.step, say=show.say,
        )  # fmt: skip
    if json:
        print_json(to_dict(result))
    else:
        show.finished(result)


def to_dict(result: SplitResult) -> dict[str, Any]:
    """What --json prints."""
    from manyhands.split.job import change_facts

    return {
        "accuracy": result.accuracy,
        "test_loss": result.test.loss if result.test is not None else None,
        "losses": result.losses,
        "staleness": result.staleness,
        "cuts": [list(one) for one in result.cuts],
        "changes": [change_facts(one) for one in result.changes],
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes_moved": result.bytes_moved,
        "seconds": sum(result.step_seconds),
        "measured_seconds": result.measured_seconds,
        "predicted_seconds": result.predicted_seconds,
        "throughput": result.throughput,
        "steps": result.steps,
        "plan": result.plan.to_dict(),
        "folder": str(result.folder),
        "checkpoint": str(result.checkpoint),
        "problems": result.problems,
    }


class _Show(Show):
    """The outcome tells what was deployed when."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("manyhands split train", quiet=quiet)
        self._planned: PlannedRun | None = None

    def planned(self, planned: PlannedRun) -> None:
        self._planned = planned
        super().planned(planned)

    def finished(self, result: SplitResult) -> None:
        """What was deployed when, what travelled, how it went."""
        from collections import Counter

        from manyhands.cli.show import print_table
        from manyhands.facts.units import format_bytes, format_seconds
        from manyhands.split.job import deployments

        assert self._planned is not None
        rows = [
            [str(step), text, reason, format_seconds(seconds) if seconds else "", format_bytes(moved) if moved else ""]
            for step, text, reason, seconds, moved in deployments(result, self._planned.network)
        ]
        headings = ["from step", "deployed", "because", "changing took", "moved"]
        print_table("What ran where", headings, rows[:MOST_ROWS], numbers=["from step", "changing took", "moved"])
        if len(rows) > MOST_ROWS:
            typer.echo(f"... and {len(rows) - MOST_ROWS} more changes.")
        print_outcome(result)
        late = Counter(result.staleness)
        if late:
            told = ", ".join(f"{count} by {updates}" for updates, count in sorted(late.items()))
            typer.echo(f"Gradients late, in updates: {told}")
        typer.echo(
            f"Between edge and server: {format_bytes(result.bytes_up)} up, {format_bytes(result.bytes_down)} down"
            + (f", {format_bytes(result.bytes_moved)} of it layers that changed sides" if result.bytes_moved else "")
        )
        typer.echo(
            f"A step took {format_seconds(result.measured_seconds)} (median), predicted "
            f"{format_seconds(result.predicted_seconds)}; {result.throughput:,.0f} samples/s"
        )
        typer.echo(f"Run folder: {result.folder} (checkpoint: {result.checkpoint.name})")

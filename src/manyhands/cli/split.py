"""`manyhands split`: an edge and a cloud train one network together. `serve` is for the cloud, `train` for the edge."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.config_options import takes_options_of, with_token
from manyhands.cli.dashboard import dashboard_for
from manyhands.cli.following import Show, print_outcome
from manyhands.cli.options import Confine
from manyhands.cli.tokens import TokenFile, ask_for_token, token_given
from manyhands.split.config import SplitConfig

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
    compute: Annotated[str, typer.Option("--compute", help="cpu, cuda, cuda:1, xpu or mps.")] = "cpu",
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
    from manyhands.runtime.confinement import confined
    from manyhands.runtime.shared_token import made_config_folder, shared_token
    from manyhands.transport.security import is_loopback

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
@takes_options_of(SplitConfig)
def train(**arguments: Any) -> None:
    """Train with an edge and a server, cut where the link makes it fastest. Without arguments: a demonstration."""
    from manyhands.cli.show import print_json
    from manyhands.runtime.device_book import knows_any
    from manyhands.split.arguments import split_config
    from manyhands.split.named import split_by_name
    from manyhands.transport.keys import Role

    arguments = with_token(arguments)
    if arguments["cloud"] and not arguments["token"] and not knows_any(Role.WORKER):
        arguments["token"] = ask_for_token("the cloud")
    config = split_config(arguments)
    with _Show(quiet=config.json) as show, dashboard_for(config.dashboard, show.say, quiet=config.json) as page:
        result = split_by_name(
            replace(config, on_opened=page.show, on_planned=show.planned, on_step=show.step, say=show.say)
        )
    if config.json:
        print_json(to_dict(result))
    else:
        show.finished(result)


def to_dict(result: SplitResult) -> dict[str, Any]:
    """Return what --json prints."""
    from manyhands.split.job import change_facts

    return {
        "accuracy": result.accuracy,
        "test_loss": result.test.loss if result.test is not None else None,
        "losses": result.losses,
        "grad_norms": result.grad_norms,
        "staleness": result.staleness,
        "cuts": [list(cut) for cut in result.cuts],
        "changes": [change_facts(change) for change in result.changes],
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
    """Shows a split job; its outcome lists what was deployed when."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("manyhands split train", quiet=quiet)
        self._planned: PlannedRun | None = None

    def planned(self, planned: PlannedRun) -> None:
        self._planned = planned
        super().planned(planned)

    def finished(self, result: SplitResult) -> None:
        """Print what was deployed when, the bytes sent, and the outcome."""
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
            counts = ", ".join(f"{count} by {updates}" for updates, count in sorted(late.items()))
            typer.echo(f"Gradients late, in updates: {counts}")
        typer.echo(
            f"Between edge and server: {format_bytes(result.bytes_up)} up, {format_bytes(result.bytes_down)} down"
            + (f", {format_bytes(result.bytes_moved)} of it layers that changed sides" if result.bytes_moved else "")
        )
        typer.echo(
            f"A step took {format_seconds(result.measured_seconds)} (median), predicted "
            f"{format_seconds(result.predicted_seconds)}; {result.throughput:,.0f} samples/s"
        )
        typer.echo(f"Run folder: {result.folder} (checkpoint: {result.checkpoint.name})")

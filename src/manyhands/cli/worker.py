"""`manyhands worker`: this device joins a coordinator and works for it until it is told to leave."""

from __future__ import annotations

from typing import Annotated

import typer


def worker(
    join: Annotated[str, typer.Option("--join", help="The coordinator: HOST:PORT, as it printed it.")],
    token: Annotated[
        str, typer.Option("--token", envvar="MANYHANDS_TOKEN", help="The coordinator's token.", show_envvar=True)
    ] = "",
    name: Annotated[str, typer.Option("--name", help="What this device is called. Default: its host name.")] = "",
    compute: Annotated[str, typer.Option("--compute", help="cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads to compute with. 0: all cores.")] = 0,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to keep trying to reach the coordinator.")] = 60.0,
    parent: Annotated[int, typer.Option("--parent", hidden=True)] = 0,
    encrypted: Annotated[bool | None, typer.Option("--encrypted/--plain", hidden=True)] = None,
) -> None:
    """Join a coordinator and work for it until it ends (exit code 0) or is lost (11). Ctrl-C leaves."""
    from manyhands.runtime.processes import die_with_parent

    if parent:
        die_with_parent(parent)
    from manyhands.api.joining import check_joining, parse_address, parse_compute

    host, port = parse_address(join)
    compute = parse_compute(compute)
    check_joining(token, name)
    from manyhands.runtime.worker import Joining, Worker

    worker = Worker(Joining(host, port, token, name, compute, threads, wait, encrypted, parent))
    if not parent:
        typer.echo(f"Joining {join} as {worker.endpoint.name}, from {worker.channel.local_host}. Ctrl-C leaves.")
    worker.run()
    if not parent:
        typer.echo(f"The coordinator at {join} has ended the run; {worker.endpoint.name} has left.")

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
    """Join a coordinator and work for it."""
    from manyhands.runtime.processes import die_with_parent

    if parent:
        die_with_parent(parent)
    from manyhands.api.joining import parse_address, parse_compute
    from manyhands.runtime.worker import Joining, Worker

    host, port = parse_address(join)
    joining = Joining(host, port, token, name, parse_compute(compute), threads, wait, encrypted, parent)
    worker = Worker(joining)
    if not parent:
        typer.echo(f"Joined {join} as {worker.endpoint.name}, from {worker.channel.local_host}. Ctrl-C leaves.")
    worker.run()

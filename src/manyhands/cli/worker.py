"""`manyhands worker`: this device joins a coordinator and works for it until it is asked to leave."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from manyhands.cli.options import Confine
from manyhands.cli.show import plain
from manyhands.cli.tokens import TokenFile, ask_for_token, token_given
from manyhands.facts.errors import BadValue


def worker(
    join: Annotated[
        str, typer.Option("--join", help="The coordinator: HOST:PORT. Default: the one on this network that fits.")
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            "--token", envvar="MANYHANDS_TOKEN", show_envvar=True,
            help="The coordinator's token, as it printed it; for the first time only. Default: asked for.",
        ),
    ] = "",
    token_file: TokenFile = "",
    name: Annotated[str, typer.Option("--name", help="What this device is called. Default: its host name.")] = "",
    compute: Annotated[str, typer.Option("--compute", help="cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads to compute with. 0: all cores.")] = 0,
    slots: Annotated[
        int, typer.Option("--slots", min=1, max=16, help="Workers on this device, NAME.1 and so on, sharing memory.")
    ] = 1,
    wait: Annotated[
        float,
        typer.Option("--wait", help="Seconds to keep trying to reach the coordinator, also when it was lost."),
    ] = 60.0,
    stay: Annotated[
        bool, typer.Option("--stay", help="Never end: when a run is over, wait for the next coordinator.")
    ] = False,
    slowdown: Annotated[
        float, typer.Option("--slowdown", help="Compute so many times slower: this device stands for a slower one.")
    ] = 1.0,
    silo: Annotated[
        str, typer.Option("--silo", help="FILE.npz of samples that only this device has: id, and inputs or target.")
    ] = "",
    allow_optimizer: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-optimizer", help="package.Class of an optimizer that jobs may name, beside PyTorch's. Repeatable."
        ),
    ] = None,
    interface: Annotated[
        str,
        typer.Option("--interface", help="Meet other workers on this interface, like tailscale0. Default: any way."),
    ] = "",
    relay: Annotated[
        bool, typer.Option("--relay", help="Relay between devices that do not reach each other, before others do.")
    ] = False,
    confine: Confine = True,
    print_service: Annotated[
        bool, typer.Option("--print-service", help="Print a systemd unit for a worker with these options, and end.")
    ] = False,
    timeout_factor: Annotated[float, typer.Option("--patience", hidden=True)] = 1.0,
    parent: Annotated[int, typer.Option("--parent", hidden=True)] = 0,
    encrypted: Annotated[bool | None, typer.Option("--encrypted/--plain", hidden=True)] = None,
) -> None:  # fmt: skip
    """Join a coordinator and work for it until it ends (exit code 0) or is lost (11).

    Ctrl-C or SIGTERM: hands over what it has to the others, then leaves (0); a second one leaves at once.
    """
    from manyhands.runtime.processes import die_with_parent, is_to_load_everything

    is_typed = not parent
    if parent:
        die_with_parent(parent)
    from manyhands.facts.allowed_optimizers import allow_optimizers
    from manyhands.session.joining import check_joining, check_slowdown, check_wait, parse_address, parse_compute

    allow_optimizers(allow_optimizer or ())
    host, port = parse_address(join) if join else ("", 0)
    compute = parse_compute(compute)
    check_slowdown(slowdown)
    check_wait(wait)
    if interface and not print_service:
        from manyhands.runtime.identity import interface_address

        interface_address(interface)  # fails now rather than when a coordinator was found
    if slots > 1 and compute != "cpu":
        raise BadValue(f"--slots {slots} is for the CPU; --compute is {compute}.", hint="Start a worker for each GPU.")
    if print_service:
        from manyhands.session.joining import service_unit

        check_joining("", name, is_known=True)
        options = {"name": name, "join": join, "threads": str(threads or ""), "silo": silo and os.path.abspath(silo)}
        options |= {"slots": str(slots) if slots > 1 else "", "compute": compute if compute != "cpu" else ""}
        options |= {"wait": f"{wait:g}" if wait != 60 else "", "slowdown": f"{slowdown:g}" if slowdown > 1 else ""}
        options |= {"interface": interface, "relay": "yes" if relay else ""}
        program = (sys.executable, "-P", "-m", "manyhands")
        typer.echo(service_unit(options, program, confine=confine), nl=False)
        return
    from manyhands.runtime import shared_token
    from manyhands.runtime.device_book import knows_any
    from manyhands.transport.keys import Role

    token = token_given(token, token_file) or shared_token.known_token()
    is_known = not token and knows_any(Role.COORDINATOR)
    if not token and not is_known:
        token = ask_for_token("the coordinator")
    check_joining(token, name, is_known=is_known)
    from manyhands.runtime.confinement import confined
    from manyhands.transport.security import is_loopback

    is_here = bool(host) and is_loopback(host)  # else it remembers the coordinator's key
    writes = [] if is_here else [shared_token.made_config_folder()]
    with confined(is_wanted=confine, reads=[silo] if silo else [], writes=writes, compute=compute) as confinement:
        from manyhands.runtime.joining import Joining
        from manyhands.runtime.service import serve
        from manyhands.runtime.serving import load_everything

        if is_typed or is_to_load_everything():
            load_everything()
        is_named = bool(name)
        if slots > 1:
            import socket

            from manyhands.runtime.processes import divide_into

            name, parent = divide_into(name or socket.gethostname(), slots)
        joining = Joining(
            host, port, token, name, compute, threads, wait, encrypted, timeout_factor, parent, slowdown, silo,
            is_named, confinement=confinement, interface=interface, is_relay=relay,
        )  # fmt: skip
        say = (lambda text: typer.echo(plain(text))) if is_typed else None
        if say is not None:
            say(confinement.sentence)
        serve(joining, say, stay=stay, rejoin=is_typed)  # the process that started it starts another

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

GPUS = "CUDA_VISIBLE_DEVICES"


def worker(
    join: Annotated[
        str,
        typer.Option(
            "--join", envvar="MANYHANDS_JOIN", show_envvar=True,
            help="The coordinator: HOST:PORT. Default: under torchrun or Slurm that of the same launch, else the one "
            "on this network that fits.",
        ),
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            "--token", envvar="MANYHANDS_TOKEN", show_envvar=True,
            help="The coordinator's token, as it printed it; for the first time only. Default: asked for.",
        ),
    ] = "",
    token_file: TokenFile = "",
    name: Annotated[
        str,
        typer.Option(
            "--name", envvar="MANYHANDS_NAME", show_envvar=True,
            help="What this device is called. Default: its host name.",
        ),
    ] = "",
    compute: Annotated[
        str,
        typer.Option(
            "--compute", envvar="MANYHANDS_COMPUTE", show_envvar=True,
            help="cpu, cuda, cuda:1, xpu or mps. Under torchrun or Slurm cuda is the GPU of the local rank.",
        ),
    ] = "cpu",
    threads: Annotated[
        int,
        typer.Option(
            "--threads", min=0, envvar="MANYHANDS_THREADS", show_envvar=True,
            help="Threads to compute with. 0: all cores.",
        ),
    ] = 0,
    slots: Annotated[
        int,
        typer.Option(
            "--slots", min=1, max=16, envvar="MANYHANDS_SLOTS", show_envvar=True,
            help="Workers on this device, NAME.1 and so on, sharing memory.",
        ),
    ] = 1,
    data_port: Annotated[
        int,
        typer.Option(
            "--data-port", envvar="MANYHANDS_DATA_PORT", show_envvar=True,
            help="The port at which other devices connect to this one. 0: any that is free. With --slots, and with "
            "several ranks of a launcher on a machine: the first.",
        ),
    ] = 0,
    advertise: Annotated[
        str,
        typer.Option(
            "--advertise", envvar="MANYHANDS_ADVERTISE", show_envvar=True,
            help="Where other devices reach this one: an address of this machine, or HOST:PORT, from which another "
            "forwards to --data-port. Default: the address from which it reaches the coordinator.",
        ),
    ] = "",
    health_port: Annotated[
        str,
        typer.Option(
            "--health-port", envvar="MANYHANDS_HEALTH_PORT", show_envvar=True,
            help="Answer GET /healthz and /readyz at [HOST:]PORT. HOST: 127.0.0.1, or 0.0.0.0 for others to ask.",
        ),
    ] = "",
    grace: Annotated[
        float,
        typer.Option(
            "--grace", min=0, envvar="MANYHANDS_GRACE", show_envvar=True,
            help="Seconds to hand over after Ctrl-C or SIGTERM; then it ends (exit code 143). 0: as long as it takes.",
        ),
    ] = 0.0,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", envvar="MANYHANDS_WAIT", show_envvar=True,
            help="Seconds to keep trying to reach the coordinator, also when it was lost.",
        ),
    ] = 60.0,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", envvar="MANYHANDS_STAY", show_envvar=True,
            help="Never end: when a run is over, wait for the next coordinator.",
        ),
    ] = False,
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher", envvar="MANYHANDS_LAUNCHER", show_envvar=True,
            help="Whose variables tell rank and coordinator: torchrun, slurm, none, or auto: whichever are set.",
        ),
    ] = "auto",
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
    from manyhands.runtime.addresses import of_slot
    from manyhands.session.joining import check_joining, check_slowdown, check_wait, parse_address, parse_compute
    from manyhands.session.launching import check_data_port, launched, parse_advertise, parse_health_port

    allow_optimizers(allow_optimizer or ())
    host, port = parse_address(join) if join else ("", 0)
    compute = parse_compute(compute)
    check_slowdown(slowdown)
    check_wait(wait)
    check_data_port(data_port, slots)
    advertised = parse_advertise(advertise) if advertise else None
    health_address = parse_health_port(health_port, slots) if health_port else None
    if advertised is not None and advertised.port:
        check_data_port(advertised.port, slots)
        data_port = data_port or advertised.port
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
        options |= {"data-port": str(data_port or ""), "advertise": advertise, "health-port": health_port}
        options |= {"grace": f"{grace:g}" if grace else ""}
        options |= {"interface": interface, "relay": "yes" if relay else ""}
        program = (sys.executable, "-P", "-m", "manyhands")
        typer.echo(service_unit(options, program, confine=confine), nl=False)
        return
    is_named = bool(name)
    launch = launched(os.environ, launcher) if is_typed else None
    if launch is not None:
        import socket

        name, compute = name or launch.name(socket.gethostname()), launch.compute(compute, os.environ.get(GPUS))
        if not join:
            host, port = launch.host, launch.port
        check_data_port(data_port, launch.local_ranks * slots)
        advertised, data_port = of_slot(launch.local_rank * slots + 1, advertised or launch.advertised(), data_port)
        if health_address is not None and health_address[1]:
            health_address = health_address[0], health_address[1] + launch.local_rank
    from manyhands.runtime import shared_token
    from manyhands.runtime.device_book import knows_any
    from manyhands.transport.keys import Role

    token = token_given(token, token_file) or shared_token.known_token()
    is_known = not token and knows_any(Role.COORDINATOR)
    if not token and not is_known:
        token = ask_for_token("the coordinator")
    check_joining(token, name, is_known=is_known)
    from manyhands.runtime.confinement import confined
    from manyhands.runtime.health import Readiness, answering_health
    from manyhands.transport.security import is_loopback

    is_here = bool(host) and is_loopback(host)  # else it remembers the coordinator's key
    writes = [] if is_here else [shared_token.made_config_folder()]
    readiness = Readiness()
    with (
        confined(is_wanted=confine, reads=[silo] if silo else [], writes=writes, compute=compute) as confinement,
        answering_health(health_address, readiness),
    ):
        from manyhands.runtime.joining import Joining
        from manyhands.runtime.service import serve
        from manyhands.runtime.serving import load_everything

        say = (lambda text: typer.echo(plain(text))) if is_typed else None
        if say is not None:
            say(confinement.sentence)
            if launch is not None:
                say(launch.text)
        if is_typed or is_to_load_everything():
            load_everything()
        if slots > 1:
            import socket

            from manyhands.runtime.processes import divide_into

            name, parent = divide_into(name or socket.gethostname(), slots)
            advertised, data_port = of_slot(int(name.rpartition(".")[2]), advertised, data_port)
        joining = Joining(
            host, port, token, name, compute, threads, wait, encrypted, timeout_factor, parent, slowdown, silo,
            is_named, confinement=confinement, data_port=data_port, advertised=advertised, grace_seconds=grace,
            interface=interface, is_relay=relay,
        )  # fmt: skip
        # the process that started it starts another
        serve(joining, say, stay=stay, rejoin=is_typed, readiness=readiness)

"""`manyhands dashboard`: a run as a page in a browser, live or finished; and the page that other commands open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.options import Run
from manyhands.cli.status import run_named

if TYPE_CHECKING:
    from manyhands.dashboard.server import Dashboard

OFF = "off"
DashboardOption = Annotated[
    str | None,
    typer.Option(
        "--dashboard",
        metavar="HOST:PORT|off",
        help="Where the run is shown to browsers; beyond this machine encrypted and with a token. Default: on this "
        "machine alone, near port 7070 (with --json: off).",
    ),
]


def dashboard(
    run: Run = "",
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where it is served: 0.0.0.0:7070 for other machines, encrypted and with a token. Default: this "
            "machine alone, near port 7070.",
        ),
    ] = "",
    open_it: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
) -> None:
    """Show a run in a browser, live or finished, until Ctrl-C."""
    folder = run_named(run)
    with opened(listen, folder) as server:
        typer.echo(f"{folder}: {server.url}")
        if server.is_encrypted:
            typer.echo("Browsers warn about its certificate once, because it is self-signed.")
        typer.echo("Ctrl-C ends it; the run is not affected.", err=True)
        if open_it and server.is_encrypted:
            typer.echo("Open it yourself: a browser started from here would show the token to every user.", err=True)
        elif open_it:
            import webbrowser

            webbrowser.open(server.url)
        threading.Event().wait()


class Page:
    """The page that shows a run, if there is one."""

    def __init__(self, dashboard: Dashboard | None) -> None:
        self._dashboard = dashboard

    def show(self, folder: Path) -> str | None:
        """Show a run's folder from now on. Returns the address without its token, which only the user who started it
        gets."""
        if self._dashboard is None:
            return None
        self._dashboard.show(folder)
        return self._dashboard.url.partition("?")[0]


@contextlib.contextmanager
def dashboard_for(option: str | None, say: Callable[[str], None], *, quiet: bool = False) -> Iterator[Page]:
    """Serve the page of a command that is about to run, and print its address. If none was asked for and none can be
    opened, that is no error."""
    from manyhands.facts.errors import AddressTaken

    with contextlib.ExitStack() as stack:
        server = None
        if option != OFF and not (option is None and quiet):
            try:
                server = stack.enter_context(opened(option or "", None))
            except AddressTaken:
                if option is not None:
                    raise
        if server is not None:
            say(f"Dashboard: {server.url}")
        yield Page(server)


def opened(address: str, folder: Path | None) -> Dashboard:
    """Start serving at an address, or near the usual port."""
    from manyhands.dashboard.server import PORTS, Dashboard, near_usual_port
    from manyhands.session.joining import parse_address, reachable

    if address:
        host, port = parse_address(address, PORTS[0])
        return Dashboard((host, port), folder, shown_host=reachable(host))
    return near_usual_port(folder)

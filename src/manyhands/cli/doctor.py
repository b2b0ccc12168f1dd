"""`manyhands doctor`: what would keep a run from working, on this machine and between machines, with the fix to
type."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.options import Json
from manyhands.cli.show import plain
from manyhands.cli.tokens import TokenFile, token_given

if TYPE_CHECKING:
    from manyhands.doctor.check import Check, Findings

MOST_GOOD_LINKS = 12
"""With more good links, only the slowest are shown."""


def doctor(
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers to start on this machine. Default: 2. 0: only look at it.")
    ] = None,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT where workers of other machines join.")] = "",
    devices: Annotated[
        str, typer.Option("--devices", "-n", help="With --listen: how many workers it waits for; of 2:6, two.")
    ] = "1",
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A cluster.yaml whose devices join by name, or local:N.")
    ] = "",
    lab: Annotated[str, typer.Option("--lab", help="A preset or cluster.yaml to play on this machine (as root).")] = "",
    join: Annotated[str, typer.Option("--join", help="On a device: can it reach the coordinator at HOST:PORT?")] = "",
    token: Annotated[
        str,
        typer.Option(
            "--token",
            envvar="MANYHANDS_TOKEN",
            help="Token that new workers must know. Default: this user's shared token.",
        ),
    ] = "",
    token_file: TokenFile = "",
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait for workers to join.")] = 120.0,
    json: Json = False,
) -> None:
    """Check this machine, its workers and the network between them. Exit code 19: something would break a run."""
    from manyhands.cli.show import print_json, working
    from manyhands.doctor.report import DoctorOptions, examine
    from manyhands.session.joining import parse_devices

    options = DoctorOptions(
        workers, cluster, listen, parse_devices(devices)[0], token_given(token, token_file), lab, join, wait
    )
    with working("manyhands doctor") as spin:

        def say(text: str) -> None:
            if text.startswith("Waiting"):  # what is to be typed on other devices
                typer.echo(text, err=True)
            else:
                spin(text)

        findings = examine(options, say)
    if json:
        print_json(findings.to_dict())
    else:
        _show(findings)
    if findings.broken:
        _fail(findings, is_fix_shown=not json)


def _show(findings: Findings) -> None:
    shown, left_out = _chosen(findings)
    if sys.stdout.isatty():
        _print_table(shown)
    else:
        for check in shown:
            typer.echo(_line(check))
    if left_out:
        typer.echo(f"{left_out} more links are ok, and faster than these; --json has all.")
    counts = f"{len(findings.broken)} broken, {len(findings.warnings)} warning(s), {len(findings.checks)} checks."
    typer.echo(f"{counts} {'' if findings.broken else 'A run would work here.'}".rstrip())


def _chosen(findings: Findings) -> tuple[list[Check], int]:
    """Return the checks to show, with only the slowest of many good links, and how many are left out."""
    good = [check for check in findings.checks if check.subject == "link" and check.state == "ok"]
    if len(good) <= MOST_GOOD_LINKS:
        return findings.checks, 0
    rates = {f"{link.source}, {link.target}": link.bytes_per_second for link in findings.links}
    fast = sorted(good, key=lambda check: rates.get(check.where, 0.0))[MOST_GOOD_LINKS:]
    return [check for check in findings.checks if check not in fast], len(fast)


def _line(check: Check) -> str:
    """Return a check as text for a log: the state first, then everything; each command to type on a line of its own."""
    text = f"{check.state:<8} {check.subject} ({check.where}): {check.found}"
    if check.needed and check.state != "ok":
        text += f" [needed: {check.needed}]"
    if check.fix:
        text += "".join(f"\n         fix: {line}" for line in check.fix.splitlines())
    return plain(text)


def _print_table(checks: list[Check]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "warning": "yellow", "broken": "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "check", "where", "found", "needed"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        state = f"[{colours[check.state]}]{check.state}[/]"
        table.add_row(state, check.subject, *(escape(plain(cell)) for cell in (check.where, check.found, check.needed)))
    Console().print(table)
    for check in checks:  # not in the table: what is to be typed must be in one piece
        if check.fix:
            typer.echo(plain(f"{check.subject} ({check.where}):"))
            typer.echo(plain("".join(f"  {line}\n" for line in check.fix.splitlines())))


def _fail(findings: Findings, *, is_fix_shown: bool) -> None:
    from manyhands.facts.errors import Unfit

    first = findings.broken[0]
    more = f" and {len(findings.broken) - 1} more" if len(findings.broken) > 1 else ""
    raise Unfit(
        f"A run would not work: {first.subject} ({first.where}): {first.found}{more}.",
        hint="" if is_fix_shown else first.fix,
    )

"""`manyhands status`: the state of a run, once. A few lines for people, one JSON document for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.live_rows import event_text, event_time, percent, state_text, step_text
from manyhands.cli.options import Json, Run
from manyhands.cli.show import plain

if TYPE_CHECKING:
    from manyhands.observe.watching import View

FAILED = 20
"""The exit code for a run that failed, or whose process is gone without a report."""
LAST_EVENTS = 10


def status(
    run: Run = "",
    pid: Annotated[
        str,
        typer.Option("--pid", help="Print only the process id of this device's worker, which the run started here."),
    ] = "",
    json: Json = False,
) -> None:
    """Show the state of a run. Exit code 0: it runs, ended, or was stopped; 20: it failed; 4: there is none."""
    from manyhands.observe.watching import RunWatch

    view = RunWatch(run_named(run)).look()
    if pid:
        typer.echo(worker_pid(view, pid))
        return
    if json:
        from manyhands.cli.show import print_json

        print_json(to_dict(view))
    else:
        for line in status_lines(view):
            typer.echo(line)
    if view.live.state == "failed":
        raise typer.Exit(FAILED)


def run_named(text: str) -> Path:
    """Return a run's folder, by its path or its name in runs/. Without either: the newest that is running, or else the
    newest, wherever it was written."""
    from manyhands.facts.errors import BadFile
    from manyhands.observe.watching import RUNS, is_run, known_runs, newest_live

    if not text:
        folders = known_runs()
        folder = newest_live(folders) or next(iter(folders), None)
        if folder is None:
            raise BadFile(
                f"There is no run in {RUNS.absolute()}, and none is known elsewhere.",
                hint="Start one: manyhands train\nOr name its folder: manyhands status FOLDER",
            )
        return folder
    for folder in (Path(text), RUNS / text):
        if folder.is_dir() and is_run(folder):
            return folder
    folders = known_runs()
    hint = f"There are: {', '.join(map(str, folders[:5]))}" if folders else "Start one: manyhands train"
    raise BadFile(f"{text}: there is no run in such a folder.", hint=hint)


def worker_pid(view: View, name: str) -> int:
    """Return the process id of one of a run's workers, as the run recorded it, so that `kill` ends no other run's
    worker."""
    import socket

    from manyhands.facts.errors import BadValue, unknown

    devices = {device.name: device for device in view.live.devices}
    if name not in devices:
        raise unknown(f"device of {view.folder}", name, devices)
    if not view.is_live:
        raise BadValue(f"{view.folder} does not go on: {view.live.state}. Its workers have ended.")
    device = devices[name]
    if view.live.host != socket.gethostname() or not device.pid:
        where = (
            f"Its state is {device.state}" if view.live.host == socket.gethostname() else f"It ran on {view.live.host}"
        )
        raise BadValue(
            f"{name} is not a running process that {view.folder} started on this machine. {where}.",
            hint="A worker that joined has its process id where it was started.",
        )
    return device.pid


def to_dict(view: View) -> dict[str, Any]:
    """Return what --json prints: the run as live.json has it, and its last events."""
    import msgspec

    live = msgspec.to_builtins(view.live)
    live.pop("round", None)  # a picture's worth of numbers: round.json has it
    return {
        "folder": str(view.folder),
        "is_live": view.is_live,
        **live,
        "events": view.events[-LAST_EVENTS:],
    }


def status_lines(view: View) -> list[str]:
    live = view.live
    lines = [f"{view.folder}: {live.model}, {plain(state_text(view))}", step_text(live)]
    for device in live.devices:
        stages = f", stage {', '.join(map(str, device.stages))}" if device.stages else ""
        busy = f", {percent(device.busy)} busy" if device.busy is not None else ""
        reason = f": {device.reason}" if device.reason else ""
        process = f", process {device.pid}" if device.pid and view.is_live else ""
        lines.append(f"  {plain(device.name)}: {plain(device.state + reason)}{stages}{busy}{process}")
    for event in [each for each in view.events if event_text(each)][-3:]:
        lines.append(f"  {event_time(event)} {event_text(event)}")
    if live.dashboard and view.is_live:
        lines.append(f"Dashboard: {live.dashboard}")
    return [plain(line) for line in lines]

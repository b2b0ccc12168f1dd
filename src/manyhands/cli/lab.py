"""`manyhands lab`: a cluster in a box. Brings it up, runs commands on its devices, breaks them, takes it down."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.options import Json

if TYPE_CHECKING:
    from manyhands.lab.lab import Lab

app = typer.Typer(
    help="Edge clusters in a box: slow, small devices behind real links, on this machine. Needs Linux and root.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LabOption = Annotated[str, typer.Option("--lab", "-l", help="Which lab. Default: the only one that is up.")]
DeviceArgument = Annotated[str, typer.Argument(help="A device of the lab.")]
Scale = Annotated[
    float | None,
    typer.Option("--scale", help="So many times slower than in life. Default: what this machine's cores can play."),
]
Slots = Annotated[int, typer.Option("--slots", min=1, max=16, help="Workers on each device.")]
Traces = Annotated[
    list[str] | None,
    typer.Option("--trace", help="FILE or DEVICE=FILE of 'seconds Mbit/s' lines that the device's port follows."),
]


@app.command("up")
def up(
    source: Annotated[str, typer.Argument(help="A preset (see `manyhands devices`) or a cluster.yaml.")],
    name: Annotated[str, typer.Option("--name", help="What to call it. Default: like the preset.")] = "",
    scale: Scale = None,
    slots: Slots = 1,
    trace: Traces = None,
) -> None:
    """Bring a lab up; it stays until `manyhands lab down`."""
    from manyhands.api.labs import bring_up, lab_cluster

    asked = lab_cluster(source, scale=scale, slots=slots, traces=tuple(trace or ()))
    lab = bring_up(asked, name=name, source=source)
    _print_status(lab)
    typer.echo(f"Run on every device: manyhands lab run -- hostname -I     Take it down: manyhands lab down {lab.name}")


@app.command("down")
def down(
    name: Annotated[str, typer.Argument(help="Which lab. Default: the only one.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every lab of this machine.")] = False,
) -> None:
    """Take a lab down, also one of which only a part is left."""
    from manyhands.facts.errors import LabError
    from manyhands.lab.lab import labs, missing, take_down
    from manyhands.lab.record import lab_name

    if why := missing():
        raise LabError(f"There can be no lab here: {why}")
    there = labs()
    wanted = there if everything else [lab_name(name)] if name else there
    if len(wanted) > 1 and not everything:
        raise LabError(f"Several labs are up: {', '.join(there)}.", hint=f"Write: manyhands lab down {there[0]}")
    for one in wanted:
        if one not in there:
            raise LabError(
                f"There is no lab called '{one}'.", hint=f"There are: {', '.join(there)}." if there else "None is up."
            )
        take_down(one)
        typer.echo(f"{one} is down.")
    if not wanted:
        typer.echo("No lab is up.")


@app.command("status")
def status(
    name: Annotated[str, typer.Argument(help="Which lab. Default: the only one.")] = "", json: Json = False
) -> None:
    """The devices of a lab: their network, processor and memory, as they are now."""
    from manyhands.lab.lab import Lab

    lab = Lab.find(name)
    if json:
        from manyhands.cli.show import print_json

        print_json(_status_document(lab))
    else:
        _print_status(lab)


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its words, after --.")],
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="Only on this device (or several).")
    ] = None,
    lab: LabOption = "",
) -> None:
    """Run a command on each device at once, or on some; the largest exit code is this command's own."""
    from manyhands.lab.lab import DESK, Lab

    found = Lab.find(lab)
    devices = device or list(found.played.network.names)
    words = [found.words(one) for one in devices]  # unknown names are found before anything starts
    if len(devices) == 1:
        sys.exit(_code(subprocess.call([*words[0], *command])))
    codes: dict[str, int] = {}
    threads = [
        threading.Thread(target=_run_one, args=(one, [*before, *command], codes, max(map(len, (*devices, DESK)))))
        for one, before in zip(devices, words)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(max(codes.values(), default=0))


def _run_one(device: str, words: list[str], codes: dict[str, int], width: int) -> None:
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{device:<{width}}  {line}", end="", flush=True)
    codes[device] = _code(process.returncode)


def _code(returned: int) -> int:
    """As a shell says it: 137 for a command that was killed."""
    return returned if returned >= 0 else 128 - returned


@app.command("cut")
def cut(device: DeviceArgument, lab: LabOption = "") -> None:
    """Pull a device's cable: nobody is told."""
    _find(lab).cut(device)
    typer.echo(f"{device} is cut off. Back: manyhands lab heal {device}")


@app.command("freeze")
def freeze(device: DeviceArgument, lab: LabOption = "") -> None:
    """Stop everything on a device; its connections stay open."""
    _find(lab).freeze(device)
    typer.echo(f"{device} is frozen. Back: manyhands lab heal {device}")


@app.command("kill")
def kill(device: DeviceArgument, lab: LabOption = "") -> None:
    """Kill everything on a device at once."""
    _find(lab).kill(device)
    typer.echo(f"Everything on {device} is dead.")


@app.command("slow")
def slow(
    device: DeviceArgument,
    factor: Annotated[float, typer.Argument(help="How much of its speed is left, like 0.5.")],
    lab: LabOption = "",
) -> None:
    """Make a device slower."""
    _find(lab).slow(device, factor)
    typer.echo(f"{device} has {factor:g} of its speed. Back: manyhands lab heal {device}")


@app.command("heal")
def heal(
    device: Annotated[str, typer.Argument(help="A device of the lab. Default: all.")] = "", lab: LabOption = ""
) -> None:
    """Undo cut, freeze and slow, on one device or all."""
    found = _find(lab)
    for name in [device] if device else found.played.network.names:
        found.heal(name)
    typer.echo(f"{device or 'Every device'} is as it was brought up.")


@app.command("check")
def check(
    name: Annotated[str, typer.Argument(help="Which lab. Default: the only one.")] = "", json: Json = False
) -> None:
    """Measure what a lab gives against what was asked for; fails beyond 10 %. Nothing else should run in it."""
    from manyhands.cli.show import print_json, print_table, working
    from manyhands.facts.errors import LabError
    from manyhands.lab.check import TOLERANCE
    from manyhands.lab.check import check as check_lab

    lab = _find(name)
    with working("measuring") as say:
        found = list(check_lab(lab, say))
    if json:
        print_json(
            [
                {"what": one.what, "who": one.who, "unit": one.unit, "asked": one.asked, "got": one.got,
                 "error": one.error if one.got is not None else None, "good": one.is_good, "note": one.note}
                for one in found
            ]
        )  # fmt: skip
    else:
        rows = [
            [one.what, one.who, _shown(one.asked, one.unit), _shown(one.got, one.unit) or one.note or "nothing",
             f"{one.error:.1%}" if one.got is not None else "", "" if one.is_good else "BAD"]
            for one in found
        ]  # fmt: skip
        headings = ["what", "device", "asked", "got", "off by", ""]
        print_table(f"Lab {lab.name}, {_scale(lab)}", headings, rows, numbers=["asked", "got", "off by"])
    bad = [one for one in found if not one.is_good]
    if bad:
        raise LabError(
            f"{len(bad)} of {len(found)} are off by more than {TOLERANCE:.0%}: "
            f"{', '.join(f'{one.what} of {one.who}' for one in bad[:5])}.",
            hint="Is something else running on this machine? A larger --scale leaves more room.",
        )


def _find(name: str) -> Lab:
    from manyhands.lab.lab import Lab

    return Lab.find(name)


def _scale(lab: Lab) -> str:
    from manyhands.facts.lab import scale_text

    return scale_text(lab.played.scale)


def _shown(number: float | None, unit: str) -> str:
    from manyhands.facts.units import format_bytes, format_rate, format_seconds

    if number is None:
        return ""
    if unit == "B/s":
        return format_rate(number)
    if unit == "s":
        return format_seconds(number)
    return format_bytes(int(number)) if unit == "B" else f"{number:.1%} of a core"


def _rate(number: float) -> str:
    from manyhands.facts.units import format_rate

    return format_rate(number) if number < float("inf") else "unlimited"


def _status_document(lab: Lab) -> dict[str, Any]:
    import msgspec

    devices = [
        {**msgspec.to_builtins(one), "memory_limit_bytes": lab.played.seat(one.name).memory_bytes}
        for one in lab.status()
    ]
    return {
        "name": lab.name, "source": lab.known.source, "scale": lab.played.scale, "slots": lab.played.slots,
        "kept": lab.is_kept, "traces": dict(lab.played.traces), "devices": devices,
    }  # fmt: skip


def _print_status(lab: Lab) -> None:
    from manyhands.cli.show import print_table
    from manyhands.facts.units import format_bytes

    rows = []
    for one in lab.status():
        own, group = lab.played.network.device(one.name), one.group
        state = ["cut"] * one.is_cut + ["frozen"] * group.is_frozen
        state += [f"{group.oom_kills} killed for memory"] * bool(group.oom_kills)
        rows.append(
            [one.name, one.address, f"{one.share:.1%} of core {','.join(map(str, one.cores))}",
             f"{format_bytes(group.memory_bytes)} of {format_bytes(lab.played.seat(one.name).memory_bytes)}",
             _rate(own.up_bytes_per_second), _rate(own.down_bytes_per_second), str(one.processes),
             ", ".join(state) or "well"]
        )  # fmt: skip
    headings = ["device", "address", "speed", "memory", "up", "down", "processes", "state"]
    print_table(f"Lab {lab.name}, {_scale(lab)}", headings, rows, numbers=["memory", "up", "down", "processes"])
    if not lab.is_kept:
        typer.echo(f"Its keeper is gone: links with a delay carry nothing. Take it down: manyhands lab down {lab.name}")

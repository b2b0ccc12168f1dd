"""`manyhands lab`: a cluster in a box. Brings it up, runs commands on its devices, breaks them, takes it down."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from manyhands.cli.options import Json

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster
    from manyhands.lab.lab import DeviceStatus, Lab

BROKEN_PIPE = 141
"""The exit code of a shell's command whose reader has gone."""
SLOWED = 0.99
"""A device with less of its share than this was slowed; the kernel's quota is in whole microseconds."""

app = typer.Typer(
    help="Edge clusters in a box: slow, small devices behind real links, on this machine. Needs Linux and root.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

LabOption = Annotated[str, typer.Option("--lab", "-l", help="Which lab. Default: the only one that is up.")]
NameArgument = Annotated[str, typer.Argument(help="Which lab. Default: the only one.")]
DeviceArgument = Annotated[str, typer.Argument(help="A device of the lab.")]
Scale = Annotated[
    float | None,
    typer.Option("--scale", help="How many times slower than real time. Default: what this machine's cores can play."),
]
Slots = Annotated[int, typer.Option("--slots", min=1, max=16, help="Workers on each device.")]
Traces = Annotated[
    list[str] | None,
    typer.Option(
        "--trace", help="FILE, DEVICE=FILE or DEVICE=UP,DOWN of 'seconds Mbit/s' lines that the device's port follows."
    ),
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
    from manyhands.session.lab_session import bring_up, lab_cluster

    cluster = lab_cluster(source, scale=scale, slots=slots, traces=tuple(trace or ()))
    lab = bring_up(cluster, name=name, source=source)
    _print_status(lab)
    typer.echo(f"Run on every device: manyhands lab run -- hostname -I     Take it down: manyhands lab down {lab.name}")


@app.command("down")
def down(
    name: NameArgument = "",
    lab: LabOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Every lab of this machine.")] = False,
) -> None:
    """Take a lab down, even if only a part of it is left."""
    name = _either(name, lab)
    from manyhands.facts.errors import LabError
    from manyhands.lab.record import lab_name
    from manyhands.lab.removal import labs, missing, take_down

    if why := missing():
        raise LabError(f"There can be no lab here: {why}")
    labs_up = labs()
    chosen = labs_up if everything else [lab_name(name)] if name else labs_up
    if len(chosen) > 1 and not everything:
        raise LabError(f"Several labs are up: {', '.join(labs_up)}.", hint=f"Write: manyhands lab down {labs_up[0]}")
    for lab_up in chosen:
        if lab_up not in labs_up:
            raise LabError(
                f"There is no lab called '{lab_up}'.",
                hint=f"There are: {', '.join(labs_up)}." if labs_up else "None is up.",
            )
        take_down(lab_up)
        typer.echo(f"{lab_up} is down.")
    if not chosen:
        typer.echo("No lab is up.")


@app.command("status")
def status(name: NameArgument = "", lab: LabOption = "", json: Json = False) -> None:
    """Show the devices of a lab: their network, processor and memory, as they are now."""
    which = _find(_either(name, lab))
    if json:
        from manyhands.cli.show import print_json

        print_json(_status_document(which))
    else:
        _print_status(which)


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its words, after --.")],
    device: Annotated[
        list[str] | None, typer.Option("--device", "-d", help="Only on this device (or several).")
    ] = None,
    lab: LabOption = "",
) -> None:
    """Run a command on all devices at once, or on some; the exit code is the largest of theirs."""
    from manyhands.lab.lab import Lab
    from manyhands.lab.spaces import COORDINATOR_SPACE

    which = Lab.find(lab)
    devices = device or list(which.played.network.names)
    words = [which.words(name) for name in devices]  # unknown names are found before anything starts
    if len(devices) == 1:
        sys.exit(_code(subprocess.call([*words[0], *command])))
    codes: dict[str, int] = {}
    threads = [
        threading.Thread(
            target=_run_one, args=(name, [*before, *command], codes, max(map(len, (*devices, COORDINATOR_SPACE))))
        )
        for name, before in zip(devices, words)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if BROKEN_PIPE in codes.values():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes nowhere
        sys.exit(BROKEN_PIPE)
    sys.exit(max(codes.values(), default=0))


def _run_one(device: str, words: list[str], codes: dict[str, int], width: int) -> None:
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(f"{device:<{width}}  {line}", end="", flush=True)
        except BrokenPipeError:  # the reader has gone (head, less): the command ends, as in a shell
            process.kill()
            codes[device] = BROKEN_PIPE
            return
    codes[device] = _code(process.returncode)


def _code(returned: int) -> int:
    """Return an exit code as a shell does: 137 for a command that was killed."""
    return returned if returned >= 0 else 128 - returned


@app.command("cut")
def cut(device: DeviceArgument, lab: LabOption = "") -> None:
    """Pull a device's cable: no device is notified."""
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
    from manyhands.facts.errors import BadValue
    from manyhands.facts.lab import SLOWEST_SHARE, rounded_up

    which = _find(lab)
    share = which.played.seat(device).share
    if 0 < factor <= 1 and share * factor < SLOWEST_SHARE:
        least = min(1.0, rounded_up(SLOWEST_SHARE / share))
        raise BadValue(
            f"{device} has {share:.2%} of a core; {factor:g} of that is below {SLOWEST_SHARE:g}, the least there is.",
            hint=f"The smallest factor for {device} is {least:g}.",
        )
    which.slow(device, factor)
    typer.echo(f"{device} has {factor:g} of its speed. Back: manyhands lab heal {device}")


@app.command("heal")
def heal(
    device: Annotated[str, typer.Argument(help="A device of the lab. Default: all.")] = "", lab: LabOption = ""
) -> None:
    """Undo cut, freeze and slow, on one device or all."""
    which = _find(lab)
    for name in [device] if device else which.played.network.names:
        which.heal(name)
    typer.echo(f"{device or 'Every device'} is back to how it was brought up.")


@app.command("check")
def check(name: NameArgument = "", lab: LabOption = "", json: Json = False) -> None:
    """Measure what a lab delivers against its settings; fails beyond 10 %. Nothing else should run in it."""
    from manyhands.cli.show import print_json, print_table, working
    from manyhands.facts.errors import LabError
    from manyhands.lab.check import TOLERANCE
    from manyhands.lab.check import check as check_lab

    which = _find(_either(name, lab))
    with working("measuring") as say:
        measured = list(check_lab(which, say))
    if json:
        print_json(
            [
                {"what": result.what, "who": result.who, "unit": result.unit, "asked": result.asked, "got": result.got,
                 "error": result.error if result.got is not None else None, "good": result.is_good, "note": result.note}
                for result in measured
            ]
        )  # fmt: skip
    else:
        rows = [
            [result.what, result.who, _shown(result.asked, result.unit),
             _shown(result.got, result.unit) or result.note or "nothing",
             f"{result.error:.1%}" if result.got is not None else "", "" if result.is_good else "BAD"]
            for result in measured
        ]  # fmt: skip
        headings = ["what", "device", "asked", "got", "off by", ""]
        print_table(f"Lab {which.name}, {_scale(which)}", headings, rows, numbers=["asked", "got", "off by"])
    bad = [result for result in measured if not result.is_good]
    if bad:
        raise LabError(
            f"{len(bad)} of {len(measured)} are off by more than {TOLERANCE:.0%}: "
            f"{', '.join(f'{result.what} of {result.who}' for result in bad[:5])}.",
            hint="Is something else running on this machine? A larger --scale leaves more room.",
        )


def _either(name: str, lab: str) -> str:
    """Return a lab's name, which may stand alone or after --lab."""
    from manyhands.facts.errors import BadValue

    if name and lab and name != lab:
        raise BadValue(f"Which lab: {name} or {lab}?", hint=f"Write it once: --lab {lab}")
    return name or lab


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


class Now(NamedTuple):
    """The state of a device now, where it may differ from how it was brought up."""

    share: float | None
    """Share of a core; None: not settled yet, at this machine's full speed."""
    up_bytes_per_second: float
    down_bytes_per_second: float
    follows: str
    """The trace file that the port follows."""
    state: tuple[str, ...]
    """Everything unusual about the device; empty: nothing."""


def _now(lab: Lab, device: DeviceStatus) -> Now:
    facts = lab.played.network.device(device.name)
    follows = dict(lab.played.traces).get(device.name, "")
    up, down = lab.spaces.rates(device.name) if follows else (facts.up_bytes_per_second, facts.down_bytes_per_second)
    share = lab.groups.share(lab.name, device.name)
    return Now(share, up, down, follows, _state(device, share, lab.played.seat(device.name).share, follows))


def _state(device: DeviceStatus, share: float | None, full_share: float, follows: str = "") -> tuple[str, ...]:
    states = ["cut"] * device.is_cut + ["frozen"] * device.group.is_frozen
    if share is None:
        states.append("full speed")
    elif share < SLOWED * full_share:
        states.append(f"slow {share / full_share:.2g}")
    states += [f"{device.group.oom_kills} killed for memory"] * bool(device.group.oom_kills)
    return (*states, *[f"follows {follows}"] * bool(follows))


def _pairs_that_differ(cluster: Cluster) -> int:
    """Return the number of pairs of devices, in either direction, whose link differs from the default."""
    return len({frozenset((link.sender, link.receiver)) for link in cluster.links if link.link != cluster.link})


def _links_text(cluster: Cluster) -> str:
    from manyhands.facts.units import format_seconds

    coordinator = "The coordinator has no limit and no delay."
    if len(cluster.devices) < 2:
        return coordinator
    link, others = cluster.link, _pairs_that_differ(cluster)
    delay = f"{format_seconds(link.delay_seconds)} one way" if link.delay_seconds else "no delay"
    differ = f"; {others} pair{'s differ' if others > 1 else ' differs'}" if others else ""
    return f"Any pair: {_rate(link.bytes_per_second)}, {delay}{differ}. {coordinator}"


def _status_document(lab: Lab) -> dict[str, Any]:
    import msgspec

    devices = []
    for device in lab.status():
        now = _now(lab, device)
        devices.append(
            {**msgspec.to_builtins(device), "memory_limit_bytes": lab.played.seat(device.name).memory_bytes,
             "share_now": now.share, "up_bytes_per_second": now.up_bytes_per_second,
             "down_bytes_per_second": now.down_bytes_per_second, "follows": now.follows or None,
             "state": list(now.state)}
        )  # fmt: skip
    cluster = lab.played.network
    return {
        "name": lab.name, "source": lab.record.source, "scale": lab.played.scale, "slots": lab.played.slots,
        "kept": lab.is_supervised, "traces": dict(lab.played.traces), "devices": devices,
        "link": {"bytes_per_second": cluster.link.bytes_per_second, "delay_seconds": cluster.link.delay_seconds},
        "pairs_that_differ": _pairs_that_differ(cluster),
    }  # fmt: skip


def _print_status(lab: Lab) -> None:
    from manyhands.cli.show import print_table
    from manyhands.facts.units import format_bytes

    rows = []
    for device in lab.status():
        now = _now(lab, device)
        cores = f"core {','.join(map(str, device.cores))}"
        rows.append(
            [device.name, device.address, f"all of {cores}" if now.share is None else f"{now.share:.1%} of {cores}",
             f"{format_bytes(device.group.memory_bytes)} of {format_bytes(lab.played.seat(device.name).memory_bytes)}",
             _rate(now.up_bytes_per_second), _rate(now.down_bytes_per_second), str(device.processes),
             ", ".join(now.state) or "well"]
        )  # fmt: skip
    headings = ["device", "address", "speed", "memory", "up", "down", "processes", "state"]
    print_table(f"Lab {lab.name}, {_scale(lab)}", headings, rows, numbers=["memory", "up", "down", "processes"])
    typer.echo(_links_text(lab.played.network))
    if not lab.is_supervised:
        typer.echo(
            f"Its supervisor is gone: links with a delay carry nothing. Take it down: manyhands lab down {lab.name}"
        )

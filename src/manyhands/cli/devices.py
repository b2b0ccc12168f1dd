"""`manyhands devices`: the devices that have joined, the catalogue and the preset clusters, or one cluster."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from manyhands.cli import known_devices
from manyhands.cli.options import Json

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster


class _OrACluster(TyperGroup):
    """A command group whose arguments name a cluster to show, unless they name a command."""

    default_command = "show"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_OrACluster, rich_markup_mode=None,
    help="Devices: those that have joined (and revoke, forget, allow, log), those that can be planned for, and one "
    "cluster: manyhands devices PRESET|local:N|cluster.yaml.",
)  # fmt: skip
app.command("revoke")(known_devices.revoke)
app.command("forget")(known_devices.forget)
app.command("allow")(known_devices.allow)
app.command("new-token")(known_devices.new_token)
app.command("run-token")(known_devices.run_token)
app.command("log")(known_devices.log)


@app.command("show")
def devices(
    cluster: Annotated[str, typer.Argument(help="Show this preset, local:N or cluster.yaml.")] = "",
    measure: Annotated[
        bool, typer.Option("--measure", help="With local:N: measure this machine and its links.")
    ] = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Write the cluster to this .yaml or .json file.")] = "",
    json: Json = False,
) -> None:
    """List the devices that have joined, the catalogue and the presets, or show one cluster. The default command."""
    if not cluster and not measure:
        _show_catalogue(json)
        return
    from manyhands.cli.show import working
    from manyhands.files.documents import load_cluster, write_document
    from manyhands.plans.local_cluster import measured_cluster

    machines = load_cluster(cluster or "local:1")
    if measure:
        with working("measuring this machine"):
            machines = measured_cluster(machines)
    if out:
        write_document(out, machines.to_dict())
    _show_cluster(machines, json)
    if out and not json:
        typer.echo(f"Written to {out}. Try: manyhands plan --cluster {out}")


def _show_catalogue(json: bool) -> None:
    import msgspec

    from manyhands.cli.show import print_json, print_table
    from manyhands.facts.catalogue import CATALOGUE
    from manyhands.facts.presets import PRESETS
    from manyhands.facts.units import format_bytes

    if json:
        print_json(
            {
                "devices": {key: msgspec.to_builtins(entry) for key, entry in CATALOGUE.items()},
                "presets": {name: {"description": p.description, "source": p.source} for name, p in PRESETS.items()},
                **known_devices.known(),
            }
        )
        return
    known_devices.show_known()
    rows = [
        [key, f"{e.gflops:.3g}", format_bytes(e.memory_bytes), f"{e.watts_active:g} / {e.watts_idle:g}", e.source]
        for key, e in CATALOGUE.items()
    ]
    headings = ["device", "GFLOP/s training", "memory", "W active / idle", "where the numbers come from"]
    print_table("Known devices (estimates)", headings, rows, numbers=["GFLOP/s training", "memory"])
    print_table("Preset clusters", ["preset", "", "from"], [[n, p.description, p.source] for n, p in PRESETS.items()])
    typer.echo("One cluster in detail: manyhands devices PRESET|cluster.yaml")


def _show_cluster(cluster: Cluster, json: bool) -> None:
    from manyhands.cli.show import print_json, print_table
    from manyhands.facts.units import format_bytes, format_rate, format_seconds

    if json:
        print_json(cluster.to_dict())
        return
    rows = [
        [
            d.name,
            d.kind,
            f"{d.gflops:.3g}",
            format_bytes(d.memory_bytes),
            str(d.cores),
            f"{d.watts_active:g} / {d.watts_idle:g}",
        ]
        for d in cluster.devices
    ]
    headings = ["device", "kind", "GFLOP/s", "memory", "cores", "W active / idle"]
    how = "estimated" if any(d.estimated for d in cluster.devices) else "measured"
    print_table(f"Cluster {cluster.name} ({how})", headings, rows, numbers=["GFLOP/s", "memory", "cores"])
    link = cluster.link
    pair = "Any pair" if not cluster.sites else "Any pair between sites, beside their uplinks"
    typer.echo(f"{pair}: {format_rate(link.bytes_per_second)}, {format_seconds(link.delay_seconds)} one way.")
    for site in cluster.sites:
        rates = (site.up_bytes_per_second, site.down_bytes_per_second)
        up, down = ("unlimited" if rate == math.inf else format_rate(rate) for rate in rates)
        within = f", in {site.within}" if site.within else ""
        count = sum(site in cluster.tree.paths[device.site] for device in cluster.devices)
        typer.echo(
            f"Site {site.name}{within}: {count} device(s), uplink {up} out, {down} in, "
            f"{format_seconds(site.delay_seconds)} one way."
        )
    for directed in cluster.links:
        rate, delay = format_rate(directed.link.bytes_per_second), format_seconds(directed.link.delay_seconds)
        through = f", through {directed.relay}" if directed.relay else ""
        typer.echo(f"{directed.sender} to {directed.receiver}: {rate}, {delay} one way{through}.")

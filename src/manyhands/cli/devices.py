"""`manyhands devices`: the catalogue and the preset clusters, or one cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.options import Json


def devices(
    cluster: Annotated[str, typer.Argument(help="Show this preset, local:N or cluster.yaml.")] = "",
    json: Json = False,
) -> None:
    """List known devices and preset clusters, or show the devices and links of one cluster."""
    if cluster:
        _show_cluster(cluster, json)
    else:
        _show_catalogue(json)


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
            }
        )
        return
    rows = [
        [key, f"{e.gflops:.3g}", format_bytes(e.memory_bytes), f"{e.watts_active:g} / {e.watts_idle:g}", e.source]
        for key, e in CATALOGUE.items()
    ]
    headings = ["device", "GFLOP/s training", "memory", "W active / idle", "where the numbers come from"]
    print_table("Known devices (estimates)", headings, rows, numbers=["GFLOP/s training", "memory"])
    print_table("Preset clusters", ["preset", "", "from"], [[n, p.description, p.source] for n, p in PRESETS.items()])
    typer.echo("One cluster in detail: manyhands devices PRESET|cluster.yaml")


def _show_cluster(name: str, json: bool) -> None:
    from manyhands.cli.show import print_json, print_table
    from manyhands.facts.units import format_bytes, format_rate, format_seconds
    from manyhands.files.documents import load_cluster

    cluster = load_cluster(name)
    if json:
        print_json(cluster.to_dict())
        return
    rows = [
        [d.name, d.kind, f"{d.gflops:.3g}", format_bytes(d.memory_bytes), str(d.cores), f"{d.watts_active:g} / {d.watts_idle:g}"]
        for d in cluster.devices
    ]
    headings = ["device", "kind", "GFLOP/s", "memory", "cores", "W active / idle"]
    print_table(f"Cluster {cluster.name}", headings, rows, numbers=["GFLOP/s", "memory", "cores"])
    link = cluster.link
    typer.echo(f"Any pair: {format_rate(link.bytes_per_second)}, {format_seconds(link.delay_seconds)} one way.")
    for one in cluster.links:
        rate, delay = format_rate(one.link.bytes_per_second), format_seconds(one.link.delay_seconds)
        typer.echo(f"{one.sender} to {one.receiver}: {rate}, {delay} one way.")

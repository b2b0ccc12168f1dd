"""Plans and simulations as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli.show import print_table
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Share, Single
from manyhands.facts.plan_check import layer_range
from manyhands.facts.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from manyhands.explaining.comparison import Comparison
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.network import Network
    from manyhands.facts.plan import Plan
    from manyhands.planner.grouping import TileGroups
    from manyhands.simulator.result import Simulation

MOST_ROWS = 40
MOST_GROUPS = 31
"""With more channel groups than this, a share is shown as a percentage of the channels."""


def share_text(share: Share, place: int) -> str:
    """Return what the device at `place` of a stage takes of it."""
    if isinstance(share, BySamples):
        return f"{share.samples[place]} of {sum(share.samples)} samples"
    if isinstance(share, ByTiles):
        where = ",".join(map(str, share.cell(place)))
        return f"tile {where} of {share.grid_text} ({share.part(place):.0%})"
    if isinstance(share, ByChannels):
        groups, total = share.groups[place], sum(share.groups)
        return (
            f"{groups} of {total} channel groups" if total <= MOST_GROUPS else f"{groups / total:.0%} of the channels"
        )
    return "all" if isinstance(share, Single) else share.text(place)


def print_plan(
    plan: Plan, network: Network, cluster: Cluster, result: Simulation, sample_seconds: float | None = None
) -> None:
    """Print which device holds which layers and which part, and what that costs. `sample_seconds`: for inference, what
    the plan was chosen by; devices are then shown for one pass."""
    rows = []
    passes = 1.0 if sample_seconds is None else result.samples / plan.micro_batch_size
    for number, stage in enumerate(plan.stages):
        first, last = layer_range(stage)
        names = (
            network.layers[first].name
            if last - first == 1
            else f"{network.layers[first].name} .. {network.layers[last - 1].name}"
        )
        for place, device in enumerate(stage.devices):
            totals = result.devices[device]
            rows.append(
                [str(number) if place == 0 else "", f"{first}-{last - 1}  {names}" if place == 0 else "", device,
                 share_text(stage.share, place),
                 f"{format_seconds(totals.busy_seconds / passes)}, {1 - result.idle_part(device):.0%}",
                 f"{format_bytes(totals.peak_bytes)} of {format_bytes(totals.memory_bytes)}",
                 format_bytes(totals.bytes_sent / passes), format_bytes(totals.bytes_received / passes)]
            )  # fmt: skip
    hidden = len(rows) - MOST_ROWS
    parts = f"batch {plan.batch_size} in {plan.micro_batches} micro-batch(es)"
    if plan.steps_per_round > 1:
        parts = f"rounds of {plan.steps_per_round} batches of {plan.step_size}"
    if not plan.is_training:
        parts = f"{plan.micro_batch_size} sample(s) at a time"
    title = f"{network.name} ({network.input_text}) on {cluster.name}: {parts}, order {plan.order}"
    headings = ["stage", "layers", "device", "share", "computes", "peak memory", "sent", "received"]
    print_table(title, headings, rows[:MOST_ROWS], numbers=["computes", "peak memory", "sent", "received"])
    if hidden > 0:
        typer.echo(f"... and {hidden} more devices.")
    unused = [name for name in cluster.names if name not in plan.devices]
    if unused:
        typer.echo(f"Not used: {', '.join(unused[:10])}{' ...' if len(unused) > 10 else ''}.")
    rate = result.samples_per_second if sample_seconds is None else 1 / sample_seconds
    speed = f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"
    energy = f", {result.joules_per_sample:.3g} J a sample" if result.joules_per_sample else ""  # where watts are known
    if sample_seconds is None:
        times, passes = f"{format_seconds(result.seconds / plan.steps_per_round)} a step, {speed}", plan.steps_per_round
    elif passes > 1:
        times = f"{format_seconds(sample_seconds)} a sample in a stream, {speed}"
    else:
        times = f"{format_seconds(sample_seconds)} a sample, one at a time"
    typer.echo(f"Simulated: {times}, {format_bytes(result.total_bytes / passes)} between devices{energy}.")


def print_simulation(result: Simulation, cluster: Cluster) -> None:
    """Print what carries most: links, and the ports that all of a device's links share."""
    counts: defaultdict[str, float] = defaultdict(float)
    rates: dict[str, float] = {}
    for (source, target), count in result.bytes_between.items():
        a, b = cluster.device(source), cluster.device(target)
        link = cluster.link_between(source, target).bytes_per_second
        relay = cluster.relays.get((source, target), "")
        through = f" through {relay}" if relay else ""
        passed = [(f"{source} to {target}{through}", link)]
        if a.host_name != b.host_name:
            passed = [
                (f"{a.host_name} to {b.host_name}{through}", link),
                (f"{a.host_name}'s port, out", a.up_bytes_per_second),
                (f"{b.host_name}'s port, in", b.down_bytes_per_second),
            ]
        for name, rate in passed:
            counts[name] += count
            rates[name] = rate
    busiest = sorted(((count / rates[name], name, count) for name, count in counts.items() if count), reverse=True)[:8]
    rows = [
        [name, format_bytes(count), f"{seconds / result.seconds:.0%}" if result.seconds else ""]
        for seconds, name, count in busiest
        if seconds
    ]
    if rows:
        print_table("Busiest links and ports", ["", "bytes", "of the step"], rows, numbers=["bytes", "of the step"])


def print_inference(rows: Sequence[Mapping[str, Any]], objective: str) -> None:
    """Print plans for inference, the chosen one first: seconds of a sample, and how often devices wait for each
    other."""
    best = rows[0]["seconds_per_sample"]
    table = []
    for number, row in enumerate(rows[:MOST_ROWS]):
        seconds = row["seconds_per_sample"]
        if seconds is None:
            table.append([row["name"], "", "", "", "", "", row["reason"].split("\n")[0]])
            continue
        remark = "chosen" if number == 0 else f"{seconds / best:.3g}x as long" if best else ""
        table.append(
            [row["name"], format_seconds(seconds), f"{1 / seconds:.3g}" if seconds else "", str(row["sync_points"]),
             str(row["messages"] + row["between_stages_messages"]),
             format_bytes(row["bytes"] + row["between_stages_bytes"]), remark]
        )  # fmt: skip
    numbers = ["a sample", "samples/s", "sync points", "messages", "bytes"]
    print_table(f"Plans looked at, for {objective}, simulated", ["plan", *numbers, ""], table, numbers=numbers)


def print_comparison(table: Comparison, network: Network, cluster: Cluster, batch_size: int) -> None:
    """Print our plan beside every baseline's, and why it wins."""
    best = table.ours.seconds
    rows = []
    for row in table.rows:
        name = row.name if row.is_synchronous else f"({row.name})"
        if row.plan is None:
            rows.append([name, "", "", "", "", "", "", "", row.problem])
            continue
        stages = "-".join(str(len(stage.devices)) for stage in row.plan.stages)
        energy = f"{row.joules_per_sample:.3g}" if row.joules_per_sample else ""
        rows.append(
            [name, stages, str(row.plan.micro_batches), f"{row.samples_per_second:.4g}",
             f"{best / row.seconds:.2f}" if row.seconds else "", format_bytes(row.bytes), format_bytes(row.peak_bytes),
             energy, row.problem]
        )  # fmt: skip
    title = f"{network.name} ({network.input_text}) on {cluster.name}, batch {batch_size}, simulated"
    numbers = ["micro-batches", "samples/s", "of ours", "bytes", "peak memory", "J/sample"]
    print_table(title, ["", "devices by stage", *numbers, ""], rows, numbers=numbers)
    typer.echo(table.why)
    if any(not row.is_synchronous for row in table.rows):
        typer.echo("In brackets: asynchronous, its weights are stale; priced by its pipelines and the server's port.")


def print_tile_groups(groups: TileGroups, network: Network) -> None:
    """Print where an interior tile exchanges its boundary, layer by layer, and what that costs beside the extremes."""
    ways = (("forward", groups.forward), ("backward", groups.backward))
    rows = []
    for number, (layer, tile) in enumerate(zip(groups.layers, groups.tiles)):
        kind = "pooling" if layer.is_pool else "convolution"
        rows.append(
            [str(number), layer.name, f"{kind} {_by(layer.kernel)}, stride {_by(layer.stride)}",
             _by((layer.channels_in, *layer.input_size)), _by(tile),
             *(str(sum(start <= number for start in compared.best.starts)) for _, compared in ways)]
        )  # fmt: skip
    costs = groups.costs
    title = (
        f"{network.name} ({network.input_text}) in {_by(groups.grid)} tiles, an interior one: groups at costs of "
        f"{costs.computation:g} a multiply-accumulate, {costs.communication:g} a boundary element, "
        f"{costs.fixed:g} an exchange"
    )
    headings = ["", "layer", "", "input", "tile", "forward group", "backward group"]
    print_table(title, headings, rows, numbers=["input", "tile", "forward group", "backward group"])
    rows = [
        [name, str(len(compared.best.starts)),
         *map(_cost, (compared.best.cost, compared.one_group, compared.every_layer)),
         ", ".join(map(str, compared.exchanges))]
        for name, compared in ways
    ]  # fmt: skip
    headings = ["", "groups", "cost", "one group", "every layer", "exchanges at maps"]
    print_table("Costs (map n is the input of layer n)", headings, rows, numbers=headings[1:5])


def _by(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _cost(cost: float) -> str:
    return format_count(cost) if cost >= 1e6 else f"{cost:,.6g}"


def print_peaks(parts: Mapping[str, Mapping[str, int]]) -> None:
    """Print what each device held at its peak, by part, as counted in a step of a run."""
    kinds = list(dict.fromkeys(kind for by_kind in parts.values() for kind in by_kind))
    rows = [
        [device, *(format_bytes(by_kind.get(kind, 0)) for kind in kinds), format_bytes(sum(by_kind.values()))]
        for device, by_kind in parts.items()
    ]
    hidden = len(rows) - MOST_ROWS
    if rows:
        headings = ["device", *kinds, "together"]
        print_table("Peak of tensor bytes in a step", headings, rows[:MOST_ROWS], numbers=headings[1:])
    if hidden > 0:
        typer.echo(f"... and {hidden} more devices.")


def print_groupings(rows: list[dict[str, Any]]) -> None:
    """Print where tiles exchange boundary data: each choice with its price and the simulated time."""
    table = [
        [
            row["name"] + (" *" if row["chosen"] else ""),
            _starts(row["forward"], "every layer"),
            _starts(row["backward"], "adjoint"),
            format_seconds(row["seconds"]),
            format_seconds(row["fetched_seconds"]) if row["fetched_seconds"] else "",
            "no memory" if row["simulated_seconds"] is None else format_seconds(row["simulated_seconds"]),
        ]
        for row in rows
    ]
    titles = ["groups", "forward", "backward", "priced", "of it fetched", "a step, simulated"]
    print_table("where tiles exchange their boundaries (* chosen)", titles, table, numbers=titles[3:])


def _starts(groups: Sequence[int | str] | None, otherwise: str) -> str:
    return otherwise if groups is None else f"{len(groups)}: {', '.join(map(str, groups))}"

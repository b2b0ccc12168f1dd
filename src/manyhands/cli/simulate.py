"""`manyhands simulate`: one round of a plan under a virtual clock, with a trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.options import (
    BATCH_SIZE,
    CLUSTER,
    MODEL,
    BatchSize,
    ClusterName,
    Granularity,
    Input,
    Json,
    MicroBatches,
    Model,
    Order,
    ProfileFile,
)


def simulate(
    model: Model = "",
    cluster: ClusterName = CLUSTER,
    plan: Annotated[
        str, typer.Option("--plan", "-p", help="A plan file, or auto, single, samples, pipeline, tiles, sites, mixed.")
    ] = "auto",
    batch_size: BatchSize = None,
    micro_batches: MicroBatches = None,
    order: Order = None,
    input: Input = "",
    granularity: Granularity = "blocks",
    profile: ProfileFile = "",
    overcommit: Annotated[
        bool, typer.Option("--overcommit", help="Simulate even if a device would run out of memory.")
    ] = False,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for plan.yaml, trace.json and pictures.")] = "",
    json: Json = False,
) -> None:
    """Simulate one step of training (or a stream of inferences): time, idle time, bytes, memory, energy."""
    from manyhands.cli.inputs import load_task, print_notes
    from manyhands.cli.show import print_json, working
    from manyhands.cli.tables import print_plan, print_simulation
    from manyhands.explaining.tile_report import planned_traffic, tiled_schedule, traffic_text, write_tile_map
    from manyhands.observe.figures import NO_PLOTS, are_plots_here
    from manyhands.plans import planning
    from manyhands.plans.simulating import simulate as simulate_plan

    file = None if planning.is_strategy(plan) else planning.plan_file(plan)
    if file is not None:
        planning.refuse_beside_plan(
            file, {"--batch-size": batch_size, "--micro-batches": micro_batches, "--order": order}
        )
    model = model or (planning.network_named_in(file) if file else MODEL)
    task = load_task(model, input, granularity, cluster, profile)
    network, machines, times = task.network, task.cluster, task.profile
    with working("simulating"):
        if file is not None:
            chosen = planning.read_plan(file, network, machines)
        else:
            chosen = planning.plan(
                network, machines, batch_size=batch_size or BATCH_SIZE, strategy=plan, micro_batches=micro_batches,
                order=planning.order_named(order or "1f1b"), profile=times,
            ).plan  # fmt: skip
        result = simulate_plan(chosen, network, machines, times, within_memory=not overcommit)
        folder = Path(out) if out else planning.run_folder("simulate", network, machines)
        files = planning.write_simulation(folder, chosen, network, machines, result)
        tiled = tiled_schedule(chosen, network)
        by_use = planned_traffic(tiled).by_use if tiled is not None else None
        if tiled is not None and are_plots_here():
            title = f"{network.name} on {machines.name}"
            files.append(write_tile_map(tiled, folder / "plots" / "tiles.png", title=title))
    if json:
        written = [str(file) for file in files]
        about = {
            "plan": chosen.to_dict(), "bytes_by_use": by_use, "times": task.times, "folder": str(folder),
            "files": written,
        }  # fmt: skip
        print_json({**result.to_dict(), **about})
        return
    print_plan(chosen, network, machines, result)
    if by_use is not None:
        typer.echo(traffic_text(by_use))
    print_simulation(result, machines)
    print_notes(task, result)
    names = ", ".join(str(file.relative_to(folder)) for file in files)
    typer.echo(f"Written to {folder}: {names} (trace.json opens in ui.perfetto.dev).")
    if not are_plots_here():
        typer.echo(NO_PLOTS)

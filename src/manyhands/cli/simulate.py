"""`manyhands simulate`: one round of a plan under a virtual clock, with a trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.options import (
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
    model: Model = "yolov2-16",
    cluster: ClusterName = "pi3x6",
    plan: Annotated[
        str, typer.Option("--plan", "-p", help="A plan file, or auto, single, samples, pipeline, tiles.")
    ] = "auto",
    batch_size: BatchSize = 8,
    micro_batches: MicroBatches = None,
    order: Order = "1f1b",
    input: Input = "",
    granularity: Granularity = "blocks",
    profile: ProfileFile = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for plan.yaml, trace.json and timeline.png.")] = "",
    json: Json = False,
) -> None:
    """Simulate one step of training (or a stream of inferences): time, idle time, bytes, memory, energy."""
    from manyhands.api import public
    from manyhands.cli.inputs import load_task
    from manyhands.cli.show import print_json, working
    from manyhands.cli.tables import print_plan, print_simulation

    network, machines, known = load_task(model, input, granularity, cluster, profile)
    with working("simulating"):
        if public.is_strategy(plan):
            chosen = public.plan(
                network, machines, batch_size=batch_size, strategy=plan, micro_batches=micro_batches,
                order=public.order_named(order), profile=known,
            ).plan  # fmt: skip
        else:
            chosen = public.read_plan(public.plan_file(plan), network, machines)
        result = public.simulate(chosen, network, machines, known)
        folder = Path(out or f"runs/simulate-{network.name.replace('/', '_').replace(':', '_')}-{machines.name}")
        files = public.write_simulation(folder, chosen, network, machines, result)
    if json:
        print_json(
            {**result.to_dict(), "plan": chosen.to_dict(), "folder": str(folder), "files": [str(f) for f in files]}
        )
        return
    print_plan(chosen, network, machines, result)
    print_simulation(result, machines)
    for warning in result.warnings:
        typer.echo(f"Note: {warning}")
    typer.echo(f"Written to {folder}: {', '.join(f.name for f in files)} (trace.json opens in ui.perfetto.dev).")

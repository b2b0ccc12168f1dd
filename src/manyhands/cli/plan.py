"""`manyhands plan`: choose a plan, print it, and write it to a file."""

from __future__ import annotations

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


def plan(
    model: Model = MODEL,
    cluster: ClusterName = CLUSTER,
    batch_size: BatchSize = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            "--share",
            help="auto, single, samples, pipeline or tiles; with --for also channels, split, and as others do it "
            "modnn, coates, deepthings.",
        ),
    ] = "auto",
    objective: Annotated[
        str | None,
        typer.Option("--for", help="Plan inference, not training: for latency or for throughput."),
    ] = None,
    home: Annotated[
        str, typer.Option("--home", help="With --for: the device that has the inputs, where they are not everywhere.")
    ] = "",
    grid: Annotated[
        str | None, typer.Option("--grid", help="Rows x columns of tiles, like 2x3. For --share tiles.")
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Relative heights of the tiles' rows, like 2,1,1.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Relative widths of their columns.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs",
            help="Show only where an interior tile best exchanges its boundary, by the tiling paper's model, if a "
            "multiply-accumulate, a boundary element and an exchange cost so much: 0.1,2,0. Needs no cluster.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Plan a pipeline and show it beside one device, data parallel, EDDL, pipeline parallel, GPipe, "
            "PipeDream, DAPPLE and HetPipe: throughput, bytes, memory, and why it wins.",
        ),
    ] = False,
    batch_norm: Annotated[
        str, typer.Option("--batch-norm", help="synchronised (exact) or local (per device, as DDP).")
    ] = "synchronised",
    warm_up: Annotated[
        str,
        typer.Option("--warm-up", help="Forward passes of stage p of P before its first backward: P-p, 2(P-p)+1 ..."),
    ] = "2(P-p)-1",
    micro_batches: MicroBatches = None,
    order: Order = None,
    input: Input = "",
    granularity: Granularity = "blocks",
    profile: ProfileFile = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Write the plan to this .yaml or .json file.")] = "",
    schedule: Annotated[bool, typer.Option("--schedule", help="Print every device's actions too.")] = False,
    json: Json = False,
) -> None:
    """Plan who does what: layers to devices, shares, micro-batches. Prices are simulated."""
    from manyhands.api import comparing, planning_inference, public, tiling
    from manyhands.api.networks import load_network, parse_input
    from manyhands.api.tile_report import planned_traffic, tiled_schedule, traffic_text
    from manyhands.cli.inputs import load_task
    from manyhands.cli.show import print_json, working
    from manyhands.cli.tables import (
        print_candidates,
        print_comparison,
        print_groupings,
        print_inference,
        print_plan,
        print_tile_groups,
    )
    from manyhands.facts.errors import BadValue
    from manyhands.files.documents import write_document

    if costs is not None:
        makes_plans = {
            "--batch-size": batch_size, "--micro-batches": micro_batches, "--order": order, "--profile": profile,
            "--out": out, "--schedule": schedule, "--rows": rows, "--columns": columns,
        }  # fmt: skip
        tiles, prices = tiling.parse_tile_costs(strategy, grid, costs, makes_plans)
        with working(f"capturing {model}"):
            captured = load_network(model, parse_input(input), granularity)
        groups = tiling.tile_groups(captured, tiles, prices)
        if json:
            print_json(tiling.tile_groups_document(captured, groups))
        else:
            print_tile_groups(groups, captured)
        return
    if objective is not None:
        planning_inference.refuse_beside_objective(
            {
                "--batch-size": batch_size, "--micro-batches": micro_batches, "--order": order, "--grid": grid,
                "--rows": rows, "--columns": columns, "--compare": compare,
            }
        )  # fmt: skip
        network, machines, known = load_task(model, input, granularity, cluster, profile)
        with working(f"planning for {objective}"):
            planned = planning_inference.plan_for(
                network, machines, known, objective=objective, strategy=strategy, home=home
            )
            table = planning_inference.inference_table(planned, network)
            result = public.simulate(planned.plan, network, machines, known, keep_spans=False)
        if out:
            write_document(out, planned.plan.to_dict())
        if json:
            plan_text = planned.plan.to_dict()
            print_json({"objective": objective, "plan": plan_text, "simulation": result.to_dict(), "candidates": table})
            return
        print_plan(planned.plan, network, machines, result)
        print_inference(table, objective)
        for warning in result.warnings:
            typer.echo(f"Note: {warning}")
        if schedule:
            typer.echo(public.schedule_text(planned.plan, network))
        if out:
            typer.echo(f"Plan written to {out}. Try: manyhands infer --model {model} --cluster {cluster} --plan {out}")
        return
    if home:
        raise BadValue("--home is for plans of inference.", hint="Say what for: --for latency or --for throughput.")
    wish = tiling.tile_wish(grid, rows, columns)
    if strategy != "tiles" and wish.grid is not None:
        raise BadValue(f"--grid, --rows and --columns are for --share tiles; --share is {strategy}.")
    norm, ahead = public.batch_norm_named(batch_norm), public.warm_up_named(warm_up)
    network, machines, known = load_task(model, input, granularity, cluster, profile)
    if compare:
        beside = {"--grid": grid, "--order": order, "--schedule": schedule or None, "--out": out or None}
        said = [option for option, value in beside.items() if value is not None]
        if said or strategy not in ("auto", "pipeline"):
            raise BadValue(
                f"--compare compares pipelines; it was given with {' and '.join(said) or f'--share {strategy}'}.",
                hint="Leave that out, or --compare.",
            )
        with working("planning, ours and the rivals'"):
            compared = comparing.compare(
                network, machines, batch_size=batch_size or BATCH_SIZE, micro_batches=micro_batches, profile=known,
                batch_norm=norm, warm_up=ahead,
            )  # fmt: skip
        if json:
            print_json(compared.to_dict())
        else:
            print_comparison(compared, network, machines, batch_size or BATCH_SIZE)
        return
    with working("planning"):
        planned = public.plan(
            network, machines, batch_size=batch_size or BATCH_SIZE, strategy=strategy, micro_batches=micro_batches,
            order=public.order_named(order or "1f1b"), profile=known, tiles=wish, batch_norm=norm, warm_up=ahead,
        )  # fmt: skip
        result = public.simulate(planned.plan, network, machines, known, keep_spans=False)
        priced = tiling.priced_groups(planned.plan, network, machines, known) if strategy == "tiles" else []
        tiled = tiled_schedule(planned.plan, network)
        by_use = planned_traffic(tiled).by_use if tiled is not None else None
    if out:
        write_document(out, planned.plan.to_dict())
    if json:
        print_json(
            {
                "plan": planned.plan.to_dict(),
                "simulation": result.to_dict(),
                "groupings": priced,
                "bytes_by_use": by_use,
                "candidates": [
                    {
                        "name": c.name,
                        "seconds": c.seconds,
                        "reason": c.reason,
                        "plan": c.plan.to_dict() if c.plan else None,
                    }
                    for c in planned.candidates
                ],
            }
        )
        return
    print_plan(planned.plan, network, machines, result)
    if by_use is not None:
        typer.echo(traffic_text(by_use))
    if priced:
        print_groupings(priced)
    if planned.candidates:
        print_candidates(planned.candidates)
    for warning in result.warnings:
        typer.echo(f"Note: {warning}")
    if schedule:
        typer.echo(public.schedule_text(planned.plan, network))
    if out:
        typer.echo(f"Plan written to {out}. Try: manyhands simulate --model {model} --cluster {cluster} --plan {out}")

"""`manyhands plan`: choose a plan, show it, explain it, and write it to a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from manyhands.cli.inputs import TaskInputs
    from manyhands.explaining.explanation import Explanation
    from manyhands.facts.plan import Plan
    from manyhands.planner.grouping import Costs
    from manyhands.plans.planned import Planned
    from manyhands.simulator.result import Simulation


def plan(
    model: Model = MODEL,
    cluster: ClusterName = CLUSTER,
    batch_size: BatchSize = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            "--share",
            help="auto, single, samples, pipeline, tiles, sites or mixed (some layers by tiles, others not); with "
            "--for also channels, split, modnn, coates or deepthings (the last three as others do it).",
        ),
    ] = "auto",
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            help="What training is to be best at: throughput (default), latency, memory or energy (J a sample).",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option("--for", help="Plan inference, not training: for latency or for throughput."),
    ] = None,
    home: Annotated[
        str, typer.Option("--home", help="With --for: the device that has the inputs, where they are not everywhere.")
    ] = "",
    grid: Annotated[
        str | None,
        typer.Option(
            "--grid",
            help="Rows x columns of tiles, like 2x3. Volumes have depths x rows x columns. For --share tiles.",
        ),
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Relative heights of the tiles' rows, like 2,1,1.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="Relative widths of their columns.")] = None,
    depths: Annotated[
        str | None, typer.Option("--depths", help="Relative depths of the tiles of volumes and video.")
    ] = None,
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
            "PipeDream, DAPPLE (as published, and dropping devices) and HetPipe: throughput, bytes, memory, and why "
            "it wins.",
        ),
    ] = False,
    batch_norm: Annotated[
        str, typer.Option("--batch-norm", help="synchronised (exact) or local (per device, as DDP).")
    ] = "synchronised",
    warm_up: Annotated[
        str,
        typer.Option(
            "--warm-up",
            help="Forward passes of stage p of P before its first backward: P-p, 2(P-p)-1, 2(P-p) or 2(P-p)+1.",
        ),
    ] = "2(P-p)-1",
    micro_batches: MicroBatches = None,
    order: Order = None,
    input: Input = "",
    granularity: Granularity = "blocks",
    profile: ProfileFile = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Write the plan to this .yaml or .json file.")] = "",
    picture: Annotated[
        str,
        typer.Option(
            "--picture", help="Draw the plan into this .png file: which device holds which layers and which part."
        ),
    ] = "",
    what_if: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Plan again for one more device of each kind, a faster network, more memory; or for none of it. "
            "Default: what takes a few seconds.",
        ),
    ] = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="Print every device's actions too.")] = False,
    json: Json = False,
) -> None:
    """Plan which device does what: layers, shares, micro-batches; and explain why. Prices are simulated."""
    from manyhands.cli.inputs import load_task
    from manyhands.explaining.plan_pictures import check_picture_name
    from manyhands.facts.errors import BadValue
    from manyhands.plans import inference as planning_inference
    from manyhands.plans import planning
    from manyhands.plans import tiles as tiling

    check_picture_name(picture)
    if costs is not None:
        makes_plans = {
            "--batch-size": batch_size, "--micro-batches": micro_batches, "--order": order, "--profile": profile,
            "--out": out, "--schedule": schedule, "--rows": rows, "--columns": columns, "--depths": depths,
            "--picture": picture,
            "--best": best,
        }  # fmt: skip
        tiles, prices = tiling.parse_tile_costs(strategy, grid, costs, makes_plans)
        _show_groups(model, input, granularity, tiles, prices, json)
        return
    shown = _Shown(model, cluster, out, picture, what_if, schedule, json)
    if objective is not None:
        planning_inference.refuse_beside_objective(
            {
                "--batch-size": batch_size, "--micro-batches": micro_batches, "--order": order, "--grid": grid,
                "--rows": rows, "--columns": columns, "--depths": depths, "--compare": compare, "--best": best,
            }
        )  # fmt: skip
        shown.task = load_task(model, input, granularity, cluster, profile, training=False)
        shown.inference(objective=objective, strategy=strategy, home=home)
        return
    if home:
        raise BadValue("--home is for plans of inference.", hint="Say what for: --for latency or --for throughput.")
    tile_grid = tiling.tile_options(grid, rows, columns, depths)
    if strategy != "tiles" and tile_grid.grid is not None:
        raise BadValue(f"--grid, --rows, --columns and --depths are for --share tiles; --share is {strategy}.")
    norm, ahead = planning.batch_norm_named(batch_norm), planning.warm_up_named(warm_up)
    shown.task = load_task(model, input, granularity, cluster, profile)
    if compare:
        beside = {
            "--grid": grid, "--order": order, "--schedule": schedule or None, "--out": out or None, "--best": best,
            "--picture": picture or None,
        }  # fmt: skip
        conflicting = [option for option, value in beside.items() if value is not None]
        if conflicting or strategy not in ("auto", "pipeline"):
            raise BadValue(
                "--compare compares pipelines; it was given with "
                f"{' and '.join(conflicting) or f'--share {strategy}'}.",
                hint="Leave that out, or --compare.",
            )
        shown.comparison(
            batch_size=batch_size or BATCH_SIZE, micro_batches=micro_batches, batch_norm=norm, warm_up=ahead
        )
        return
    shown.training(
        batch_size=batch_size or BATCH_SIZE, strategy=strategy, micro_batches=micro_batches,
        order=planning.order_named(order or "1f1b"), tiles=tile_grid, batch_norm=norm, warm_up=ahead,
        best=best or "throughput",
    )  # fmt: skip


def _show_groups(model: str, input: str, granularity: str, tiles: tuple[int, int], prices: Costs, json: bool) -> None:
    """Show where an interior tile exchanges its boundary, by the tiling paper's model."""
    from manyhands.cli.show import print_json, working
    from manyhands.cli.tables import print_tile_groups
    from manyhands.plans import tiles as tiling
    from manyhands.plans.networks import load_network, parse_input

    with working(f"capturing {model}"):
        captured = load_network(model, parse_input(input), granularity)
    groups = tiling.tile_groups(captured, tiles, prices)
    if json:
        print_json(tiling.tile_groups_document(captured, groups))
    else:
        print_tile_groups(groups, captured)


@dataclass
class _Shown:
    """Makes a plan and shows it, as the options say."""

    model: str
    cluster: str
    out: str
    picture: str
    what_if: bool | None
    schedule: bool
    json: bool
    task: TaskInputs = field(init=False)

    def training(self, **options: Any) -> None:
        from manyhands.cli.explained import print_picture
        from manyhands.cli.show import print_json, working
        from manyhands.cli.tables import print_groupings, print_plan
        from manyhands.explaining.explain import explain
        from manyhands.explaining.tile_report import planned_traffic, tiled_schedule, traffic_text
        from manyhands.plans import planning
        from manyhands.plans import tiles as tiling
        from manyhands.plans.simulating import simulate

        network, machines, times = self.task.network, self.task.cluster, self.task.profile
        with working("planning") as say:
            began = process_time()
            planned = planning.plan(network, machines, profile=times, **options)
            seconds = process_time() - began
            result = simulate(planned.plan, network, machines, times, keep_spans=False)
            by_tiles = options["strategy"] == "tiles"
            priced = tiling.priced_groups(planned.plan, network, machines, times) if by_tiles else []
            tiled = tiled_schedule(planned.plan, network)
            by_use = planned_traffic(tiled).by_use if tiled is not None else None
            say("why, and what would make it faster")
            explained = explain(
                planned, network, machines, times, with_what_if=self.what_if, planning_seconds=seconds, **options
            )
        self._write(planned.plan, result, explained)
        if self.json:
            print_json(
                {
                    "plan": planned.plan.to_dict(),
                    "simulation": result.to_dict(),
                    "best": planned.best,
                    "planning_seconds": seconds,
                    "times": self.task.times,
                    "groupings": priced,
                    "bytes_by_use": by_use,
                    "candidates": [
                        {
                            "name": candidate.name,
                            "seconds": candidate.seconds,
                            "score": candidate.score,
                            "reason": candidate.reason,
                            "plan": candidate.plan.to_dict() if candidate.plan else None,
                        }
                        for candidate in planned.candidates
                    ],
                    "explanation": explained.to_dict(),
                }
            )
            return
        print_plan(planned.plan, network, machines, result)
        print_picture(planned.plan, network, machines)
        if by_use is not None:
            typer.echo(traffic_text(by_use))
        if priced:
            print_groupings(priced)
        self._rest(planned, result, explained, "simulate")

    def inference(self, *, objective: str, strategy: str, home: str) -> None:
        from manyhands.cli.explained import print_picture
        from manyhands.cli.show import print_json, working
        from manyhands.cli.tables import print_inference, print_plan
        from manyhands.explaining.explain import explain
        from manyhands.plans import inference as planning_inference
        from manyhands.plans.simulating import simulate

        network, machines, times = self.task.network, self.task.cluster, self.task.profile
        with working(f"planning for {objective}") as say:
            began = process_time()
            planned = planning_inference.plan_for(
                network, machines, times, objective=objective, strategy=strategy, home=home
            )
            seconds = process_time() - began
            table = planning_inference.inference_table(planned, network)
            shown = planning_inference.plan_to_show(planned.plan, objective)
            result = simulate(shown, network, machines, times, keep_spans=False)
            say("why, and what would make it faster")
            explained = explain(
                planned, network, machines, times, with_what_if=self.what_if, planning_seconds=seconds,
                strategy=strategy, home=home,
            )  # fmt: skip
        self._write(planned.plan, result, explained)
        if self.json:
            print_json(
                {
                    "objective": objective,
                    "plan": planned.plan.to_dict(),
                    "simulation": result.to_dict(),
                    "planning_seconds": seconds,
                    "times": self.task.times,
                    "candidates": table,
                    "explanation": explained.to_dict(),
                }
            )
            return
        print_plan(planned.plan, network, machines, result, explained.seconds)
        print_picture(planned.plan, network, machines)
        print_inference(table, objective)
        self._rest(planned, result, explained, "infer")

    def comparison(self, **options: Any) -> None:
        from manyhands.cli.show import print_json, working
        from manyhands.cli.tables import print_comparison
        from manyhands.explaining import comparison as comparing

        network, machines, times = self.task.network, self.task.cluster, self.task.profile
        with working("planning ours and the baselines"):
            compared = comparing.compare(network, machines, profile=times, **options)
        if self.json:
            print_json(compared.to_dict())
        else:
            print_comparison(compared, network, machines, options["batch_size"])
            if self.task.times:
                typer.echo(self.task.times)

    def _write(self, plan: Plan, result: Simulation, explained: Explanation) -> None:
        from manyhands.explaining.plan_pictures import write_plan_picture
        from manyhands.files.documents import write_document

        network, machines = self.task.network, self.task.cluster
        if self.out:
            write_document(self.out, plan.to_dict())
        if self.picture:
            write_plan_picture(Path(self.picture), plan, network, machines, result, explained)

    def _rest(self, planned: Planned, result: Simulation, explained: Explanation, command: str) -> None:
        """Print what follows the tables: why, notes, and what to type next."""
        from manyhands.cli.explained import print_explanation
        from manyhands.cli.inputs import print_notes
        from manyhands.plans.planning import schedule_text

        print_explanation(explained, planned)
        print_notes(self.task, result)
        if self.schedule:
            typer.echo(schedule_text(planned.plan, self.task.network))
        if self.picture:
            typer.echo(f"Picture written to {self.picture}.")
        if self.out:
            words = f"manyhands {command} --model {self.model} --cluster {self.cluster} --plan {self.out}"
            typer.echo(f"Plan written to {self.out}. Try: {words}")

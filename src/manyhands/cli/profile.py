"""`manyhands profile`: measure a network on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.options import Granularity, Input, Json, Model


def profile(
    model: Model = "mobilenetv2",
    input: Input = "",
    granularity: Granularity = "blocks",
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="The ladder, like 1,2,4,8.")] = "",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads to use; 0: all cores.")] = 0,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="About how long it may take.")] = 45.0,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Measure again even if a stored profile exists; what runs have stored of this network is forgotten.",
        ),
    ] = False,
    run: Annotated[
        str,
        typer.Option(
            "--run",
            help="With --refresh, in place of --model: a run's folder. What is stored of its network on workers is "
            "forgotten, and measured anew by the next run.",
        ),
    ] = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Write the profile to this .json file too.")] = "",
    json: Json = False,
) -> None:
    """Measure forward and backward seconds per layer over batch sizes, and the fastest kernels, on this machine."""
    if run:
        _forget_run(run, refresh, json)
        return
    import msgspec

    from manyhands.cli.show import print_json, print_table, working
    from manyhands.facts.units import format_bytes, format_seconds
    from manyhands.files.documents import write_document
    from manyhands.plans.networks import capture_model, parse_input
    from manyhands.plans.planning import parse_ladder
    from manyhands.profiler.measure import LADDER
    from manyhands.profiler.store import forget_sessions, profile_network

    ladder = parse_ladder(batch_sizes)
    with working(f"capturing {model}"):
        graph = capture_model(model, parse_input(input), granularity)
    with working(f"measuring {model}") as say:
        # A ladder asked for by name is measured; otherwise a stored profile serves.
        measured = profile_network(
            graph, ladder=ladder or LADDER, threads=threads or None, seconds=seconds,
            refresh=refresh or bool(ladder), on_progress=say,
        )  # fmt: skip
    if refresh:
        forget_sessions(graph.network.fingerprint)
    if out:
        write_document(out, msgspec.to_builtins(measured))
    if json:
        print_json(msgspec.to_builtins(measured))
        return
    sizes = [timing.samples for timing in measured.layers[0].ladder]
    rows = []
    for layer in measured.layers:
        cells = [f"{format_seconds(t.forward_seconds)} + {format_seconds(t.backward_seconds)}" for t in layer.ladder]
        rows.append([layer.layer, *cells])
    headings = ["layer", *(f"batch {size}" for size in sizes)]
    title = f"{measured.network} ({measured.input}) on {measured.machine}: forward + backward, {measured.source}"
    print_table(title, headings, rows, numbers=headings[1:])
    for samples, peak in measured.peak_bytes.items():
        typer.echo(f"Peak tensor bytes of a step at batch {samples}: {format_bytes(peak)}.")
    chosen = sorted({str(kernel) for kernel in measured.kernels.values()})
    typer.echo(f"Kernels: {', '.join(chosen) or 'PyTorch defaults'} ({len(measured.kernels)} operators changed).")


def _forget_run(run: str, refresh: bool, json: bool) -> None:
    from manyhands.cli.show import print_json
    from manyhands.explaining.prediction_accuracy import forget_run
    from manyhands.facts.errors import BadValue

    if not refresh:
        raise BadValue(f"--run {run} says whose profiles are to be measured anew.", hint="Add --refresh.")
    network, count = forget_run(run)
    if json:
        print_json({"network": network, "forgotten": count})
    else:
        typer.echo(f"Forgotten: {count} stored profile(s) of {network}. The next run measures it anew, on its workers.")

"""`manyhands infer`: a network over several devices, on pictures or arrays, or as a service."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.infer_show import SHOWN, InferShow
from manyhands.cli.options import (
    Gpus,
    JobCluster,
    Json,
    Lab,
    Listen,
    MinDevices,
    Scale,
    Slots,
    Token,
    Trace,
    devices_option,
)
from manyhands.cli.tokens import TokenFile, token_given
from manyhands.job.stopping import STOPPED, stopping

if TYPE_CHECKING:
    from manyhands.data.wanted import SampleSource
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known

TOP = 5


def infer(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name from `manyhands models`, or module:factory. Default: tiny."),
    ] = "",
    weights: Annotated[
        str,
        typer.Option("--weights", "-w", help="A run's folder, or a .safetensors file. Default: random."),
    ] = "",
    input: Annotated[
        str,
        typer.Option("--input", "-i", help="A folder of pictures, a picture, samples.npy, .npz, .json, or digits."),
    ] = "",
    resize: Annotated[
        bool,
        typer.Option(
            "--resize", help="Resize pictures, and arrays of them, to the network's height and width; else refused."
        ),
    ] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Write answers here: .npy (all outputs) or .jsonl (a line each).")
    ] = "",
    objective: Annotated[
        str, typer.Option("--for", help="latency (one sample at a time) or throughput (a stream of many).")
    ] = "latency",
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            "-s",
            help="How to share the work: auto (fastest), single, samples, tiles, deepthings, modnn, coates, channels, "
            "pipeline or split. Default: auto.",
        ),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", "-p", help="A plan file (manyhands plan --for ... --out), or as --share.")
    ] = None,
    home: Annotated[
        str, typer.Option("--home", help="The device that has the samples, which --share split and auto plan with.")
    ] = "",
    decouple: Annotated[
        str, typer.Option("--decouple", help="Decouple the network first: groups,shuffles,widening like 4,3,1.5.")
    ] = "",
    shape: Annotated[
        str, typer.Option("--shape", help="Shape of one sample, like 3x64x64. Default: the run's, or the model's own.")
    ] = "",
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="So many classes of each answer.")] = TOP,
    raw: Annotated[bool, typer.Option("--raw", help="All numbers of each answer in place of classes.")] = False,
    serve: Annotated[
        int | None,
        typer.Option("--serve", min=0, max=65535, help="Answer HTTP requests at this port until Ctrl-C; 0: any."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Of --serve: 0.0.0.0 for others too, with TLS and a token.")
    ] = "127.0.0.1",
    bearer: Annotated[
        str,
        typer.Option("--bearer", envvar="MANYHANDS_BEARER", help="What clients must know. Default: a new one."),
    ] = "",
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Of --serve: seconds that a request is given. Default: 300.")
    ] = None,
    devices: Annotated[
        str | None,
        devices_option("one a core, up to 4"),
    ] = None,
    min_devices: MinDevices = None,
    cluster: JobCluster = None,
    lab: Lab = None,
    scale: Scale = None,
    slots: Slots = None,
    trace: Trace = None,
    listen: Listen = "",
    token: Token = "",
    token_file: TokenFile = "",
    gpus: Gpus = None,
    json: Json = False,
) -> None:
    """Run a network on several devices: faster than the best of them, and on through the loss of some."""
    from manyhands.facts.errors import BadValue
    from manyhands.inference import job
    from manyhands.job.machines import machines_for
    from manyhands.planner.inference import objective_named

    if bool(input) == (serve is not None):
        raise BadValue(
            "There is nothing to answer." if not input else "--input and --serve both say what is to be answered.",
            hint="Give one of them: --input FOLDER, --input samples.npy, --input digits or --serve 8080.",
        )
    if time_limit is not None and not time_limit > 0:
        raise BadValue(f"--time-limit is {time_limit:g}; it must be more than 0 seconds.")
    token = token_given(token, token_file)
    chosen, objective = job.plan_named(share, plan), objective_named(objective)
    given = {
        "devices": devices, "cluster": cluster, "gpus": gpus, "lab": lab, "scale": scale, "slots": slots,
        "traces": tuple(trace) if trace else None, "listen": listen or None, "min_devices": min_devices,
    }  # fmt: skip
    with InferShow(quiet=json) as show:
        if output:
            from manyhands.inference.stream import check_output

            check_output(Path(output))
        from manyhands.inference.model import MODEL, load_known

        name = job.decoupled_name(model or MODEL, decouple) if decouple else model
        known = load_known(name, weights, shape, source=input, resize=resize)
        samples = _samples(known, input) if input else None
        _check_served(known, serve)
        wish = job.wish_for(given, chosen)
        with (
            machines_for(wish, token, show.say) as machines,
            job.opened(known, machines, wish, chosen, objective, show.say, home=home) as running,
        ):  # fmt: skip
            predicted = running.predicted_of(len(samples)) if samples else running.predicted_seconds
            show.ready(running, known, predicted, len(samples) if samples else None)
            if samples is None:
                _serve(running, known, (host, serve or 0), bearer, time_limit, show, json)
            else:
                told = _answer_all(running, known, samples, predicted, output, top, raw, show)
    if samples is None:
        return
    if json:
        from manyhands.cli.show import print_json

        print_json(told)
    else:
        show.finished(told, output)


def _samples(known: Known, source: str) -> SampleSource:
    """What is to be answered; the first of it is looked at, before anybody is started for it."""
    from manyhands.data.samples import read_samples

    samples = read_samples(source, known.wanted)
    next(iter(samples), None)
    return samples


def _check_served(known: Known, port: int | None) -> None:
    from manyhands.facts.errors import BadValue

    if port is not None and isinstance(known.wanted, dict):
        raise BadValue(
            f"{known.name} takes several arrays for a sample, which no request here holds: {', '.join(known.wanted)}.",
            hint="Give them in a file: --input samples.npz",
        )


def _answer_all(
    running: Inference, known: Known, samples: SampleSource, predicted: float, output: str, top: int, raw: bool,
    show: InferShow,
) -> dict[str, Any]:  # fmt: skip
    """Everything in order; what --json prints."""
    from manyhands.inference.stream import UNDER_WAY, Output, Tally, in_order

    lines: list[dict[str, Any]] = []
    tally = Tally()
    with contextlib.ExitStack() as stack:
        if samples.note:
            show.say(samples.note)
        file = Output(Path(output), len(samples), known.labels, top=top, raw=raw) if output else None
        if file is not None:
            stack.enter_context(file)
        show.begin_with(running, len(samples))
        at_once = 1 if running.objective == "latency" else UNDER_WAY
        stop = stack.enter_context(stopping())
        found = stack.enter_context(contextlib.closing(in_order(running, samples, at_once)))
        for answer in found:
            stop.is_patient = True
            tally.add(answer, known.labels, samples)
            if file is not None:
                file.add(answer)
            if show.quiet or len(lines) < SHOWN:
                lines.append(known.labels.told(answer, top=top, raw=raw))
            show.answered(answer.seconds)
            if stop.is_asked:
                left = f"; {output} has them" if output.endswith(".jsonl") else ""
                raise KeyboardInterrupt(f"{tally.samples:,} of {len(samples):,} samples were answered{left}.")
        stop.is_patient = False
    return {
        "answers": lines,
        **tally.told(),
        "network": running.graph.name,
        "objective": running.objective,
        "predicted_seconds": predicted,
        "reruns": running.reruns,
        "recoveries": list(running.recoveries),
        "weights": known.note,
        "plan": running.plan.to_dict(),
    }


def _serve(
    running: Inference, known: Known, address: tuple[str, int], bearer: str, time_limit: float | None, show: InferShow,
    json: bool,
) -> None:  # fmt: skip
    """Until Ctrl-C or SIGTERM; requests under way are answered then. A stream that ended by itself is an error."""
    from dataclasses import replace

    from manyhands.cli.show import print_json
    from manyhands.data.wanted import SampleForm
    from manyhands.inference.job import health
    from manyhands.inference.requests import Limits
    from manyhands.inference.server import Answering
    from manyhands.inference.stream import failed

    assert isinstance(known.wanted, SampleForm)
    limits = Limits() if time_limit is None else replace(Limits(), request_seconds=time_limit)
    with Answering(
        running, known.wanted, known.labels, host=address[0], port=address[1], bearer=bearer, limits=limits,
        health=lambda: health(running),
    ) as served:  # fmt: skip
        show.stop()
        pids = running.session.coordinator.local.running()
        if json:
            print_json(
                {
                    "url": served.url, "bearer": served.bearer, "pin": served.pin, "command": served.example,
                    "pids": pids,
                }
            )  # fmt: skip
        else:
            workers = ", ".join(f"{name} (process {pid})" for name, pid in pids.items())
            started = f"Workers started here: {workers}.\n" if workers else ""
            typer.echo(f"Answering at {served.url}. Try:\n  {served.example}\n{started}Ctrl-C ends it.")
        sys.stdout.flush()
        try:
            while (error := failed(running)) is None:
                time.sleep(0.2)
        except KeyboardInterrupt:
            show.say("Ending: what was asked is answered first. Ctrl-C again ends it at once.")
        else:
            raise error
    if not json:
        typer.echo(f"Answered {running.answered:,} samples; devices came or went {len(running.recoveries)} time(s).")
    raise typer.Exit(STOPPED)  # the one way in which it ends, unless by itself

"""`manyhands infer`: runs a network on several devices, on pictures or arrays, or as a service."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from manyhands.cli.config_options import takes_options_of, with_token
from manyhands.cli.infer_show import SHOWN, InferShow
from manyhands.inference.config import InferConfig
from manyhands.job.stopping import STOPPED, stopping

if TYPE_CHECKING:
    from manyhands.data.wanted import SampleSource
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known


@takes_options_of(InferConfig)
def infer(**arguments: Any) -> None:
    """Run a network on several devices: faster than the best of them, and on through the loss of some."""
    from manyhands.inference.arguments import decoupled_name, infer_config
    from manyhands.inference.job import open_by_name
    from manyhands.inference.model import load_known
    from manyhands.job.config_sections import MODEL
    from manyhands.job.devices import devices_for

    config = infer_config(with_token(arguments))
    if config.generates:
        _generate(config)
        return
    answers: dict[str, Any] = {}
    with InferShow(quiet=config.json) as show:
        config = replace(config, say=show.say)
        if config.output:
            from manyhands.inference.stream import check_output

            check_output(Path(config.output))
        name = decoupled_name(config.model or MODEL, config.decouple) if config.decouple else config.model
        loaded = load_known(name, config.weights, config.shape, source=config.input, resize=config.resize)
        samples = _samples(loaded, config.input) if config.input else None
        _check_served(loaded, config.serve)
        with devices_for(config, show.say) as devices, open_by_name(config, loaded, devices) as running:
            predicted = running.predicted_of(len(samples)) if samples else running.predicted_seconds
            show.ready(running, loaded, predicted, len(samples) if samples else None)
            if samples is None:
                _serve(running, loaded, config, show)
            else:
                answers = _answer_all(running, loaded, samples, predicted, config, show)
    if samples is None:
        return
    if config.json:
        from manyhands.cli.show import print_json

        print_json(answers)
    else:
        show.finished(answers, config.output)


def _generate(config: InferConfig) -> None:
    """Go on with the prompts, and print what follows them."""
    from manyhands.cli.show import print_json
    from manyhands.inference.generate import generate_with
    from manyhands.inference.text import load_text_model
    from manyhands.job.devices import devices_for

    with InferShow(quiet=config.json) as show:
        config = replace(config, say=show.say)
        loaded = load_text_model(config)
        with devices_for(config, show.say) as devices:
            placed = replace(config.on(devices), name=loaded.name)
            generated = generate_with(
                placed, loaded.model, loaded.prompts, on_ready=lambda running: show.ready_for_text(running, loaded)
            )
    answers = loaded.answers(generated)
    if config.json:
        print_json(
            {
                "answers": answers, "network": loaded.name, "weights": loaded.note, "new_tokens": generated.count,
                "seconds": generated.seconds, "first_seconds": generated.first_seconds,
                "tokens_per_second": generated.tokens_per_second,
                "following_per_second": generated.following_per_second, "restarts": generated.restarts,
                "plan": generated.plan.to_dict(),
            }
        )  # fmt: skip
    else:
        show.finished_text(answers, generated)


def _samples(loaded: Known, source: str) -> SampleSource:
    """Return the samples to answer; the first one is read now, before any worker is started."""
    from manyhands.data.samples import read_samples

    samples = read_samples(source, loaded.wanted)
    next(iter(samples), None)
    return samples


def _check_served(loaded: Known, port: int | None) -> None:
    from manyhands.facts.errors import BadValue

    if port is not None and isinstance(loaded.wanted, dict):
        raise BadValue(
            f"{loaded.name} takes several arrays for a sample, which no request here holds: "
            f"{', '.join(loaded.wanted)}.",
            hint="Give them in a file: --input samples.npz",
        )


def _answer_all(
    running: Inference, loaded: Known, samples: SampleSource, predicted: float, config: InferConfig, show: InferShow
) -> dict[str, Any]:
    """Answer all samples in order, and return what --json prints."""
    output, top, raw = config.output, config.top, config.raw
    from manyhands.inference.stream import UNDER_WAY, Output, Tally, in_order

    lines: list[dict[str, Any]] = []
    tally = Tally()
    with contextlib.ExitStack() as stack:
        if samples.note:
            show.say(samples.note)
        file = Output(Path(output), len(samples), loaded.labels, top=top, raw=raw) if output else None
        if file is not None:
            stack.enter_context(file)
        show.begin_with(running, len(samples))
        at_once = 1 if running.objective == "latency" else UNDER_WAY
        stop = stack.enter_context(stopping())
        stream = stack.enter_context(contextlib.closing(in_order(running, samples, at_once)))
        for answer in stream:
            stop.is_patient = True
            tally.add(answer, loaded.labels, samples)
            if file is not None:
                file.add(answer)
            if show.quiet or len(lines) < SHOWN:
                lines.append(loaded.labels.described(answer, top=top, raw=raw))
            show.answered(answer.seconds)
            if stop.is_asked:
                note = f"; {output} has them" if output.endswith(".jsonl") else ""
                raise KeyboardInterrupt(f"{tally.samples:,} of {len(samples):,} samples were answered{note}.")
        stop.is_patient = False
    return {
        "answers": lines,
        **tally.summary(),
        "network": running.graph.name,
        "objective": running.objective,
        "predicted_seconds": predicted,
        "reruns": running.reruns,
        "recoveries": list(running.recoveries),
        "weights": loaded.note,
        "plan": running.plan.to_dict(),
    }


def _serve(running: Inference, loaded: Known, config: InferConfig, show: InferShow) -> None:
    """Answer requests until Ctrl-C or SIGTERM, and those under way after it. A stream that ended by itself is an
    error."""
    from manyhands.cli.show import print_json
    from manyhands.data.wanted import SampleForm
    from manyhands.inference.job import health
    from manyhands.inference.requests import Limits
    from manyhands.inference.server import Answering
    from manyhands.inference.stream import failed

    assert isinstance(loaded.wanted, SampleForm)
    limits = Limits() if config.time_limit is None else replace(Limits(), request_seconds=config.time_limit)
    with Answering(
        running, loaded.wanted, loaded.labels, host=config.host, port=config.serve or 0, bearer=config.bearer,
        limits=limits,
        health=lambda: health(running),
    ) as served:  # fmt: skip
        show.stop()
        pids = running.session.coordinator.local.running()
        if config.json:
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
    if not config.json:
        typer.echo(f"Answered {running.answered:,} samples; devices came or went {len(running.recoveries)} time(s).")
    raise typer.Exit(STOPPED)  # the only way in which it ends, except for an error

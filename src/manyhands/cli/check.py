"""`manyhands check`: a network's capture, ways of sharing and needs, before anything is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.options import Granularity, Input, Json

if TYPE_CHECKING:
    from manyhands.plans.checking import NetworkCheck


def check(
    model: Annotated[
        str,
        typer.Argument(
            help="A name from `manyhands models`, decoupled:NAME, torchvision:NAME, timm:NAME, hf:TYPE (a small "
            "network of one of Hugging Face's types), hf:FOLDER (what its config.json describes), module:factory or "
            "file.py:Class."
        ),
    ],
    input: Input = "",
    granularity: Granularity = "blocks",
    json: Json = False,
) -> None:
    """Show whether a network can be captured, how it can be shared and what it takes.

    The exit code is 0 if it is captured, else that of the refusal, which names the line of the module.
    """
    from dataclasses import asdict

    from manyhands.cli.show import print_json, working
    from manyhands.plans.checking import check_model
    from manyhands.plans.networks import parse_input

    shape = parse_input(input)
    with working(f"capturing {model}"):
        result = check_model(model, shape, granularity)
    if json:
        print_json(asdict(result))
    elif result.is_captured:
        _print_captured(result)
    else:
        typer.echo(f"{model} is not captured.\n{result.refusal}\n{result.hint}".rstrip())
    if not result.is_captured:
        raise typer.Exit(result.exit_code)


def _print_captured(result: NetworkCheck) -> None:
    from manyhands.cli.show import print_table
    from manyhands.facts.units import format_bytes, format_count, format_seconds

    frozen = "" if result.trainable == result.parameters else f" ({format_count(result.trainable)} trained)"
    typer.echo(
        f"{result.model} is captured: input {result.input}, {result.layers} layers, {result.operators} operators."
    )
    typer.echo(
        f"{format_count(result.parameters)} parameters{frozen}, weights {format_bytes(result.weight_bytes)}; "
        f"a sample: {format_count(result.macs)} MACs, activations {format_bytes(result.activation_bytes)}; "
        f"training keeps {format_bytes(result.saved_bytes)} for the backward pass."
    )
    rows = [[entry.by, "yes" if entry.applies else "no", entry.extent, entry.reason] for entry in result.sharing]
    print_table("", ["share", "applies", "to", "what is in the way"], rows)
    label = f", {result.times_source}" if result.times_source else ""
    headings = ["one device, batch of", "training memory", f"forward{label}", f"step{label}", ""]

    def seconds(value: float | None) -> str:
        return "unknown" if value is None else format_seconds(value)

    rows = [
        [
            str(needs.batch_size),
            "none" if needs.peak_bytes is None else format_bytes(needs.peak_bytes),
            seconds(needs.forward_seconds),
            seconds(needs.step_seconds),
            needs.reason,
        ]
        for needs in result.training
    ]
    print_table("", headings, rows, numbers=headings[1:4])
    typer.echo("Memory is computed, for an optimizer that keeps one number per weight (SGD with momentum).")
    typer.echo(result.times_note)

"""`manyhands decouple`: shows the effect of decoupling on a network."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from manyhands.cli.options import Input, Json


def decouple(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A name from `manyhands models`, module:factory, torchvision:NAME or timm:NAME."
        ),
    ] = "resnet50",
    groups: Annotated[int, typer.Option("--groups", "-g", help="Groups of channels.")] = 4,
    shuffles: Annotated[
        str, typer.Option("--shuffles", help="Places where groups exchange channels, or all (one in every block).")
    ] = "3",
    widen: Annotated[float, typer.Option("--widen", help="How many times as many channels.")] = 1.5,
    input: Input = "",
    json: Json = False,
) -> None:
    """Show a network before and after decoupling: sizes, shuffles, and what stays dense.

    Wherever a model is named, decoupled:NAME is the network decoupled like this; options go before the colon:
    decoupled,groups=2,shuffles=all,widen=1.75:resnet50.
    """
    from manyhands.cli.show import print_json, print_table, working
    from manyhands.facts.units import format_bytes, format_count
    from manyhands.models.decoupled_report import decouple_named, parse_shuffles
    from manyhands.plans.networks import parse_input

    with working(f"decoupling {model}"):
        report = decouple_named(
            model, groups=groups, shuffles=parse_shuffles(shuffles), widen=widen, input_shape=parse_input(input)
        )
    if json:
        print_json({**report.to_dict(), "model": model, "moved_bytes": report.moved_bytes(groups)})
        return
    before, after = report.before, report.after
    rows = [
        [quantity, show(old), show(new), f"{new / old:.2f}"]
        for quantity, show, old, new in (
            ("parameters", format_count, before.parameters, after.parameters),
            ("weights", format_bytes, before.weight_bytes, after.weight_bytes),
            ("activations", format_bytes, before.activation_bytes, after.activation_bytes),
            ("MACs", format_count, before.macs, after.macs),
        )
    ]
    shape = "x".join(map(str, report.input))
    typer.echo(f"{model} ({shape}): {groups} groups, {len(report.shuffles)} shuffle(s), widened {widen:g} times.")
    print_table("", ["one sample", "before", "after", "ratio"], rows, numbers=["before", "after", "ratio"])
    placed = [
        [
            shuffle.name,
            shuffle.before,
            str(shuffle.depth),
            "x".join(map(str, shuffle.shape)),
            format_bytes(shuffle.bytes),
        ]
        for shuffle in report.shuffles
    ]
    headings = ["shuffle", "before layer", "convolutions before", "tensor", "size"]
    if placed:
        print_table("", headings, placed, numbers=["convolutions before", "size"])
    requested = report.shuffles_wanted
    if isinstance(requested, int) and len(placed) < requested:
        typer.echo(f"There is room for {len(placed)} shuffle(s), not {requested}.")
    typer.echo(f"{report.grouped} of {report.convolutions} convolutions are grouped. What stays dense:")
    for why, count in Counter(layer.why for layer in report.dense).items():
        names = [layer.name for layer in report.dense if layer.why == why]
        typer.echo(f"  {names[0]}{f' and {count - 1} more' if count > 1 else ''}: {why}")
    for layer in report.kept:
        typer.echo(f"Not widened: {layer.name} ({layer.why}).")
    if report.concats:
        typer.echo(f"{len(report.concats)} concatenation(s) are done in every group by itself.")
    moved = format_bytes(report.moved_bytes(groups))
    typer.echo(f"On {groups} equal devices the shuffles of one sample move {moved} in all.")

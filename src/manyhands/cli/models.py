"""`manyhands models`: the zoo, or one model layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.options import Granularity, Input, Json


def models(
    name: Annotated[str, typer.Argument(help="Show this model's layers.")] = "",
    input: Input = "",
    granularity: Granularity = "blocks",
    json: Json = False,
) -> None:
    """List the networks that come with manyhands, or show the layers of one."""
    from manyhands.cli.show import print_json, print_table, working
    from manyhands.facts.units import format_bytes, format_count
    from manyhands.models.registry import ZOO

    if not name:
        if json:
            print_json(
                [
                    {"name": e.name, "parameters": e.parameters, "macs": e.macs, "input": list(e.input_shape),
                     "kind": e.kind, "loss": e.loss, "description": e.description, "source": e.source}
                    for e in ZOO.values()
                ]
            )  # fmt: skip
            return
        rows = [
            [
                e.name,
                e.kind,
                "x".join(map(str, e.input_shape)),
                format_count(e.parameters),
                format_count(e.macs),
                e.description,
            ]
            for e in ZOO.values()
        ]
        headings = ["model", "kind", "input", "parameters", "MACs/sample", ""]
        print_table("Models", headings, rows, numbers=["parameters", "MACs/sample"])
        typer.echo("Anyone's network works too: --model module:factory. Layers of one: manyhands models NAME")
        return

    from manyhands.plans.networks import load_network, parse_input

    with working(f"capturing {name}"):
        network = load_network(name, parse_input(input), granularity)
    if json:
        print_json(
            {
                "name": network.name, "input": network.input_text, "granularity": granularity,
                "parameters": network.parameter_count, "macs": network.macs, "fingerprint": network.fingerprint,
                "layers": [
                    {
                        "name": layer.name, "operators": layer.last - layer.first, "macs": layer.macs,
                        "parameter_bytes": layer.parameter_bytes, "activation_bytes": layer.activation_bytes,
                        "saved_bytes": layer.saved_bytes, "saved_fixed_bytes": layer.saved_fixed_bytes,
                        "inputs": {n: list(network.tensors[n].shape) for n in layer.inputs},
                        "outputs": {n: list(network.tensors[n].shape) for n in layer.outputs},
                        "cut_tensors": [spec.name for spec in network.cut(index + 1)],
                        "cut_bytes": network.cut_bytes(index + 1),
                    }
                    for index, layer in enumerate(network.layers)
                ],
            }
        )  # fmt: skip
        return
    rows = []
    for index, layer in enumerate(network.layers):
        cut = network.cut(index + 1)
        shapes = " + ".join("x".join(map(str, spec.shape[1:])) or "1" for spec in cut)
        rows.append(
            [str(index), layer.name, format_count(layer.macs), format_bytes(layer.parameter_bytes),
             format_bytes(layer.saved_bytes), format_bytes(network.cut_bytes(index + 1)), shapes]
        )  # fmt: skip
    headings = ["", "layer", "MACs", "weights", "saved", "cut after", "tensors across the cut"]
    title = f"{network.name}, input {network.input_text}, {len(network.layers)} layers, one sample"
    print_table(title, headings, rows, numbers=["", "MACs", "weights", "saved", "cut after"])

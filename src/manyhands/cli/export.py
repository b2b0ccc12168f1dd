"""`manyhands export`: a trained network as a file for other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from manyhands.cli.options import Json


def export(
    weights: Annotated[
        str,
        typer.Argument(help="A run's folder (its newest checkpoint), a checkpoint's folder, or a .safetensors file."),
    ],
    onnx: Annotated[str, typer.Option("--onnx", help="The ONNX file to write, like model.onnx.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Of which model a file of weights is; a run's folder knows it.")
    ] = "",
    shape: Annotated[
        str, typer.Option("--shape", help="Of one sample, like 3x64x64, where nothing else says it.")
    ] = "",
    json: Json = False,
) -> None:
    """Write a trained network, as it evaluates, as ONNX, for batches of any size.

    Needs onnx and onnxscript: pip install 'manyhands[onnx]'.
    """
    from manyhands.cli.show import print_json
    from manyhands.facts.units import format_bytes
    from manyhands.inference.export import export_run

    path, note = export_run(weights, onnx, model=model, shape=shape)
    size = path.stat().st_size
    if json:
        print_json({"path": str(path), "bytes": size, "weights": note})
        return
    typer.echo(note)
    typer.echo(f"Written: {path} ({format_bytes(size)})")

"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Confine = Annotated[
    bool,
    typer.Option(
        "--confine/--no-confine",
        help="Give up the rights that a worker does not need, where the kernel can. MANYHANDS_CONFINE=off: never.",
    ),
]
MODEL, CLUSTER, BATCH_SIZE = "yolov2-16", "pi3x6", 8
"""Defaults of `plan` and `simulate`."""
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A name from `manyhands models`, decoupled:NAME, module:factory, file.py:Class, torchvision:NAME, "
        "timm:NAME or hf:TYPE.",
    ),
]
Input = Annotated[str, typer.Option("--input", help="Shape of one sample, like 3x224x224. Default: the model's own.")]
ClusterName = Annotated[
    str, typer.Option("--cluster", "-c", help="A preset from `manyhands devices`, local:N, or a cluster.yaml file.")
]
Granularity = Annotated[str, typer.Option("--granularity", help="Where the network may be cut: blocks or operators.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", "-b", min=1, help=f"Samples per step, over all devices. Default: {BATCH_SIZE}."),
]
MicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", min=1, help="Parts a batch is divided into. Default: chosen by the strategy."),
]
Order = Annotated[
    str | None,
    typer.Option("--order", help="sequential, gpipe, 1f1b or eager for training, stream for inference. Default: 1f1b."),
]
ProfileFile = Annotated[
    str,
    typer.Option(
        "--profile", help="Measured profile files (from `manyhands profile --out`), comma-separated: DEVICE=FILE."
    ),
]


Run = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", help="A run's folder. Default: the newest that goes on, or else the newest, wherever it is."
    ),
]

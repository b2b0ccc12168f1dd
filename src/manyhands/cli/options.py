"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from typing import Annotated, Any

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
"""What `plan` and `simulate` take where nothing is said."""
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A name from `manyhands models`, decoupled:NAME, module:factory, torchvision:NAME or timm:NAME.",
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


# Of jobs: train, split train and infer


def epochs_option(default: int) -> Any:
    return typer.Option("--epochs", "-e", help=f"Passes over the data. Default: {default}.")


def batch_size_option(default: int) -> Any:
    return typer.Option("--batch-size", "-b", help=f"Samples per step, over all devices. Default: {default}.")


def optimizer_option(default: str) -> Any:
    return typer.Option(
        "--optimizer",
        "-o",
        help=f"Any of torch.optim, like Adam:lr=1e-3. Default: {default}. A learning-rate schedule follows: "
        "Adam:lr=1e-3,schedule=CosineAnnealingLR,T_max=100.",
    )


JobModel = Annotated[
    str | None, typer.Option("--model", "-m", help="A name from `manyhands models`, or module:factory. Default: tiny.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help="digits, a folder (one of pictures per class, Pascal VOC, aclImdb, MovieLens, CIFAR-10, rendered "
        "chairs), file.npz, or a synthetic stand-in such as synthetic-imdb. Default: digits.",
    ),
]
JobInput = Annotated[str | None, typer.Option("--input", help="Shape of one sample, like 3x64x64.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps, in place of epochs.")]
Seed = Annotated[int | None, typer.Option("--seed", help="For shuffling and dropout. Default: 0.")]
Resume = Annotated[str, typer.Option("--resume", help="Go on with the run in this folder.")]
Out = Annotated[str, typer.Option("--out", help="The run's folder. Default: a new one in runs/.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]", help="A run's folder. Default: the newest that goes on, or else the newest, wherever it is."
    ),
]

# Of jobs: the devices


def devices_option(default: str) -> Any:
    return typer.Option(
        "--devices",
        "-n",
        help="How many workers, like 4; or 2:6: it waits for two, uses up to six, and goes on down to --min-devices. "
        f"Default: {default}.",
    )


MinDevices = Annotated[
    int | None,
    typer.Option(
        "--min-devices",
        help="With fewer workers left it waits a minute for others to join (--listen, --cluster), then ends. Default: "
        "1.",
    ),
]
JobCluster = Annotated[
    str | None, typer.Option("--cluster", "-c", help="A cluster.yaml whose devices join by name, or local:N.")
]
Lab = Annotated[
    str | None, typer.Option("--lab", help="A preset or cluster.yaml to play on this machine for this run (as root).")
]
Scale = Annotated[
    float | None, typer.Option("--scale", help="Of --lab: so many times slower than in life. Default: what fits.")
]
Slots = Annotated[int | None, typer.Option("--slots", min=1, max=16, help="Of --lab: workers on a device.")]
Trace = Annotated[
    list[str] | None, typer.Option("--trace", help="Of --lab: [DEVICE=]FILE of rates that its port follows.")
]
Listen = Annotated[
    str,
    typer.Option("--listen", help="HOST:PORT where --devices N workers of other machines join: 0.0.0.0:7077."),
]
Token = Annotated[
    str,
    typer.Option(
        "--token", envvar="MANYHANDS_TOKEN", help="What new workers must know. Default: this machine's shared token."
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="How many of the local workers each use a GPU.")]

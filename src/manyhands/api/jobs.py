"""A training job as typed on the command line: model, data and optimiser by name, and a run to go on with."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.api.joining import parse_address
from manyhands.api.networks import parse_input
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import parse as parse_optimizer
from manyhands.models.registry import ZOO

if TYPE_CHECKING:
    from torch import nn

    from manyhands.api.training import OnPlanned, OnStep, TrainResult
    from manyhands.data.sets import DataSets
    from manyhands.runtime.coordinator import Coordinator

MODEL, DATA, EPOCHS, BATCH_SIZE, OPTIMIZER = "tiny", "digits", 10, 64, "SGD:lr=0.1,momentum=0.9"
DEMO_DEVICES = 4


@dataclass(frozen=True)
class Wish:
    """What was typed; what was left out is None or empty."""

    model: str = MODEL
    data: str = DATA
    input: str = ""
    epochs: int = EPOCHS
    steps: int | None = None
    batch_size: int = BATCH_SIZE
    optimizer: str = OPTIMIZER
    plan: str = "samples"
    micro_batches: int | None = None
    batch_norm: str = "synchronised"
    seed: int = 0
    shuffle: bool = True


def build_model(name: str, data: DataSets) -> nn.Module:
    """A model for a data set: told the number of classes and channels where it takes them."""
    import torch

    from manyhands.models import registry

    torch.manual_seed(0)
    wanted = {"num_classes": data.num_classes, "channels": data.input_shape[0] if data.input_shape else 0}
    wanted = {key: value for key, value in wanted.items() if value}
    if name in ZOO:
        factory: Any = registry._load(ZOO[name].factory)
        taken = inspect.signature(factory).parameters
        return registry.build(name, **{key: value for key, value in wanted.items() if key in taken})
    if name.partition(":")[0] in ("torchvision", "timm"):
        return registry.build(name, num_classes=data.num_classes) if data.num_classes else registry.build(name)
    return registry.build(name)


def load_data(wish: Wish) -> DataSets:
    from manyhands.data.sets import load

    shape = parse_input(wish.input)
    if shape is None and wish.model in ZOO and (wish.model, wish.data) != (MODEL, DATA):
        shape = ZOO[wish.model].input_shape
    return load(wish.data, input_shape=shape)


def loss_of(name: str, data: DataSets) -> Any:
    from manyhands.models.registry import loss_function

    if name in ZOO and ZOO[name].loss not in ("cross_entropy", "mse"):
        return loss_function(ZOO[name].loss)
    return loss_function("cross_entropy" if data.num_classes else "mse")


@contextlib.contextmanager
def workers(listen: str, count: int, token: str, say: Any) -> Iterator[Coordinator]:
    """A coordinator that `count` workers have joined."""
    from manyhands.runtime.coordinator import DEFAULT_PORT, Coordinator

    host, port = parse_address(listen, DEFAULT_PORT)
    with Coordinator(host, port, token or os.environ.get("MANYHANDS_TOKEN", ""), on_event=say) as coordinator:
        say(f"Waiting for {count} worker(s). On each device: {coordinator.join_command()}")
        coordinator.wait_for(count)
        yield coordinator


def train_job(
    wish: Wish,
    *,
    cluster: Cluster | Coordinator | str | None,
    folder: Path | None = None,
    resume: Path | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: Any = None,
) -> TrainResult:
    """Train by names."""
    from manyhands.api.training import train

    optimizer = parse_optimizer(wish.optimizer)
    data = load_data(wish)
    model = build_model(wish.model, data)
    _check_classes(model, wish, data)
    return train(
        model, data.train, loss=loss_of(wish.model, data), optimizer=optimizer, batch_size=wish.batch_size,
        epochs=wish.epochs, steps=wish.steps, shuffle=wish.shuffle, cluster=cluster, plan=wish.plan,
        batch_norm=wish.batch_norm, seed=wish.seed, folder=folder, resume=resume or False, test=data.test,
        micro_batches=wish.micro_batches, name=wish.model, config={"wish": wish.__dict__}, on_planned=on_planned,
        on_step=on_step, say=say,
    )  # fmt: skip


def _check_classes(model: nn.Module, wish: Wish, data: DataSets) -> None:
    """A network with fewer outputs than the data has classes fails later, far from here, with less to say."""
    import torch

    from manyhands.data.loader import example

    if not data.num_classes:
        return
    inputs, _ = example(data.train, 2)
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        shape = "x".join(map(str, data.input_shape))
        raise BadValue(
            f"{wish.model} does not take inputs of shape {shape}, as {wish.data} gives them: {error}.",
            hint="Give another with --input, like --input 3x64x64.",
        ) from error
    finally:
        model.train(was_training)
    if isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] < data.num_classes:
        raise BadValue(
            f"{wish.model} has {output.shape[1]} outputs; {wish.data} has {data.num_classes} classes.",
            hint="Build it with more: a factory may take num_classes.",
        )


def wish_of(folder: Path, given: Mapping[str, Any]) -> Wish:
    """What a run was started with; what is given now goes before it (more epochs, say)."""
    from manyhands.runtime.record import read_config

    known = read_config(folder).get("wish")
    if not isinstance(known, dict):
        raise BadValue(
            f"{folder} was not started by manyhands train: its model cannot be built from a name.",
            hint="In Python: mh.train(model, data, ..., resume=FOLDER).",
        )
    fields = {key: value for key, value in known.items() if key in Wish.__dataclass_fields__}
    return Wish(**{**fields, **given})

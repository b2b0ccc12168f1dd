"""Trains a network by name, as the command line asks for it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import UnknownName, unknown
from manyhands.facts.optimizer import parse as parse_optimizer
from manyhands.job.named import Say, Wish, build_model, check_classes, full_path, load_data, loss_of, none_held_out
from manyhands.models.registry import ZOO
from manyhands.observe.tensorboard import need_tensorboard

if TYPE_CHECKING:
    from manyhands.job.base import OnOpened, OnPlanned, OnStep
    from manyhands.job.result import TrainResult
    from manyhands.runtime.coordinator import Coordinator


def train_job(
    wish: Wish,
    *,
    cluster: Cluster | LabCluster | Coordinator,
    folder: Path | None = None,
    resume: Path | None = None,
    on_opened: OnOpened | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: Say | None = None,
    tensorboard: bool = False,
) -> TrainResult:
    """Train by names."""
    if tensorboard:
        need_tensorboard()
    optimizer = parse_optimizer(wish.optimizer)
    if wish.model not in ZOO and ":" not in wish.model:
        error = unknown("model", wish.model, ZOO)
        raise UnknownName(error.message, hint=f"{error.hint} Or write module:factory.".strip())
    data = load_data(wish)
    if data.test is None and say is not None:
        say(none_held_out(data))
    model = build_model(wish.model, data)
    check_classes(model, wish.model, wish.data, data)
    from manyhands.training.train import train

    return train(
        model, data.train, loss=loss_of(wish.model, data), optimizer=optimizer, batch_size=wish.batch_size,
        epochs=wish.epochs, steps=wish.steps, shuffle=wish.shuffle, cluster=cluster, plan=wish.plan,
        batch_norm=wish.batch_norm, seed=wish.seed, folder=folder, resume=resume or False, test=data.test,
        micro_batches=wish.micro_batches, tune=wish.tune, tiles=wish.tiles, reduce=wish.reduce, feed=wish.feed,
        name=wish.model,
        config={"wish": _kept(wish)}, on_opened=on_opened, on_planned=on_planned,
        on_step=on_step, say=say, replan=wish.replan, backup_every=wish.backup_every,
        min_devices=wish.min_devices, max_devices=wish.max_devices, silence_seconds=wish.silence,
        tensorboard=tensorboard,
    )  # fmt: skip


def _kept(wish: Wish) -> dict[str, Any]:
    """Files by their full paths: a run may be resumed from elsewhere."""
    kept = asdict(wish)
    files = {name: full_path(kept[name]) for name in ("data", "plan", "cluster", "lab")}
    return {**kept, **files, "traces": [_full_trace(text) for text in wish.traces]}


def _full_trace(text: str) -> str:
    device, sign, file = text.rpartition("=")
    return f"{device}{sign}{full_path(file)}"

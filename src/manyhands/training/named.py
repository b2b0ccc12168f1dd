"""Trains a network by name, as `manyhands train` does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.errors import UnknownName, unknown
from manyhands.facts.optimizer import parse as parse_optimizer
from manyhands.job.named import build_model, check_classes, load_data, loss_of, none_held_out
from manyhands.models.registry import ZOO
from manyhands.observe.tensorboard import need_tensorboard
from manyhands.training.arguments import DOCUMENT
from manyhands.training.config import TrainConfig

if TYPE_CHECKING:
    from manyhands.job.result import TrainResult
    from manyhands.runtime.coordinator import Coordinator


def train_by_name(config: TrainConfig, devices: Cluster | LabCluster | Coordinator) -> TrainResult:
    """Train the model that a configuration names on the data that it names, and return the result."""
    if config.tensorboard:
        need_tensorboard()
    optimizer = parse_optimizer(config.optimizer)
    if config.model not in ZOO and ":" not in config.model:
        error = unknown("model", config.model, ZOO)
        raise UnknownName(error.message, hint=f"{error.hint} Or write module:factory.".strip())
    data = load_data(config.model, config.data, config.input)
    if data.test is None and config.say is not None:
        config.say(none_held_out(data))
    model = build_model(config.model, data)
    check_classes(model, config.model, config.data, data)
    from manyhands.models.detections import MeanAveragePrecision
    from manyhands.training.train import train_with

    metrics = {"mAP": MeanAveragePrecision()} if data.has_boxes and config.validate_every is not None else None
    resolved = replace(
        config.on(devices), test=data.test, name=config.model, config={DOCUMENT: config.document()}, metrics=metrics
    )
    return train_with(resolved, model, data.train, loss_of(config.model, data), optimizer)

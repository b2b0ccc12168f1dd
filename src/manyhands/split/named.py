"""Train a split by names, as `manyhands split train` does: a model, a data set, a paper's settings as a preset."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.facts.hyper import Hyper
from manyhands.job.named import build_model, check_classes, load_data, loss_of, none_held_out
from manyhands.split.arguments import DOCUMENT
from manyhands.split.config import BATCH_SIZE, EPOCHS, SplitConfig
from manyhands.split.presets import optimizer_of, preset_of

if TYPE_CHECKING:
    from manyhands.data.data_sets import DataSets
    from manyhands.split.job import SplitResult


def split_by_name(config: SplitConfig) -> SplitResult:
    """Train the model that a configuration names on the data that it names, and return the result."""
    if config.listen:
        from manyhands.split.joined_silos import split_with_joined

        return split_with_joined(config)
    data, preset = _data_and_preset(config)
    batch_size = config.batch_size or (preset.batch_size if preset is not None else BATCH_SIZE)
    epochs = config.epochs or (preset.epochs if preset is not None else EPOCHS)
    model = build_model(config.model, data)
    check_classes(model, config.model, config.data, data)
    from manyhands.data.loader import length
    from manyhands.data.order import BatchOrder
    from manyhands.split.training import split_with

    per_epoch = BatchOrder(length(data.train), batch_size, True, config.seed).steps_per_epoch
    resolved = replace(
        config, batch_size=batch_size, epochs=epochs, test=data.test, data_name=data.kind or data.name,
        name=config.model, config={DOCUMENT: config.document()}, is_command=False,
    )  # fmt: skip
    optimizer = optimizer_of(config, preset, per_epoch)
    return split_with(resolved, model, data.train, loss_of(config.model, data), optimizer)


def _data_and_preset(config: SplitConfig) -> tuple[DataSets, Hyper | None]:
    """Return the data in the shape that the paper's settings require, and those settings."""
    data = load_data(config.model, config.data, config.input)
    preset = preset_of(config, data)
    if preset is not None:
        if preset.note and config.say is not None:
            config.say(preset.note)
        if not config.input and preset.input_shape and preset.input_shape != data.input_shape:
            data = load_data(config.model, config.data, "x".join(map(str, preset.input_shape)))
        options = {**data.model_options, **{key: int(value) for key, value in preset.model_options.items()}}
        data = dataclasses.replace(data, model_options=options)
    if data.test is None and config.say is not None:
        config.say(none_held_out(data))
    return data, preset

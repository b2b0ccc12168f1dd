"""The workload of `mh.train`, from what its caller gives: data by number or in batches, held-out data, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import ConcatDataset

from manyhands.data.batch_stream import BatchStream, as_stream
from manyhands.data.given import batch_size_of, given, with_labels
from manyhands.data.held_out import samples_of
from manyhands.data.loader import length
from manyhands.data.padding import Padded
from manyhands.executor.scheduling import Scheduling
from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.own_loss import LABELS, OWN_LOSS
from manyhands.job.callback_list import check_callbacks
from manyhands.job.lengths import sample_lengths
from manyhands.job.metrics import check_metrics
from manyhands.job.validation import HeldOut
from manyhands.job.workload import Workload
from manyhands.training.config import TrainConfig


def workload_of(
    config: TrainConfig,
    model: nn.Module,
    data: Any,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    optimizer: Optimizer,
    scheduling: Scheduling | None = None,
) -> Workload:
    """Return the workload, with the batch size of data that comes in batches where the configuration has none.

    Samples of different lengths are read once, to know these.
    """
    check_callbacks(config.callbacks)
    labels = LABELS if loss is None or loss == OWN_LOSS else ()
    test = samples_of(config.test) if config.test is not None else None
    held_out = held_out_of(config, test)
    if labels:
        loss = OWN_LOSS
        test, held_out = (with_labels(each, labels) if each is not None else None for each in (test, held_out))
    assert loss is not None
    config = replace(config, test=test, validate=held_out)
    stream = as_stream(data, config.batch_size, labels)
    if stream is not None:
        check_stream(stream, config)
        config = replace(config, batch_size=stream.batch_size)
        return Workload(
            model, stream, loss, optimizer, config, config.batch_norm, precision=config.precision,
            scheduling=scheduling, held_out=validations_of(config), callbacks=config.callbacks,
        )  # fmt: skip
    samples = given(data)
    data = with_labels(samples.data, labels) if labels else samples.data
    config = replace(
        config, batch_size=batch_size_of(samples, config.batch_size), shuffle=samples.shuffles(config.shuffle)
    )  # fmt: skip
    if config.lengths is not None and config.say is not None:
        config.say(f"reading {length(data):,} samples once, for their lengths")
    others = [each for each in (test, held_out) if each is not None]
    lengths = sample_lengths(data, ConcatDataset(others) if others else None, config.lengths, config.pad)
    if lengths is not None:
        assert config.lengths is not None
        test, held_out = (
            Padded(each, lengths.padding, lengths.longest) if each is not None else None for each in (test, held_out)
        )
        config = replace(config, lengths=tuple(sorted({*config.lengths})), test=test, validate=held_out)
    return Workload(
        model, data, loss, optimizer, config, config.batch_norm, config.feed, lengths, config.precision, scheduling,
        validations_of(config), config.callbacks,
    )  # fmt: skip


def held_out_of(config: TrainConfig, test: Any) -> Any:
    """Return the data of validations: that of `validate`, or of `test` where only their interval is given."""
    if not config.is_validated:
        return None
    if config.validate is None and test is None:
        spelling = config.spelling("validate_every")
        raise BadValue(
            f"{spelling} is {config.validate_every}; there is no held-out data to validate on.",
            hint="Take data that has some, or leave it out." if config.is_command else "Add validate=data_set.",
        )
    return samples_of(config.validate) if config.validate is not None else test


def validations_of(config: TrainConfig) -> HeldOut | None:
    """Return what is validated, and when; None: nothing is."""
    if config.validate is None:
        return None
    check_metrics(config.metrics or {})
    return HeldOut(config.validate, config.interval, config.metrics or {})


def check_stream(stream: BatchStream, config: TrainConfig) -> None:
    """Refuse options that are for samples by number, and a length of training that does not follow from the data."""
    for option, is_given in (
        ("lengths", config.lengths is not None), ("feed='start'", config.feed == "start"),
        ("shuffle", config.shuffle is not None),
    ):  # fmt: skip
        if is_given:
            raise BadValue(
                f"{option} is for samples that are taken by number; the {stream.name} makes the batches itself.",
                hint="Give the data set in its place: mh.train(model, loader.dataset, batch_size=...).",
            )
    per_epoch = stream.batches_per_epoch
    if config.steps is None and per_epoch is None:
        raise BadValue(
            f"The {stream.name} does not say how many batches it has: its epochs have no known end.",
            hint="Write how many are trained: steps=1000.",
        )
    if config.batch_size not in (None, stream.batch_size):
        raise BadValue(
            f"batch_size is {config.batch_size!r}; the batches of the {stream.name} have {stream.batch_size} samples.",
            hint="Leave out batch_size=.",
        )
    stream.expects_whole_epochs = config.steps is None

"""Turns the arguments of `manyhands train` into a `TrainConfig`: of a new run, or of one that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from manyhands.facts.errors import BadFile, BadPlan, BadValue
from manyhands.facts.plan import ByChannels
from manyhands.job.arguments import (
    check_devices,
    check_length,
    check_resumed,
    forgotten_devices,
    given_arguments,
    local_count,
    plan_in,
    resumed_folder,
    stored_document,
    take_devices,
    take_share,
)
from manyhands.job.config import fields_of
from manyhands.models.registry import from_file
from manyhands.plans.planning import plan_file
from manyhands.training.config import STRATEGIES, TrainConfig

DOCUMENT = "wish"
"""The key of config.yaml under which the command's options are stored, since 0.1."""


def train_config(arguments: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a command; arguments that are None were left out."""
    options = given_arguments(arguments)
    has_plan_file = "plan" in options
    take_share(options, STRATEGIES)
    take_devices(options)
    check_length(options)
    if has_plan_file:
        options |= _decided_by(plan_file(options["plan"]), options)
    folder = resumed_folder(options, "train")
    if folder is not None:
        config = _resumed(folder, options)
        check_devices(config)
        return config
    config = TrainConfig.from_command(options)
    check_devices(config)
    _check_share(config)
    return config


def _decided_by(file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan file decides of the job, and refuse a contradiction."""
    plan = plan_in(file)
    if any(isinstance(stage.share, ByChannels) for stage in plan.stages):
        raise BadPlan(
            f"{file}: a stage is shared by channels, which is for inference.",
            hint="Run it with manyhands infer; to train, share it by samples or tiles.",
        )
    decided: dict[str, Any] = {
        "model": plan.network if "model" in options else from_file(plan.network, str(file)),
        "batch_size": plan.batch_size, "micro_batches": plan.micro_batches,
        "batch_norm": plan.batch_norm,
    }  # fmt: skip
    for name, value in decided.items():
        if options.get(name, value) != value:
            subject, flag = "network" if name == "model" else name, fields_of(TrainConfig)[name].option.flags[0]
            raise BadPlan(
                f"{file}: {subject} is {value}; {flag} is {options[name]}.",
                hint=f"Leave out {flag}, or give another plan.",
            )
    count = local_count(plan.devices)
    if count and "devices" not in options and not options.get("cluster"):
        decided |= {"devices": count, "max_devices": None}
    return {**decided, "plan": str(file)}


def _check_share(config: TrainConfig) -> None:
    """Refuse a job in which a device would get no sample of a micro-batch, or no tile."""
    count, tiles = config.count, config.tile_options
    grid = tiles.grid if tiles is not None else None
    if grid is not None and prod(grid) != count:
        raise BadValue(
            f"A grid of {'x'.join(map(str, grid))} has {prod(grid)} tiles; there are {count} tile slots (devices times "
            "their slots).",
            hint=f"Give a grid of {count} tiles, or --devices {prod(grid)}.",
        )
    samples = (config.batch_size or 1) // (config.micro_batches or 1)
    if config.plan == "samples" and samples < count:
        whole = f"a micro-batch of {samples}" if config.micro_batches else f"a batch of {samples}"
        raise BadValue(
            f"{count} devices cannot share {whole} sample(s).",
            hint=f"Give a larger --batch-size, or --devices {samples}.",
        )


def _resumed(folder: Path, options: dict[str, Any]) -> TrainConfig:
    """Return the configuration that a run was started with; its length and its devices may be given anew."""
    document = stored_document(folder, DOCUMENT)
    if document is None:
        raise BadValue(
            f"{folder} was not started by manyhands train: its model cannot be built from a name.",
            hint="In Python: mh.train(model, data, ..., resume=FOLDER).",
        )
    stored = TrainConfig.stored_values(document)
    check_resumed(TrainConfig, folder, stored, options)
    if "epochs" in options:
        stored["steps"] = None
    stored |= forgotten_devices(options, stored)
    if "plan" in options:
        stored |= {"micro_batches": None, "grid": "", "rows": "", "columns": "", "depths": ""}
    try:
        return TrainConfig.from_command({"plan": "samples", **stored, **options})
    except TypeError as error:
        raise BadFile(f"{folder / 'config.yaml'}: is not the configuration of a run: {error}.") from error

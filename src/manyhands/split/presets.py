"""The optimizer and the paper's settings of a split, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.facts.hyper import Hyper, hyper
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.optimizer import parse as parse_optimizer
from manyhands.split.config import OPTIMIZER, SplitConfig

if TYPE_CHECKING:
    from manyhands.data.data_sets import DataSets


def preset_of(config: SplitConfig, data: DataSets) -> Hyper | None:
    """Return the paper's settings for this model and data, if the configuration asks for them."""
    return hyper(config.model, data.kind or config.data) if config.preset else None


def optimizer_of(config: SplitConfig, preset: Hyper | None, steps_per_epoch: int) -> Optimizer:
    """Return the given optimiser, the paper's, or the usual one; --lr overrides its learning rate."""
    text = config.optimizer or (preset.optimizer_text(steps_per_epoch) if preset is not None else OPTIMIZER)
    optimizer = parse_optimizer(text)
    if config.lr is None:
        return optimizer
    options = {**optimizer.options, "lr": config.lr}
    return Optimizer(optimizer.name, schedule=optimizer.schedule, **options)

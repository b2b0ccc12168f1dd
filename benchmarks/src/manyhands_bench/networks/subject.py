"""A network to examine: a module with batches for it, and what is compared of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from manyhands.facts.errors import BadValue

MAIN_OUTPUTS = ("logits", "out", "last_hidden_state", "logits_per_image", "image_embeds", "text_embeds")
"""Keys of an output in the order in which one is taken for the loss."""
OF_PAIRS = ("logits_per_image", "logits_per_text")
"""Keys of outputs that hold a score for every two samples of a batch."""


@dataclass(frozen=True)
class Subject:
    """A module and the batches that it takes."""

    module: nn.Module
    batch: Callable[[int], Any]
    """Number of samples -> a batch: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""
    is_detector: bool = False


class NotBuilt(Exception):
    """The network cannot be built, or run by itself, on this machine."""


def call(module: nn.Module, batch: Any) -> Any:
    """Return what a module returns for a batch."""
    if isinstance(batch, tuple):
        return module(*batch)
    return module(**batch) if isinstance(batch, dict) else module(batch)


def in_float64(batch: Any) -> Any:
    """Return the batch with its floating-point tensors in float64."""
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)


def target_for(output: Any) -> torch.Tensor:
    """Return a random target for the main output of a batch. The scores of every two samples (CLIP) have one number for
    each sample, as a data set gives targets by samples."""
    main = main_output(output)
    is_of_pairs = isinstance(output, Mapping) and any(output.get(key) is main for key in OF_PAIRS)
    return torch.randn_like(main[:, :1] if is_of_pairs else main)


def main_output(output: Any) -> torch.Tensor:
    """Return the tensor of a module's output that the loss reads."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        values = [output[key] for key in MAIN_OUTPUTS if key in output] or list(output.values())
    else:
        values = list(output) if isinstance(output, Sequence) else []
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise BadValue(f"The output, a {type(output).__name__}, holds no tensor of floating-point numbers.")


def squared_error(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the main output, the loss of every network here."""
    return (main_output(output) - target).square().mean()


def first_that_runs(module: nn.Module, batches: Sequence[Callable[[int], Any]]) -> Callable[[int], Any]:
    """Return the first kind of batch, of several from small to large, that the module takes in training."""
    refusal: Exception | None = None
    for batch in batches:
        try:
            with torch.no_grad():
                call(module.train(), batch(2))
        except Exception as error:
            refusal = error
            continue
        return batch
    raise NotBuilt(f"{type(module).__name__} takes none of {len(batches)} input sizes: {refusal}")


def images(*shape: int) -> Callable[[int], torch.Tensor]:
    """Return a function that makes a batch of random images, or of videos, of one shape."""
    return lambda samples: torch.randn(samples, *shape)

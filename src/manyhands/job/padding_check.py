"""The check before the first step that padding changes nothing: samples of different lengths stay what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from manyhands.data.loader import example, sample_of
from manyhands.facts.errors import BadData
from manyhands.graph.own_loss import module_loss
from manyhands.job.evaluation import floats_of
from manyhands.job.lengths import SampleLengths
from manyhands.job.metrics import cast
from manyhands.job.workload import Workload

_ROUNDINGS = 1024
"""Difference, in roundings of the type computed in, above which padding has changed a loss."""


def check_padding(workload: Workload) -> None:
    """Refuse a network whose loss changes with the padding: it reads padded positions, or counts them.

    The module itself says so, at rest: of one sample alone, as it is and padded.
    """
    lengths = workload.lengths
    if lengths is None:
        return
    index, length = _most_padded(lengths)
    if length == lengths.of_samples[index]:  # no sample is padded
        return
    sample, long = sample_of(workload.data, index), int(lengths.of_samples[index])
    batches = [example([lengths.padding.of_sample(index, sample, to)], 1) for to in (long, length)]
    module, floats = workload.model, floats_of(workload.model)
    with _at_rest(module), torch.no_grad():
        losses = [
            float(module_loss(module, workload.loss, cast(inputs, floats), cast(targets, floats)))
            for inputs, targets in batches
        ]
    difference = abs(losses[0] - losses[1])
    if not difference <= _ROUNDINGS * torch.finfo(floats).eps * max(1.0, abs(losses[0])):
        raise BadData(
            f"Padding changes the loss: of sample {index} it is {losses[0]:.6g} as it is, with a length of "
            f"{long}, and {losses[1]:.6g} padded to {length}. The network reads padded positions, "
            "or the loss counts them.",
            hint="Give an attention_mask beside the input, which is padded with 0, and targets for each position, "
            "which are padded with -100 (or as pad= says). To train it as it is: verify=False.",
        )


def _most_padded(lengths: SampleLengths) -> tuple[int, int]:
    """Return the sample of which the largest part is padding where it is padded least, and the length it is padded
    to."""
    import numpy

    ends = numpy.array(lengths.of_batches.lengths)
    padded_to = ends[numpy.searchsorted(ends, lengths.of_samples)]
    index = int(numpy.argmin(lengths.of_samples / padded_to))
    return index, int(padded_to[index])


@contextlib.contextmanager
def _at_rest(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode within this context."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode

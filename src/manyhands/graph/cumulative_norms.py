"""Batch norms with `momentum=None`, whose running statistics are the plain average over all batches so far.

PyTorch computes such a norm's momentum in Python, as 1 / the number of batches, which `torch.export` cannot follow. So
while a module is traced these norms have a momentum that no module has, and in the graph the norm reads the buffer that
counts batches in its place:

    num_batches_tracked += 1                                a node of its own, right before the norm
    batch_norm(x, ..., momentum=num_batches_tracked)        the running statistics move by 1 / that number
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.nodes import Argument, Weight
from manyhands.graph.sizes import at

BATCH_NORM = "aten.batch_norm.default"
MOMENTUM = 6
"""The place of the momentum among a batch norm's arguments."""
_MARK = -float(2**40)
"""The momentum of a norm that has none, while it is traced."""
_MEAN, _COUNTER = "running_mean", "num_batches_tracked"


@contextmanager
def marked_norms(module: nn.Module) -> Iterator[None]:
    """Give every batch norm without a momentum the one that `counted` finds, for as long as the module is traced."""
    norms = [
        part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.momentum is None
    ]
    for norm in norms:
        norm.momentum = _MARK
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


def counted(target: str, arguments: tuple[Argument, ...], buffers: set[str], where: str) -> tuple[Argument, ...]:
    """Return an operator's arguments with the buffer that counts batches in place of a marked momentum; a norm that
    keeps no statistics, or is in evaluation mode, needs none."""
    if target != BATCH_NORM or arguments[MOMENTUM] != _MARK:
        return arguments
    momentum: Argument = 0.0
    mean = arguments[3]
    if arguments[5] and isinstance(mean, Weight):
        counter = mean.name.removesuffix(_MEAN) + _COUNTER
        if counter not in buffers:
            raise CaptureFailed(
                f"A batch norm with momentum=None keeps its mean in '{mean.name}', and nothing counts its "
                f"batches.{at(where)}",
                hint="Give it a momentum, or a buffer num_batches_tracked, as PyTorch's batch norms have.",
            )
        momentum = Weight(counter)
    return (*arguments[:MOMENTUM], momentum, *arguments[MOMENTUM + 1 :])


def is_counted(target: str, arguments: tuple[Argument, ...]) -> bool:
    """Return whether an operator is a batch norm that reads its momentum from a buffer."""
    return target == BATCH_NORM and isinstance(arguments[MOMENTUM], Weight)


def momentum_of(momentum: float | torch.Tensor) -> float:
    """Return by how much of the way running statistics move towards a batch's: for the average over all batches so far,
    1 / their number. A norm that is measured by itself has seen none."""
    if isinstance(momentum, torch.Tensor):
        return 1.0 if is_fake(momentum) else 1.0 / max(1.0, float(momentum))
    return float(momentum)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no numbers."""
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def with_momentum(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batch norm that takes a counter of batches as its momentum."""

    def counting(*arguments: Any) -> Any:
        momentum = momentum_of(arguments[MOMENTUM])
        return call(*arguments[:MOMENTUM], momentum, *arguments[MOMENTUM + 1 :])

    return counting

"""Works out what a batch norm makes and holds for backward, without running it.

PyTorch works both out by running two dozen operators for each norm, which is most of the time that describing or
checking a network takes. They are known: an output like the input, and mean and deviation of every channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from manyhands.graph.cumulative_norms import BATCH_NORM


def fake_norm(target: str, arguments: Sequence[Any]) -> torch.Tensor | None:
    """Return what a node makes of fake tensors, recorded by autograd as the operator would be; None where it is no
    batch norm in training, or one whose arguments the operator itself is to judge."""
    if not is_usual_norm(target, arguments):
        return None
    source, *others = arguments[:5]
    if not torch.is_grad_enabled():
        return torch.empty_like(source)
    return cast(torch.Tensor, _Norm.apply(source, *others))  # type: ignore[no-untyped-call]


def is_usual_norm(target: str, arguments: Sequence[Any]) -> bool:
    """Return whether a node is a batch norm in training whose arguments fit each other."""
    if target != BATCH_NORM or len(arguments) != 9 or arguments[5] is not True or not _are_numbers(arguments[6:8]):
        return False
    source, *others = arguments[:5]
    if not isinstance(source, torch.Tensor) or source.dim() < 2 or not source.is_floating_point():
        return False
    form = (source.shape[1],), source.dtype
    has_one_statistic = (others[2] is None) != (others[3] is None)
    return not has_one_statistic and all(other is None or _is_like(other, form) for other in others)


def _are_numbers(arguments: Sequence[Any]) -> bool:
    return all(isinstance(argument, (int, float)) for argument in arguments)


def _is_like(tensor: Any, form: tuple[tuple[int, ...], torch.dtype]) -> bool:
    return isinstance(tensor, torch.Tensor) and (tuple(tensor.shape), tensor.dtype) == form


class _Norm(torch.autograd.Function):
    """A batch norm that computes nothing: it holds what the operator holds. It has no backward pass."""

    @staticmethod
    def forward(context: Any, source: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        context.save_for_backward(source, *others, source.new_empty(2, source.shape[1]))  # means and deviations
        return torch.empty_like(source)

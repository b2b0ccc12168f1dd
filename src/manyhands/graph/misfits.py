"""Explains why a network cannot take an input, or a loss its target: which layer was given what, which type would do.

Linear(in_features=256, ...) is given (batch, 1200)      a network made for other samples
cross_entropy is given float32 labels, takes int64       labels.long()
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from manyhands.facts.errors import BadData


@dataclass
class Entered:
    """The layer in which a network failed, and what that layer was given."""

    layer: nn.Module | None = None
    name: str = ""
    given: str = ""

    def __str__(self) -> str:
        return f"layer '{self.name}', {self.layer}, was given {self.given}" if self.layer is not None else ""


@contextlib.contextmanager
def last_entered(module: nn.Module) -> Iterator[Entered]:
    """Record, in the object that this yields, the layer that raised an exception, if it is a layer without children."""
    names = {id(child): name for name, child in module.named_modules() if name}
    entered, under_way = Entered(), list[Entered]()

    def enter(layer: nn.Module, arguments: Any) -> None:
        shapes = ", ".join(shape_text(argument.shape) for argument in arguments if isinstance(argument, torch.Tensor))
        under_way.append(Entered(layer, names.get(id(layer), ""), shapes))

    def leave(layer: nn.Module, arguments: Any, output: Any) -> None:
        under_way.pop()

    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()
        last = under_way[-1] if under_way else Entered()
        if last.name and last.layer is not None and not list(last.layer.children()):
            entered.layer, entered.name, entered.given = last.layer, last.name, last.given


def shape_text(shape: Any) -> str:
    """Return '(batch, 3, 20, 20)': the first size is the number of samples."""
    return f"({', '.join(['batch', *map(str, shape[1:])])})" if len(shape) else "()"


def _is_column(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] == 1


def _lacks_an_axis(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    return tuple(output.shape) == (*tensor.shape, 1)


class _Remedy(NamedTuple):
    """An alternative way to give a target: the expression to type, when it is worth a try, and what it does."""

    typed: str
    fits: Callable[[torch.Tensor, torch.Tensor], bool]
    change: Callable[[torch.Tensor], torch.Tensor]


_REMEDIES = (
    _Remedy(
        "labels.long()",
        lambda labels, output: labels.is_floating_point() and bool((labels == labels.round()).all()),
        lambda labels: labels.long(),
    ),
    _Remedy("labels.float()", lambda labels, output: not labels.is_floating_point(), lambda labels: labels.float()),
    _Remedy("labels.squeeze(1)", lambda labels, output: _is_column(labels), lambda labels: labels.squeeze(1)),
    _Remedy(
        "labels.squeeze(1).long()", lambda labels, output: _is_column(labels), lambda labels: labels.squeeze(1).long()
    ),
    _Remedy("labels.unsqueeze(1)", _lacks_an_axis, lambda labels: labels.unsqueeze(1)),
    _Remedy("labels.unsqueeze(1).float()", _lacks_an_axis, lambda labels: labels.unsqueeze(1).float()),
)


def target_misfit(loss: Callable[..., Any], output: Any, target: Any) -> BadData | None:
    """Return what is wrong with a target on which a loss fails, where it takes the same in another type or shape; else
    None."""
    if not isinstance(target, torch.Tensor) or not isinstance(output, torch.Tensor):
        return None
    reason = _failure(loss, output, target)
    if reason is None:
        return None
    for remedy in _REMEDIES:
        if remedy.fits(target, output) and _failure(loss, output, changed := remedy.change(target)) is None:
            example = f", like {target.flatten()[0].item()}" if target.numel() else ""
            return BadData(
                f"The loss does not take these targets: they are {_described(target)}{example}; for an output of "
                f"{shape_text(output.shape)} it takes {_described(changed)}.\n  It says: {reason}",
                hint=f"Let the data set give {remedy.typed} in place of labels.",
            )
    return None


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape_text(tensor.shape)}"


def _failure(loss: Callable[..., Any], output: torch.Tensor, target: torch.Tensor) -> str | None:
    """Return the first line of what a loss raises on these; None where it raises nothing."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss(output, target.to(output.dtype) if target.is_floating_point() else target)
    except Exception as error:  # the loss is the user's: it may fail in any way
        return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return None

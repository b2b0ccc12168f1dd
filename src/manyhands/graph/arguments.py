"""The arguments with which a module is called for a batch, and the mode in which it runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def bound_arguments(module: nn.Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of `module` for a batch: a tuple is positional; a dict is keywords,
    or one positional dict if forward does not take its keys."""
    if isinstance(batch, (tuple, list)):
        return list(batch), {}
    if isinstance(batch, dict):
        accepted = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        if takes_any or all(key in accepted for key in batch):
            return [], dict(batch)
    return [batch], {}


@contextmanager
def in_training_mode(module: nn.Module) -> Iterator[None]:
    """Put the module in training mode. Where it already is, children that the user put in evaluation mode stay in
    it."""
    modes = [(child, child.training) for child in module.modules()]
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode

"""Keeps autograd from recording certain calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def unrecorded(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a call of which autograd records nothing; asking whether it records costs less than disabling it again."""

    @wraps(call)
    def inner(*arguments: _P.args, **options: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return call(*arguments, **options)
        with torch.no_grad():
            return call(*arguments, **options)

    return inner

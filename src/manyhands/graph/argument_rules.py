"""What an operator's arguments must be to each other, where PyTorch's own kernels do not look.

Most operators check their arguments themselves and raise. These do not, or not on every processor: the recurrent
layers' kernels read weights of another size beyond their end, and a group or stride of zero is a division by zero,
which x86 answers by ending the process. A rule here is exact: it holds for whatever PyTorch's modules make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from manyhands.facts.errors import BadGraph
from manyhands.graph import ops
from manyhands.graph.argument_types import parameters
from manyhands.graph.recurrent_rules import check_recurrent

_POSITIVE = frozenset(
    {"groups", "num_groups", "stride", "dilation", "kernel_size", "upscale_factor", "downscale_factor", "chunks"}
)
"""Arguments that an operator divides by, or counts with from 1 on."""


def check_arguments(target: str, arguments: Sequence[Any]) -> None:
    """Raise BadGraph where an operator's kernel could not be trusted with these arguments."""
    positional, _ = parameters(target)
    for parameter, given in zip(positional, arguments, strict=False):
        if parameter.name in _POSITIVE:
            _check_positive(parameter.name, given)
    if target in ops.RECURRENT:
        check_recurrent(target, arguments)


def _check_positive(name: str, given: Any) -> None:
    for number in given if isinstance(given, (list, tuple)) else [given]:
        if number < 1:
            raise BadGraph(f"{name} is {given!r:.80}; it must be 1 or more")

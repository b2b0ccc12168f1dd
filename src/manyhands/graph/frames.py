"""Finds which line of whose code made a node of an exported program: torch.export notes lines of `forward` methods
only."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.proxy import TracerBase

_TORCH = str(Path(torch.__file__).parent) + os.sep  # torchvision is not torch
_HERE = str(Path(__file__).parent.parent) + os.sep
_MODELS = _HERE + "models" + os.sep  # written as a user's own would be
_FILTER = "_filter_traceback_frames"


def is_torchs_or_ours(filename: str) -> bool:
    """Return whether a file belongs to torch or to manyhands: a user's line is in neither."""
    return filename.startswith(_TORCH) or (filename.startswith(_HERE) and not filename.startswith(_MODELS))


@contextlib.contextmanager
def whole_stacks() -> Iterator[None]:
    """Make torch.export also note the lines of functions that `forward` calls, and of losses, which have no `forward`.

    A version of torch without this hook notes what it usually does.
    """
    before = getattr(TracerBase, _FILTER, None)
    if before is None:
        yield
        return
    setattr(TracerBase, _FILTER, _below_forward)
    try:
        yield
    finally:
        setattr(TracerBase, _FILTER, before)


def _below_forward(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of the first `forward` and what it calls that are not torch's: those above belong to the
    caller."""
    first = next((place for place, frame in enumerate(stack) if frame.name == "forward"), len(stack))
    return traceback.StackSummary.from_list([frame for frame in stack[first:] if not is_torchs_or_ours(frame.filename)])

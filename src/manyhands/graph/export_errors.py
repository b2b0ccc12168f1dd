"""The error for a module that torch.export cannot capture: the line, the reason and what to change."""

from __future__ import annotations

import inspect
import linecache

from torch import nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.misfits import Entered
from manyhands.graph.sizes import at
from manyhands.graph.user_code import causes, is_library, user_frames

_DEPENDS = ("DataDependent", "ConstraintViolation", "Unbacked")
"""Parts of the names of torch's errors about values or sizes that are unknown while tracing."""


def explain(
    error: Exception, module: nn.Module, fixed: str, entered: Entered, shapes: str, *, is_loss: bool
) -> CaptureFailed:
    """Return an error that names the line in the user's code and the first line of torch's own message."""
    forward = inspect.unwrap(type(module).forward)
    source = inspect.getsourcefile(forward) or ""
    frames = list(user_frames(error))
    # Frames below the call of capture() itself are the caller's; the user's forward comes after torch's.
    inside = [frame for frame in frames if is_loss or frame.name == "forward" or frame.filename == source]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if inside:
        frame = frames[-1] if frames[-1].filename == inside[-1].filename else inside[-1]
        text = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        place = f"{frame.filename}:{frame.lineno}, in {frame.name}:\n    {text}"
    elif fixed:
        place = fixed
    else:
        is_own = source and not is_library(source)
        place = f"{source}:{inspect.getsourcelines(forward)[1]}, in {type(module).__name__}.forward" if is_own else ""
    depends = fixed or any(name in type(cause).__name__ for cause in causes(error) for name in _DEPENDS)
    if depends or any(text in str(error) for text in ("Constraints violated", "data-dependent", "dynamic shape")):
        hint = (
            "Python control flow that depends on tensor values, or a fixed batch size, cannot be captured. "
            "Use torch.where, or x.shape[0] in place of a number."
        )
    elif entered.layer is not None:
        hint = (
            f"The data gives {shapes}, of which {entered}. Give samples of the shape that the network was made for, "
            "or change that layer."
        )
    else:
        hint = f"Does {'the loss' if is_loss else 'the module'} itself run on {shapes}, as the data gives it?"
    subject = "the loss" if is_loss else type(module).__name__
    return CaptureFailed(f"torch.export cannot capture {subject}: {reason}{at(place)}", hint=hint)

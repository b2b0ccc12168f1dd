"""Runs torch.export without its warnings and logs, and finds the user's line at which it fixed the batch size.

Torch only logs that a symbol became a number; the line is found on the stack at that moment.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from manyhands.graph import recurrent
from manyhands.graph.compiler import load_compiler
from manyhands.graph.frames import whole_stacks
from manyhands.graph.user_code import is_library

_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"


@contextlib.contextmanager
def only_listener(listener: logging.Handler) -> Iterator[None]:
    """Silence torch's logs, and send those of symbolic shapes to `listener` alone. An inner call leaves an outer
    listener in place."""
    logger = logging.getLogger(_SYMBOLIC)
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0].startswith("torch")]
    others = [(other, other.disabled) for name in names if name != _SYMBOLIC for other in [logging.getLogger(name)]]
    before = (logger.handlers, logger.level, logger.propagate)
    if not any(isinstance(handler, _BatchFixed) for handler in logger.handlers):
        logger.handlers, logger.propagate = [listener], False
        logger.setLevel(logging.INFO if isinstance(listener, _BatchFixed) else logging.CRITICAL)
    for other, _ in others:
        other.disabled = True
    parent = logging.getLogger("torch")  # loggers created meanwhile pass their records on to it
    parent_before = (parent.handlers, parent.propagate)
    parent.handlers, parent.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        parent.handlers, parent.propagate = parent_before
        for other, disabled in others:
            other.disabled = disabled
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


class _BatchFixed(logging.Handler):
    """A log handler that notices when a symbol became a number, and looks up the stack for the user's line that did
    it."""

    place = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "set_replacement" in record.getMessage() and _is_number(record.args):
            stack = traceback.extract_stack()
            begins = max((i for i, frame in enumerate(stack) if frame.name == quiet_export.__name__), default=0)
            user_frames = [
                frame for frame in stack[begins:] if not is_library(frame.filename)
            ]  # not the caller of capture
            inside = [frame for frame in user_frames if frame.name != "<module>"]
            if inside:
                self.place = f"{inside[-1].filename}:{inside[-1].lineno}, in {inside[-1].name}:\n    {inside[-1].line}"


def _is_number(replaced: Any) -> bool:
    """Return whether a record of torch's log, of (symbol, by what, ...), says that a symbol was replaced by a number,
    not by another symbol."""
    return isinstance(replaced, tuple) and len(replaced) > 1 and str(replaced[1]).isdecimal()


def where_batch_was_fixed(again: Callable[[], Any]) -> str:
    """Export once more with a listener and return the line at which the batch size became a number, or ''."""
    listener = _BatchFixed()
    with only_listener(listener), contextlib.suppress(Exception):
        again()
    return listener.place


def quiet_export(flat: nn.Module, examples: tuple[torch.Tensor, ...], shapes: Any) -> Any:
    """Return torch.export's program in training IR, without its warnings and graph dumps."""
    load_compiler()  # torch.export needs it
    export = getattr(torch.export, "export_for_training", torch.export.export)
    quiet = only_listener(logging.NullHandler())
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), quiet, recurrent.shapes_only():
        warnings.simplefilter("ignore")
        with torch.enable_grad(), whole_stacks():
            return export(flat, examples, dynamic_shapes=(shapes,), strict=False)

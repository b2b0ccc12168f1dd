"""Finds the lines of a traceback that are the user's own."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator

from manyhands.graph.frames import is_torchs_or_ours

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def user_frames(error: BaseException | None) -> Iterator[traceback.FrameSummary]:
    """Yield the frames of the user's own code in an exception and its causes, innermost last."""
    for cause in reversed(causes(error)):
        for frame in traceback.extract_tb(cause.__traceback__):
            if not is_library(frame.filename):
                yield frame


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an exception and what caused it, outermost first."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return errors


def is_library(filename: str) -> bool:
    in_standard = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    return filename.startswith(("<frozen", "<string")) or is_torchs_or_ours(filename) or in_standard

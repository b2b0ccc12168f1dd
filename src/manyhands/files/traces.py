"""Recorded rates of a link, read from files of text. See `facts.trace` for what is in them."""

from __future__ import annotations

import os
from pathlib import Path

from manyhands.facts.errors import BadFile
from manyhands.facts.trace import LinkTrace, Trace, parse_link_trace, parse_trace
from manyhands.files.documents import read_text

_HINT = "Write FILE, or UP_FILE,DOWN_FILE."


def read_trace(path: str | Path) -> Trace:
    """Return the trace of one direction in a file."""
    path = Path(path).expanduser()
    return parse_trace(read_text(path), str(path))


def read_link_trace(source: str | Path) -> LinkTrace:
    """Return the trace in 'FILE', which has both directions or one that stands for both; or in 'UP_FILE,DOWN_FILE'."""
    path = Path(source).expanduser()
    if isinstance(source, Path) or "," not in source or os.path.exists(path):
        return parse_link_trace(read_text(path), str(path))
    names = [name.strip() for name in source.split(",")]
    if len(names) != 2 or not all(names):
        raise BadFile(f"'{source:.200}' does not name one trace or two.", hint=_HINT)
    up, down = map(read_trace, names)
    return LinkTrace(up, down, name=source)

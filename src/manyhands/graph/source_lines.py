"""The user's line that a node of an exported program comes from."""

from __future__ import annotations

import inspect
import linecache
import re
from pathlib import Path
from typing import Any

from manyhands.graph.frames import is_torchs_or_ours

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _own_frames(node: Any) -> list[tuple[str, str]]:
    """Return (file, line) of the user's frames, innermost last."""
    frames: list[tuple[str, str]] = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [frame for frame in frames if not is_torchs_or_ours(frame[0])]


def definition_of(function: Any) -> str:
    """Return 'PATH:LINE' of a function's definition, or '' if it was written in a terminal."""
    try:
        unwrapped = inspect.unwrap(function)
        return f"{inspect.getsourcefile(unwrapped)}:{inspect.getsourcelines(unwrapped)[1]}"
    except (OSError, TypeError):
        return ""


def line_of(node: Any) -> str:
    """Return the whole path and the text of the user's line; else the layer's name."""
    frames = _own_frames(node)
    if not frames:
        return f"layer '{where}'" if (where := place_of(node)) else ""
    file, line = frames[-1]
    text = linecache.getline(file, int(line)).strip()
    return f"{file}:{line}:\n    {text}" if text else f"{file}:{line}"


def place_of(node: Any) -> str:
    """Return 'FILE:LINE' of the innermost frame that is not torch's; else the path of the child module, or ''."""
    frames = _own_frames(node)
    if frames:
        return f"{Path(frames[-1][0]).name}:{frames[-1][1]}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("inner").removeprefix(".") if stack else ""

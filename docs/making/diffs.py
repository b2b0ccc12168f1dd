"""How a script was ported, as a block of a page: the difference between before.py and after.py of a folder."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def of_folder(folder: str) -> str:
    """Return a block with the lines of a port that differ, and those around them."""
    before, after = ((ROOT / folder / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    lines = [
        line for line in difflib.unified_diff(before, after, n=1, lineterm="") if not line.startswith(("---", "+++"))
    ]
    text = "\n".join("..." if line.startswith("@@") else line.rstrip() for line in lines)
    return f"```diff\n{text}\n```\n"

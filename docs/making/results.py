"""The README's results: the first table under "In short" of docs/results.md, which `manyhands bench all` writes."""

from __future__ import annotations

import re
from pathlib import Path

HEADING = "## In short"


def table(path: Path) -> str:
    text = path.read_text() if path.exists() else ""
    _, heading, section = text.partition(HEADING)
    lines = re.search(r"(?:^\|.*\n)+", section, re.M)
    if not heading or lines is None:
        return "Not measured yet: `manyhands bench all` writes docs/results.md.\n"
    return re.sub(r"\]\((?!https?:|#)", "](docs/", lines[0])

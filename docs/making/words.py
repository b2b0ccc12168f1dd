"""Helpers that generated pages share."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence


def cell(text: str) -> str:
    """Return text that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: indented text and columns stay as they are, the rest becomes paragraphs."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        if re.search(r"\S {2,}\S|^ {2,}", block, re.M):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(" ".join(block.split()).replace("<", "&lt;"))
    return "\n\n".join(blocks) + "\n"

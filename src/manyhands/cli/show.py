"""Printing: tables for people, JSON for programs, and a spinner during long work."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

WIDTH_WITHOUT_TERMINAL = 140


def print_json(data: object) -> None:
    """Print one JSON document to standard output; infinities become null."""
    print(json.dumps(_finite(data), indent=2))


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(item) for item in data]
    return data


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()
) -> None:
    """Print a table; columns named in `numbers` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    console.print(table)


@contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on standard error during long work; nothing where there is no terminal.

    Yields a function that says what is being done now.
    """
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield lambda step: status.update(f"{message}: {step}")


def plain(text: str) -> str:
    """Return the text without terminal control characters: names and reasons come from other machines and from
    files."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)

"""Tables in Markdown, and their places in a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manyhands.facts.errors import BadFile
from manyhands_bench.results import Result

BEGIN, END = "<!-- made: results -->", "<!-- end -->"
"""The markers around the table in a README that is made from stored results."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, one line for each row."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def with_table(text: str, table: str) -> str:
    """Return the README with the table between its markers."""
    before, begin, remainder = text.partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not begin or not end:
        raise BadFile(f"README.md: has {BEGIN} without {END} after it.", hint=f"Add {END} where the table ends.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def day(result: Result) -> str:
    """Return the day on which a result was measured."""
    return result.date[:10] or "date not known"

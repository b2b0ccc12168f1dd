"""Objects that describe themselves in a line, and in a notebook as a small table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

MOST_LETTERS = 120
"""The most letters of one value: a summary stays short, whatever it is of."""


class Summarized:
    """The base of objects whose fields are too many to be printed: `repr` and HTML show their summary."""

    __slots__ = ()

    def summary(self) -> Mapping[str, str]:
        """Return what to show, by its label."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{label} {_shortened(value)}" for label, value in self.summary().items())
        return f"<{type(self).__name__}: {facts}>"

    def _repr_html_(self) -> str:
        return as_table(type(self).__name__, self.summary())


def as_table(title: str, facts: Mapping[str, str]) -> str:
    """Return HTML of a title and a table of labels and values."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th>"
        f"<td style='text-align:left'>{escape(_shortened(value))}</td></tr>"
        for label, value in facts.items()
    )
    return f"<b>{escape(title)}</b><table>{rows}</table>"


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"

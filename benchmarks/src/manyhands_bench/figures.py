"""The types of a bench's figures and of its progress reports."""

from __future__ import annotations

from collections.abc import Callable

Figures = dict[str, float | int | str]
"""Figures by the name under which `--json` prints them; texts (settings, the machine) go to standard error. Not a
number: it could not be measured here."""
Progress = Callable[[str], None]
"""Called with a few words on what is being measured now."""

"""The values that `--help` shows: of every command's options, those that a reader would type as they stand there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from manyhands.cli.main import COMMANDS, GROUPS, app_with

_WORD = r"(?:2\(P-p\)(?:[+-]1)?|P-p|[a-z0-9](?:[\w.:@+=-]*\w)?)"
_LISTED = re.compile(rf"(?<![\w.-])((?:{_WORD}, )*{_WORD}),? or (?:for |an? )?({_WORD})(?![\w-])")
"""'a, b or c'."""
_COUNTED = re.compile(rf"(?<![\w.-])((?:{_WORD}, ){{2,}}{_WORD})(?=[.;]|$)")
"""'a, b, c.'"""
_EXPLAINED = re.compile(rf"(?:^|[;:,.] |\bor )({_WORD}): ")
"""'a: what it does; b: ...'"""
_DEFAULT = re.compile(r"Default: ([^\s;]*[^\s;.])(?=[.;]|$)")
_EXAMPLE = re.compile(r"\b(?:like|such as) (\d+ (?:ms|MB)|[^\s;]*[^\s;:.,])")


@dataclass(frozen=True)
class Shown:
    """A value that an option's help shows."""

    command: str
    option: str
    value: str


def options() -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, and each of its parameters that has a help."""

    def walk(command: Any, path: list[str]) -> Iterator[tuple[str, Any]]:
        for name, one in getattr(command, "commands", {}).items():
            if not one.hidden:
                yield from walk(one, [*path, name])
        if not hasattr(command, "commands"):
            yield from ((" ".join(path), one) for one in command.params if getattr(one, "help", None))

    yield from walk(typer.main.get_command(app_with((*COMMANDS, *GROUPS))), [])


def values_in(text: str, metavar: str = "") -> list[str]:
    """The values that a help text shows, in order, each once."""
    found = [one for one in metavar.split("|") if re.fullmatch(_WORD, one)] if "|" in metavar else []
    said = re.sub(r" \([^()]*\)", "", re.sub(r"`[^`]*`", "", text))
    for part in _LISTED.finditer(said):
        found += [*part.group(1).split(", "), part.group(2)]
    found += [word for part in _COUNTED.finditer(said) for word in part.group(1).split(", ")]
    for pattern in (_EXPLAINED, _DEFAULT, _EXAMPLE):
        found += pattern.findall(said)
    return list(dict.fromkeys(found))


def shown() -> list[Shown]:
    """Everything that is shown."""
    return [
        Shown(command, max(one.opts, key=len), value)
        for command, one in options()
        for value in values_in(one.help, one.metavar or "")
    ]

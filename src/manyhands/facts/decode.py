"""Plain documents (from JSON or YAML) -> typed facts, with errors that name the field, its value and the limit."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError, did_you_mean

T = TypeVar("T")
_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"unknown field `([^`]*)`")


def decode(document: Any, kind: type[T], what: str, error: type[ManyhandsError] = BadFile) -> T:
    """`document` as a `kind`, or an error such as "plan: stages[0].share.by is 'sample': Invalid value"."""
    try:
        return msgspec.convert(document, kind, strict=True)
    except msgspec.ValidationError as problem:
        match = _PLACE.match(str(problem))
        assert match is not None
        path = (match.group("path") or "$").removeprefix("$").removeprefix(".")
        said = match.group("said").replace("Object", "It", 1) if match.group("said").startswith("Object") else match.group("said")
        field = _FIELD.search(said)
        hint = ""
        if field:
            hint = did_you_mean(field.group(1), _fields_near(document, path, kind))
        value = _lookup(document, path)
        shown = f" is {value!r:.80}" if path and not isinstance(value, (dict, list)) else ""
        raise error(f"{what}: {path or 'the document'}{shown}: {said}.", hint=hint) from None


def _lookup(document: Any, path: str) -> Any:
    value = document
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return value


def _fields_near(document: Any, path: str, kind: Any) -> list[str]:
    """Field names of the struct at `path`, for did-you-mean; all structs' fields when it cannot be told."""
    names: set[str] = set()

    def visit(one: Any, depth: int) -> None:
        if depth > 6:
            return
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            for info in msgspec.structs.fields(one):
                names.add(info.encode_name)
                visit(info.type, depth + 1)
        for inner in getattr(one, "__args__", ()) or ():
            visit(inner, depth + 1)

    visit(kind, 0)
    return sorted(names)

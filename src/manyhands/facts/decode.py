"""Plain documents (from JSON or YAML) -> typed facts, with errors that name the field, its value and the limit."""

from __future__ import annotations

import re
import reprlib
import threading
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError, did_you_mean

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # a document may hold lists within lists by the billion
_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_PART = re.compile(r"\.\.\.|[^.\[\]]+")  # `[...]` is some value of a mapping
_worked_out: set[Any] = set()
_working_out = threading.Lock()


def converted(document: Any, kind: type[T], *, strict: bool = True) -> T:
    """`document` as a `kind`, or msgspec's errors.

    What msgspec works out of a type when it first meets it, one thread works out at a time: two at once crash it.
    """
    if kind not in _worked_out:
        with _working_out:
            msgspec.msgpack.Decoder(kind)
            _worked_out.add(kind)
    return msgspec.convert(document, kind, strict=strict)


def decode(document: Any, kind: type[T], what: str, error: type[ManyhandsError] = BadFile) -> T:
    """`document` as a `kind`, or an error such as "plan: order is 'pipe'; it must be one of gpipe, 1f1b."."""
    try:
        return converted(document, kind)
    except msgspec.ValidationError as problem:
        match = _PLACE.match(str(problem))
        assert match is not None
        said, path = match.group("said"), (match.group("path") or "").removeprefix(".")
        place = f"{what}: {path:.200}" if path else what
        types = list(_types_at(kind, _PART.findall(path)))
        if unknown := _UNKNOWN.match(said):
            hint = did_you_mean(unknown.group(1), _fields(types))
            raise error(f"{place}: there is no field '{unknown.group(1):.80}'.", hint=hint) from None
        if missing := _MISSING.match(said):
            raise error(f"{place}: the field '{missing.group(1)}' is missing.") from None
        shown = f"{place} is {_SHORT.repr(_lookup(document, path)):.80}"
        choices = [str(choice) for one in types if get_origin(one) is Literal for choice in get_args(one)]
        if said.startswith("Invalid") and choices:
            value = str(_lookup(document, path))
            hint = did_you_mean(value, choices)
            raise error(f"{shown}; it must be one of {', '.join(choices)}.", hint=hint) from None
        raise error(f"{shown}: {said[:1].lower()}{said[1:300]}.") from None
    except (ValueError, RecursionError) as problem:  # text that is none, lists inside each other without end
        raise error(f"{what}: cannot be read: {problem!s:.200}.") from problem


def _lookup(document: Any, path: str) -> Any:
    value = document
    for part in _PART.findall(path):
        try:
            if part == "...":
                return value
            value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return value


def _types_at(kind: Any, parts: list[str]) -> Iterator[Any]:
    """Every type that the place may have; the tag of a union of structs is the choice of its tags."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _types_at(one, parts)
    elif not parts:
        yield kind
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if parts[0] == kind.__struct_config__.tag_field:
            yield Literal[kind.__struct_config__.tag]
        for info in msgspec.structs.fields(kind):
            if info.encode_name == parts[0]:
                yield from _types_at(info.type, parts[1:])
    elif get_origin(kind) in (tuple, list, dict):
        inner = [one for one in get_args(kind) if one is not Ellipsis]
        for one in inner[-1:] if parts[0] == "..." else inner:
            yield from _types_at(one, parts[1:])


def _fields(types: list[Any]) -> list[str]:
    structs = [struct for struct in types if isinstance(struct, type) and issubclass(struct, msgspec.Struct)]
    return sorted({info.encode_name for struct in structs for info in msgspec.structs.fields(struct)})

"""Decoding of plain documents (from JSON or YAML) into typed facts, with errors that name the field, value and
limit."""

from __future__ import annotations

import re
import reprlib
import threading
from collections.abc import Iterator
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from manyhands.facts.errors import BadFile, ManyhandsError, did_you_mean

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # a document may hold lists within lists by the billion
_PLACE = re.compile(r"^(?P<said>.*?)(?: - at `\$(?P<inner>[^`]*)`)??(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
"""The problem and its place; inside an open union, the place within it comes first."""
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_PART = re.compile(r"\.\.\.|[^.\[\]]+")  # `[...]` is some value of a mapping
_worked_out: set[Any] = set()
_working_out = threading.Lock()


class OpenUnion:
    """A union of tagged structs to which other packages may add theirs. A field of this type holds one of them."""

    __slots__ = ()
    unknown_hint: ClassVar[str] = ""
    """A hint for a tag that no member has."""

    @classmethod
    def members(cls, document: Any = None) -> tuple[type[msgspec.Struct], ...]:
        """Return the structs of this union; `document` is what is to be read as one of them."""
        raise NotImplementedError


def read_open_union(kind: type, document: Any) -> Any:
    """Return `document` as a member of an open union: msgspec's hook (`dec_hook`) for types that it does not
    support."""
    if not issubclass(kind, OpenUnion):
        raise NotImplementedError(f"{kind.__name__} cannot be read")
    try:
        members: Any = Union[kind.members(document)]  # noqa: UP007
        return converted(document, members)
    except msgspec.ValidationError as problem:
        raise ValueError(str(problem)) from None  # to which msgspec adds where the union is


def converted(document: Any, kind: type[T], *, strict: bool = True) -> T:
    """Return `document` as a `kind`, or raise msgspec's errors.

    One thread at a time derives what msgspec keeps of a type when it first meets it: two at once crash it.
    """
    if kind not in _worked_out:
        with _working_out:
            msgspec.msgpack.Decoder(kind)
            _worked_out.add(kind)
    return msgspec.convert(document, kind, strict=strict, dec_hook=read_open_union)


def decode(document: Any, kind: type[T], document_name: str, error: type[ManyhandsError] = BadFile) -> T:
    """Return `document` as a `kind`, or raise an error such as "plan: order is 'pipe'; it must be one of gpipe,
    1f1b."."""
    try:
        return converted(document, kind)
    except msgspec.ValidationError as problem:
        match = _PLACE.match(str(problem))
        assert match is not None
        problem_text = match.group("said")
        path = ((match.group("path") or "") + (match.group("inner") or "")).removeprefix(".")
        place = f"{document_name}: {path:.200}" if path else document_name
        types = list(_types_at(kind, _PART.findall(path)))
        if unknown := _UNKNOWN.match(problem_text):
            hint = did_you_mean(unknown.group(1), _fields(types))
            raise error(f"{place}: there is no field '{unknown.group(1):.80}'.", hint=hint) from None
        if missing := _MISSING.match(problem_text):
            raise error(f"{place}: the field '{missing.group(1)}' is missing.") from None
        shown = f"{place} is {_SHORT.repr(_lookup(document, path)):.80}"
        choices = [
            str(choice) for place_type in types if get_origin(place_type) is Literal for choice in get_args(place_type)
        ]
        if problem_text.startswith("Invalid") and choices:
            value = str(_lookup(document, path))
            hint = did_you_mean(value, choices)
            if not hint.startswith("Did you mean"):  # otherwise it is a slip
                hint = next((place_type.unknown_hint for place_type in types if _is_open(place_type)), hint)
            raise error(f"{shown}; it must be one of {', '.join(choices)}.", hint=hint) from None
        raise error(f"{shown}: {problem_text[:1].lower()}{problem_text[1:300]}.") from None
    except (ValueError, RecursionError) as problem:  # text that is none, lists inside each other without end
        raise error(f"{document_name}: cannot be read: {problem!s:.200}.") from problem


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
    """Yield every type that the place may have; the tag of a union of structs is the choice of its tags."""
    if get_origin(kind) in (Union, UnionType):
        for argument_type in get_args(kind):
            yield from _types_at(argument_type, parts)
    elif _is_open(kind):
        yield kind
        for member in kind.members():
            yield from _types_at(member, parts)
    elif not parts:
        yield kind
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if parts[0] == kind.__struct_config__.tag_field:
            yield Literal[kind.__struct_config__.tag]
        for info in msgspec.structs.fields(kind):
            if info.encode_name == parts[0]:
                yield from _types_at(info.type, parts[1:])
    elif get_origin(kind) in (tuple, list, dict):
        inner = [argument_type for argument_type in get_args(kind) if argument_type is not Ellipsis]
        for argument_type in inner[-1:] if parts[0] == "..." else inner:
            yield from _types_at(argument_type, parts[1:])


def _is_open(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, OpenUnion) and not issubclass(kind, msgspec.Struct)


def _fields(types: list[Any]) -> list[str]:
    structs = [struct for struct in types if isinstance(struct, type) and issubclass(struct, msgspec.Struct)]
    return sorted({info.encode_name for struct in structs for info in msgspec.structs.fields(struct)})

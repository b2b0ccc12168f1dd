"""Keywords of functions that take many: a frozen struct describes them once, and `**options` carries them.

A function with more settings than a reader can hold in the head declares them as the fields of a frozen dataclass
`NameSettings`, and takes `**options: Unpack[NameOptions]`, a TypedDict of the same keys for mypy and editors.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from manyhands.facts.errors import BadValue

_Struct = TypeVar("_Struct")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def settings_from(struct: type[_Struct], function: str, options: Mapping[str, Any]) -> _Struct:
    """Return the struct with the values that a call of `function` gave; a keyword it does not have is refused."""
    check_keywords(function, options, _fields(struct))
    return struct(**options)


def check_keywords(function: str, keywords: Iterable[str], allowed: Collection[str]) -> None:
    """Refuse keywords that a function does not have, and name the nearest that it has."""
    for name in keywords:
        if name not in allowed:
            close = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]}?" if close else f"It takes: {', '.join(sorted(allowed))}."
            raise BadValue(f"{function} has no option {name}.", hint=hint)


def takes_settings(struct: type[Any]) -> Callable[[_Function], _Function]:
    """Return a decorator for a function with `**options`: `help()` and the reference then show every keyword."""

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        fixed = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=field.type)
            for name, field in _fields(struct).items()
        ]
        function.__signature__ = signature.replace(parameters=[*fixed, *keywords])  # type: ignore[attr-defined]
        return function

    return decorated


def _fields(struct: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(struct)}


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default

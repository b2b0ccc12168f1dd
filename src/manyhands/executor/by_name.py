"""PyTorch's classes by name, with options as data: looked up, checked, and built, with errors that a person can use."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from manyhands.facts.errors import BadValue, ManyhandsError, did_you_mean, unknown
from manyhands.facts.optimizer_options import Option

T = TypeVar("T")
_NOT_OPTIONS = {"self", "params", "optimizer", "last_epoch", "verbose", "scale_fn"}
"""Parameters that are no options: manyhands passes them, they are deprecated, or they take code."""


def classes(module: Any, base: type) -> dict[str, Any]:
    """Return the public classes of a module that derive from `base`, by name."""
    derived = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}
    return {name: kind for name, kind in derived.items() if kind is not base and not name.startswith("_")}


def resolve(noun: str, name: str, kinds: dict[str, Any], refused: Mapping[str, str]) -> Any:
    """Return the class of a name, whatever its case; `refused` says why some of the `kinds` cannot be used."""
    exact = {other.lower(): other for other in kinds}.get(name.lower())
    allowed = sorted(set(kinds) - set(refused))
    if exact is None:
        raise unknown(noun, name, allowed)
    if exact in refused:
        raise BadValue(f"{exact} cannot be used: {refused[exact]}.", hint=f"Use one of {', '.join(allowed)}")
    return kinds[exact]


def check_options(kind: Any, options: Mapping[str, Option]) -> None:
    """Refuse options that a class does not take, options that it lacks, and values of another type than it declares."""
    accepted = {
        name: parameter for name, parameter in inspect.signature(kind).parameters.items() if name not in _NOT_OPTIONS
    }
    for name in options:
        if name not in accepted:
            close = did_you_mean(name, accepted)
            hint = f"{close}\n" if close.startswith("Did") else ""
            raise BadValue(
                f"{kind.__name__} takes no option '{name}'.", hint=f"{hint}{kind.__name__} takes {', '.join(accepted)}"
            )
    needed = [
        name
        for name, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty and name not in options
    ]
    if needed:
        hint = f"{kind.__name__} takes {', '.join(accepted)}"
        raise BadValue(f"{kind.__name__} needs {' and '.join(needed)}, which is not given.", hint=hint)
    hints = _type_hints(kind)
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            usual = accepted[name].default
            hint = "" if usual in (inspect.Parameter.empty, None) else f"PyTorch's default is {name}={usual}"
            raise BadValue(f"{kind.__name__}: {name} is {value!r:.80}; it must be {_words(hints[name])}.", hint=hint)


def wrapped(name: str, options: Mapping[str, Option], make: Callable[[], T]) -> T:
    """Return what `make` returns; whatever PyTorch raises becomes an error that names the class and its options."""
    try:
        return make()
    except ManyhandsError:
        raise
    except Exception as error:  # PyTorch checks little, so that a wrong value may fail in any way
        written = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise BadValue(f"{name}({written}) is refused by PyTorch: {error_text(error)}") from error


def error_text(error: Exception) -> str:
    """Return the first line of an exception's message."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{first:.300}".rstrip(".") + "."


def _type_hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of a class's constructor; none where PyTorch's annotations cannot be read."""
    try:
        return typing.get_type_hints(kind.__init__)
    except Exception:  # an annotation may name what is imported for type checkers only
        return {}


def _fits(value: Option, hint: Any) -> bool:
    """Return whether a value is what an annotation says. Alternatives that no option can be (tensors, functions) do not
    count."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in arguments
    if arguments and origin not in (tuple, list) and not _is_iterable(origin):
        return any(_fits(value, alternative) for alternative in arguments)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e3
        return is_whole and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint is type(None):
        return value is None
    if isinstance(value, tuple) and arguments:
        each = arguments if origin is tuple and Ellipsis not in arguments else arguments[:1] * len(value)
        return len(value) == len(each) and all(map(_fits, value, each))
    is_many = origin in (tuple, list) or _is_iterable(origin)
    return not is_many and hint is not torch.Tensor and not inspect.isclass(hint)


def _is_iterable(origin: Any) -> bool:
    return inspect.isclass(origin) and issubclass(origin, Iterable)


def _words(hint: Any) -> str:
    """Return an annotation in words for a person: 'a number or None'."""
    simple = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "None"}
    if hint in simple:
        return simple[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple and Ellipsis not in arguments:
        return f"{len(arguments)} numbers in brackets"
    if origin in (tuple, list) or _is_iterable(origin):
        return "numbers in brackets"
    return " or ".join(dict.fromkeys(_words(part) for part in arguments if part is not torch.Tensor))

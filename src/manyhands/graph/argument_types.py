"""The type of every argument of a node, checked against its operator's schema before anything is run.

PyTorch converts arguments in native code and trusts some of them: an integer in the place of a dtype becomes an
enumerator that does not exist, and the process ends with a segmentation fault. So a dtype must be written as a dtype
here, a memory format as a memory format, and nothing is left to a conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from manyhands.facts.network import DTYPE_BYTES
from manyhands.graph import ops
from manyhands.graph.cumulative_norms import is_counted
from manyhands.graph.limits import refuse
from manyhands.graph.nodes import Argument, Enum, Node, SampleCount, Special, Value, Weight

_NESTED = re.compile(r"(Optional|List)\[(.*)\]")


class Parameter(NamedTuple):
    """An argument of an operator's schema."""

    name: str
    type: str
    length: int | None
    """The length of a list of fixed length, for all of whose items PyTorch also takes one number."""
    is_required: bool


@cache
def parameters(target: str) -> tuple[tuple[Parameter, ...], dict[str, Parameter]]:
    """Return the positional arguments of an operator, and those given by name."""
    listed = [
        (
            parameter.kwarg_only,
            Parameter(parameter.name, str(parameter.real_type), parameter.N, not parameter.has_default_value()),
        )
        for parameter in ops.resolve(target)._schema.arguments
    ]
    return tuple(parameter for named, parameter in listed if not named), {
        parameter.name: parameter for named, parameter in listed if named
    }


def check_types(node: Node, place: str) -> None:
    """Refuse a node whose arguments are too few, too many or not of the types that its operator takes."""
    positional, named = parameters(node.target)
    if len(node.arguments) > len(positional):
        refuse(place, f"has {len(node.arguments)} arguments; {node.target} takes at most {len(positional)}")
    for parameter, argument in zip(positional, node.arguments, strict=False):
        if parameter.name != "momentum" or not is_counted(node.target, node.arguments):
            _check(parameter, argument, node, place)
    for name, argument in node.options.items():
        if name not in named:
            names = ", ".join(sorted(named)) or "none"
            refuse(place, f"option {name!r:.80} is not one of {node.target}; it has {names}")
        _check(named[name], argument, node, place)
    missing = [parameter.name for parameter in positional[len(node.arguments) :] if parameter.is_required]
    missing += [
        parameter.name for parameter in named.values() if parameter.is_required and parameter.name not in node.options
    ]
    if missing:
        refuse(place, f"{node.target} lacks its argument {missing[0]!r}")


def _check(parameter: Parameter, argument: Argument, node: Node, place: str) -> None:
    if not _fits(argument, parameter.type, parameter.length):
        type_text = f"{parameter.type}" + (f" of {parameter.length}" if parameter.length is not None else "")
        refuse(place, f"argument {parameter.name!r} of {node.target} is {argument!r:.80}; it must be {type_text}")


def _fits(argument: Argument, type_text: str, length: int | None) -> bool:
    if (nested := _NESTED.fullmatch(type_text)) is not None:
        kind, inner = nested.groups()
        if kind == "Optional":
            return argument is None or _fits(argument, inner, length)
        if isinstance(argument, tuple):
            return all(_fits(item, inner, None) for item in argument)
        return length is not None and _fits(argument, inner, None)
    fits = _PLAIN.get(type_text)
    return fits is not None and fits(argument)


def _is_integer(argument: Argument) -> bool:
    return isinstance(argument, (int, SampleCount))


def _is_number(argument: Argument) -> bool:
    return isinstance(argument, (int, float, SampleCount, Special))


def _is_tensor(argument: Argument) -> bool:
    """Return whether an argument may stand for a tensor; PyTorch makes one of a number: `x + 1` is captured as
    add.Tensor(x, 1)."""
    return isinstance(argument, (Value, Weight)) or _is_number(argument)


def _is_truth(argument: Argument) -> bool:
    return isinstance(argument, bool) or (isinstance(argument, int) and argument in (0, 1))


def _is_constant(names: Any) -> Callable[[Argument], bool]:
    return lambda argument: isinstance(argument, Enum) and argument.name in names


_PLAIN: dict[str, Callable[[Argument], bool]] = {
    "Tensor": _is_tensor,
    "int": _is_integer,
    "number": _is_number,
    "float": _is_number,
    "bool": _is_truth,
    "str": lambda argument: isinstance(argument, str),
    "ScalarType": _is_constant(DTYPE_BYTES),
    "MemoryFormat": _is_constant(ops.MEMORY_FORMATS),
}
"""Type in a schema -> whether an argument is of that type. A Layout, a Device or a Generator is never accepted."""

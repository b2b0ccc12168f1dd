"""Random numbers by which Python decides while a module is traced: whether a layer is skipped in this call, say.

    number = torch.rand([])
    if number < self.layerdrop:      with layerdrop=0.0: never, whatever is drawn
        continue

A graph has one way through. So while a module is traced a comparison with such a number is decided where every number
in [0, 1) decides it alike, and refused elsewhere: the network would be another one from step to step. Numbers drawn by
NumPy or Python's `random` would be constants of the graph, so nothing but such a comparison may be done with them.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.sizes import at
from manyhands.graph.user_code import is_library

_HINT = (
    "Draw with torch and compute with what is drawn, as nn.Dropout does; give it to forward as an input; or turn it "
    "off: layerdrop=0.0 and apply_spec_augment=False in the configuration of a transformers network."
)
_COMPARISONS = {
    "__lt__": "<", "lt": "<", "less": "<", "__le__": "<=", "le": "<=", "less_equal": "<=",
    "__gt__": ">", "gt": ">", "greater": ">", "__ge__": ">=", "ge": ">=", "greater_equal": ">=",
}  # fmt: skip
_READINGS = frozenset({*_COMPARISONS, "item"})
_WATCHED = _READINGS | {"__bool__", "rand", "uniform_"}
"""Names of the functions that draw such a number, or read it: a traced module calls tens of thousands of others."""


@contextmanager
def decided_draws(module: nn.Module) -> Iterator[None]:
    """Decide comparisons of random numbers that are drawn in this context, where every number decides them alike, and
    refuse any other use of numbers that torch did not draw. `module` is what is traced."""
    with ExitStack() as stack:
        for names, name, replacement in _replacements(module):
            stack.enter_context(patch.dict(names, {name: replacement}))
        stack.enter_context(_TorchDraws())
        yield


def decided(comparison: str, number: float, low: float = 0.0, high: float = 1.0) -> bool | None:
    """Return what a comparison of any number in [low, high) with `number` gives; None: that depends on which."""
    if number >= high:
        return comparison in ("<", "<=")
    if number < low or (number == low and comparison in ("<", ">=")):
        return comparison in (">", ">=")
    return None


class _TorchDraws(TorchFunctionMode):
    """A mode that notes single uniform numbers, `torch.rand([])`, and decides what they are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[torch.Tensor, float, float]] = []
        """Tensors of one number, with its bounds."""
        self._undecided: list[tuple[torch.Tensor, str]] = []
        """Results of comparisons that depend on the number, with the comparisons."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _WATCHED:
            return function(*arguments, **(options or {}))
        if name == "__bool__":
            self._check_decided(arguments[0])
        first = arguments[0] if arguments else None
        drawn = next((noted for noted in self._drawn if noted[0] is first), None) if name in _READINGS else None
        if drawn is not None and name == "item":
            return DrawnNumber("torch as a Python number", *drawn[1:], _user_line(sys._getframe(1)))
        comparison, number = _COMPARISONS.get(name), arguments[1] if len(arguments) == 2 else None
        if drawn is not None and comparison is not None and isinstance(number, (int, float)):
            answer = decided(comparison, number, *drawn[1:])
            if answer is not None:
                return torch.tensor([answer] if drawn[0].dim() else answer)
        made = function(*arguments, **(options or {}))
        if drawn is not None:
            self._undecided.append((made, f"{comparison} {number if number is not None else 'a tensor'}"))
        if (bounds := _bounds_of(function, name, arguments[1:], options or {})) is not None and _is_one_number(made):
            self._drawn.append((made, *bounds))
        return made

    def _check_decided(self, tensor: Any) -> None:
        comparison = next((text for undecided, text in self._undecided if undecided is tensor), None)
        if comparison is not None:
            raise CaptureFailed(
                f"forward decides what it computes by a random number ({comparison}), so it would be another network "
                f"in every step.{at(_user_line(sys._getframe(1)))}",
                hint=_HINT,
            )


def _bounds_of(
    function: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[float, float] | None:
    """Return the bounds of the uniform numbers that a call draws, of its arguments after the first; None: it draws
    something else."""
    if function is torch.rand:
        return 0.0, 1.0
    if name != "uniform_" or "generator" in options:
        return None
    low, high = [*arguments, *(0.0, 1.0)[len(arguments) :]][:2]
    return _between(options.get("from", low), options.get("to", high))


def _is_one_number(made: Any) -> bool:
    return isinstance(made, torch.Tensor) and tuple(made.shape) in ((), (1,))


class DrawnNumber:
    """A number in [low, high) that Python or NumPy would draw: it may be compared where that is decided, no more."""

    def __init__(self, source: str, low: float, high: float, where: str) -> None:
        self._source, self._low, self._high, self._where = source, low, high, where

    def _compared(self, comparison: str, number: Any) -> bool:
        is_number = isinstance(number, (int, float))
        answer = decided(comparison, number, self._low, self._high) if is_number else None
        return self._refuse() if answer is None else answer

    def __lt__(self, number: Any) -> bool:
        return self._compared("<", number)

    def __le__(self, number: Any) -> bool:
        return self._compared("<=", number)

    def __gt__(self, number: Any) -> bool:
        return self._compared(">", number)

    def __ge__(self, number: Any) -> bool:
        return self._compared(">=", number)

    def _refuse(self, *_: Any) -> NoReturn:
        raise _refused(self._source, self._where)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _refuse
    __float__ = __int__ = __index__ = __bool__ = __array__ = __eq__ = __ne__ = __hash__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


def _refused(source: str, where: str) -> CaptureFailed:
    return CaptureFailed(
        f"forward draws random numbers with {source}, which no device could draw anew in every step.{at(where)}",
        hint=_HINT,
    )


_UNIFORM: dict[str, Callable[..., tuple[float, float]]] = {
    "random.random": lambda: (0.0, 1.0), "random.uniform": lambda a, b: _between(a, b),
    "numpy.random.random": lambda: (0.0, 1.0), "numpy.random.rand": lambda: (0.0, 1.0),
    "numpy.random.uniform": lambda low=0.0, high=1.0: _between(low, high),
}  # fmt: skip
"""Functions that draw a uniform number where they are given no size -> its bounds."""


def _between(first: float, second: float) -> tuple[float, float]:
    """Return the bounds of a number between two: rounding may give the upper one itself, unless that is 1."""
    low, high = min(first, second), max(first, second)
    return low, high if (low, high) == (0, 1) else math.nextafter(high, math.inf)


_DRAWS_NOTHING = ("seed", "get", "set")
"""The beginnings of the names of functions that do not draw."""


def _replacements(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """Yield the names by which the module's code may know functions of the two global generators, and what these are
    replaced by: (where the name is, the name, the replacement)."""
    generators = {id(random._inst): "random", id(numpy.random.mtrand._rand): "numpy.random"}
    forwards = [inspect.unwrap(type(part).forward) for part in module.modules()]
    places = [vars(random), vars(numpy.random), *(getattr(forward, "__globals__", {}) for forward in forwards)]
    for names in {id(names): names for names in places}.values():
        for name, function in list(names.items()):
            package = generators.get(id(getattr(function, "__self__", None)))
            draws = getattr(function, "__name__", "")
            if package is not None and callable(function) and not draws.startswith(_DRAWS_NOTHING):
                yield names, name, _drawing(f"{package}.{draws}", function)


def _drawing(source: str, function: Callable[..., Any]) -> Callable[..., Any]:
    tracing = threading.get_ident()

    def draw(*arguments: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        if threading.get_ident() != tracing or is_library(frame.f_code.co_filename):
            return function(*arguments, **options)
        where = _user_line(frame)
        try:
            low, high = map(float, _UNIFORM[source](*arguments, **options))
        except (KeyError, TypeError, ValueError):  # it draws something else
            raise _refused(source, where) from None
        return DrawnNumber(source, low, high, where)

    return draw


def _user_line(frame: Any) -> str:
    """Return 'PATH:LINE' of the innermost frame that is the user's own, from this one outwards."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""

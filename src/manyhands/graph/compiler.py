"""Keeps PyTorch from loading its compiler where nothing is compiled.

Optimizers and dispatch modes load `torch._dynamo`, for two seconds or more, only to mark some of their functions as not
to be compiled. Inside `without_compiler` a stand-in takes these marks. It gives way to the package itself as soon as
anything else of it is asked for, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
_MARK = "__dynamo_disable"
"""The attribute under which PyTorch keeps the marked function."""
_CONFIG = f"{COMPILER}.config"
"""A part that needs no other, and that is read to make a tensor without memory."""
_lock = threading.RLock()


class _StandIn(ModuleType):
    """Stands for the compiler's package: it marks functions by leaving them as they are."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.marked: list[Any] = []

    def disable(self, *arguments: Any, **options: Any) -> Any:
        """Leave a function of PyTorch's as it is; a mark of anybody else's is the compiler's own."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if not (asks == "torch" or asks.startswith("torch.")) or not arguments or not callable(arguments[0]):
            load_compiler()
            return sys.modules[COMPILER].disable(*arguments, **options)
        self.marked.append(arguments[0])
        return arguments[0]

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: no graph is under way."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []  # its parts are found by `_Parts`
        if name.startswith("__"):
            raise AttributeError(name)
        load_compiler()
        return getattr(sys.modules[COMPILER], name)


class _Parts:
    """Finds the parts of the compiler's package, by loading all of it in place of the stand-in; its settings alone are
    loaded by themselves."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if not name.startswith(f"{COMPILER}.") or not isinstance(sys.modules.get(COMPILER), _StandIn):
            return None
        if name == _CONFIG:
            return importlib.machinery.PathFinder.find_spec(name, [str(Path(torch.__file__).parent / "_dynamo")])
        load_compiler()
        return importlib.machinery.ModuleSpec(name, _Loaded())  # type: ignore[arg-type]


class _Loaded:
    """Hands out a part as the package has it."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has been loaded."""


_parts = _Parts()


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Do without the compiler in this context, unless something there needs it. Inside another such context, or where
    the compiler is there already, this changes nothing."""
    with _lock:
        is_outermost = COMPILER not in sys.modules
        if is_outermost:
            _install()
    try:
        yield
    finally:
        if is_outermost:
            _remove()


def leave_out_compiler() -> None:
    """Do without the compiler from now on, in a process that is this library's own, unless something needs it."""
    with _lock:
        if COMPILER not in sys.modules:
            _install()


def load_compiler() -> None:
    """Load the compiler, in place of the stand-in if that is there."""
    with _lock:
        _remove()
        with without_collecting():
            importlib.import_module(COMPILER)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Collect no garbage in this context, in which packages are loaded: of what they make nearly all stays, and looking
    through it again and again takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _install() -> None:
    stand_in = _StandIn()
    sys.modules[COMPILER] = stand_in
    torch.__dict__["_dynamo"] = stand_in
    sys.meta_path.insert(0, _parts)


def _remove() -> None:
    with _lock:
        stand_in = sys.modules.get(COMPILER)
        if not isinstance(stand_in, _StandIn):
            return
        del sys.modules[COMPILER]
        sys.modules.pop(_CONFIG, None)
        torch.__dict__.pop("_dynamo", None)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(_parts)
        for function in stand_in.marked:
            with contextlib.suppress(AttributeError):
                delattr(function, _MARK)

"""Hooks on a module that is trained elsewhere: whoever calls it or takes its state dict gets the current weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class CurrentWeights:
    """The hooks of a module and its parts, until they are removed. Parameters that are read directly are as they were
    when the weights were last loaded."""

    def __init__(self, module: nn.Module, refresh: Callable[[], None]) -> None:
        """`refresh`: a method that loads the current weights into the module; it is not kept alive."""
        hook = _Hook(weakref.WeakMethod(refresh))
        self._handles: list[Any] = []
        for part in module.modules():
            self._handles.append(part.register_forward_pre_hook(hook))
            self._handles.append(part.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook for both occasions; in a copy of the module it does nothing."""

    def __init__(self, refresh: Callable[[], Callable[[], None] | None] = lambda: None) -> None:
        self._refresh = refresh

    def __call__(self, *given: Any) -> None:
        refresh = self._refresh()
        if refresh is not None:
            refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()

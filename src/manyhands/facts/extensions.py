"""Packages of other authors that extend manyhands: installed on this device, and named by the user's own installation.

Such a package declares an entry point in the group `manyhands.sharing`, a function without arguments that registers
what it brings (`executor.sharing.register_sharing`, `planner.strategies.register_strategy`). It is loaded when a plan
or a strategy is named that is not known here, or when all strategies are compared. Plans name a way of sharing and
never carry its code: every device of a run must have the package.
"""

from __future__ import annotations

import threading
from importlib.metadata import entry_points

from manyhands.facts.errors import NotInstalled

GROUP = "manyhands.sharing"
INSTALL_HINT = (
    f"If another package brings it, install that on every device of the run; it declares an entry point of '{GROUP}'."
)
_lock = threading.RLock()
_loaded: set[str] = set()


def load_extensions() -> None:
    """Make every installed extension register what it brings; each is loaded once."""
    with _lock:
        for entry in entry_points(group=GROUP):
            if entry.value in _loaded:
                continue
            _loaded.add(entry.value)
            try:
                entry.load()()
            except Exception as error:  # another author's code
                raise NotInstalled(
                    f"The extension '{entry.name}' ({entry.value}) cannot be loaded: {error!s:.300}.",
                    hint="Install it again, or uninstall it.",
                ) from error
